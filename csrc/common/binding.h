// What every binding shares: checks that name the op, and the stream to launch on.
// Only torch's stable ABI is used (TORCH_TARGET_VERSION in CMakeLists.txt), so that one build
// serves every torch from 2.11 on.
#pragma once

#include <cuda_runtime.h>
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

inline cudaStream_t current_stream(int32_t device_index) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

// A contiguous, uninitialized [rows, cols] tensor of like's dtype on like's device.
inline Tensor empty_matrix(int64_t rows, int64_t cols, const Tensor& like) {
  const int64_t sizes[] = {rows, cols};
  const int64_t strides[] = {cols, 1};
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      2, sizes, strides, dtype, aoti_torch_device_type_cuda(), like.get_device_index(), &handle));
  return Tensor(handle);
}

}  // namespace fusewright
