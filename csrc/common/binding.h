// What every binding shares: checks that name the op, the stream to launch on, results. Bindings
// are plain C++, compiled without nvcc: kernels are behind the functions of decode.h and its like.
// Only torch's stable ABI is used (TORCH_TARGET_VERSION in CMakeLists.txt), so that one build
// serves every torch from 2.11 on.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace fusewright {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws "<op>: <parts>"; Python sees a RuntimeError. Called behind an `if`, so that a call without
// a mistake formats nothing.
template <typename... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

inline std::string shape_of(const Tensor& t) {
  std::string text = "[";
  for (int64_t d = 0; d < t.dim(); ++d) {
    text += (d ? ", " : "") + std::to_string(t.size(d));
  }
  return text + "]";
}

// Throws where a call of torch's C ABI failed. Our own: torch's macro for it has another name in
// 2.11 than in 2.13.
inline void check_torch(AOTITorchError error, const char* call) {
  if (error != 0) throw std::runtime_error(std::string("fusewright: torch's ") + call + " failed");
}

inline cudaStream_t current_stream(int32_t device_index) {
  void* stream = nullptr;
  check_torch(aoti_torch_get_current_cuda_stream(device_index, &stream), "current stream");
  return static_cast<cudaStream_t>(stream);
}

// A contiguous, uninitialized tensor on like's device.
template <int kDims>
Tensor empty(const int64_t (&sizes)[kDims], int32_t dtype, const Tensor& like) {
  int64_t strides[kDims];
  strides[kDims - 1] = 1;
  for (int d = kDims - 1; d > 0; --d) strides[d - 1] = strides[d] * sizes[d];
  AtenTensorHandle handle = nullptr;
  check_torch(aoti_torch_empty_strided(kDims, sizes, strides, dtype, aoti_torch_device_type_cuda(),
                                       like.get_device_index(), &handle),
              "allocation");
  return Tensor(handle);
}

inline int32_t dtype_of(const Tensor& t) {
  int32_t dtype = 0;
  check_torch(aoti_torch_get_dtype(t.get(), &dtype), "dtype of a tensor");
  return dtype;
}

}  // namespace fusewright
