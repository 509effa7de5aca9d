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

inline bool is_aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
}

// Rows of bfloat16, FP8 or bytes that copies of 16 bytes reach.
inline void check_matrix(const char* op, const Tensor& t, const char* name, ScalarType dtype) {
  if (t.dim() != 2 || t.scalar_type() != dtype) {
    fail(op, name, " has shape ", shape_of(t), " and elements of ", t.element_size(),
         " bytes, expected two dimensions of ",
         dtype == ScalarType::BFloat16 ? "bfloat16"
         : dtype == ScalarType::Byte   ? "uint8"
                                       : "float8_e4m3fn");
  }
  const int64_t unit = 16 / t.element_size();
  const bool rows_apart = t.size(0) > 1;
  if (t.stride(1) != 1 || (rows_apart && (t.stride(0) % unit != 0 || t.stride(0) < t.size(1))) ||
      !is_aligned(t)) {
    fail(op, name, " ", shape_of(t), " has strides [", t.stride(0), ", ", t.stride(1),
         "], expected rows without gaps inside, a multiple of ", unit,
         " elements apart, on an address that is a multiple of 16: call .contiguous()");
  }
}

inline void check_device(const char* op, const Tensor& t, const char* name, const Tensor& x) {
  if (!t.is_cuda() || t.get_device_index() != x.get_device_index()) {
    fail(op, name, " is not on x's device, cuda:", x.get_device_index());
  }
}

// Under capture a weight is what it was before the graph and stays so; outside it may be the result
// of the kernel just launched.
inline bool is_capturing(const char* op, cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error != cudaSuccess) fail(op, "no capture status: ", cudaGetErrorString(error));
  return status == cudaStreamCaptureStatusActive;
}

}  // namespace fusewright
