// fw_cuda::skinny_linear: argument checks and the output; the work is in the header.
#include <optional>

#include "../common/binding.h"
#include "skinny_linear.cuh"

namespace fusewright::gemm {
namespace {

constexpr const char* kOp = "fw_cuda::skinny_linear";

void check_matrix(const Tensor& t, const char* name) {
  if (t.dim() != 2 || t.scalar_type() != ScalarType::BFloat16) {
    fail(kOp, name, " has shape ", shape_of(t), " and elements of ", t.element_size(),
         " bytes, expected two dimensions of bfloat16");
  }
  const bool rows_apart = t.size(0) > 1;
  if (t.stride(1) != 1 || (rows_apart && (t.stride(0) % 8 != 0 || t.stride(0) < t.size(1))) ||
      reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 != 0) {
    fail(kOp, name, " ", shape_of(t), " has strides [", t.stride(0), ", ", t.stride(1),
         "], expected rows without gaps inside, a multiple of 8 elements apart, on an address that "
         "is a multiple of 16: call .contiguous()");
  }
}

void check_device(const Tensor& t, const char* name, const Tensor& x) {
  if (!t.is_cuda() || t.get_device_index() != x.get_device_index()) {
    fail(kOp, name, " is not on x's device, cuda:", x.get_device_index());
  }
}

// Under capture a weight is what it was before the graph and stays so; outside it may be the result
// of the kernel just launched.
bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error != cudaSuccess) fail(kOp, "no capture status: ", cudaGetErrorString(error));
  return status == cudaStreamCaptureStatusActive;
}

Tensor skinny_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (!x.is_cuda()) fail(kOp, "x is not on a CUDA device");
  check_matrix(x, "x");
  check_matrix(weight, "weight");
  check_device(weight, "weight", x);
  const int64_t num_tokens = x.size(0), in_features = x.size(1), out_features = weight.size(0);
  if (weight.size(1) != in_features) {
    fail(kOp, "x ", shape_of(x), " and weight ", shape_of(weight), " differ in in_features");
  }
  if (in_features < kLine || in_features % kLine != 0 || in_features >= int64_t{1} << 31 ||
      out_features >= int64_t{1} << 28) {
    fail(kOp, "weight has shape ", shape_of(weight), ", expected in_features a multiple of ", kLine,
         " and less than 2^31, out_features less than 2^28");
  }
  if (num_tokens > kMaxSkinnyTokens) {
    fail(kOp, "x ", shape_of(x), " has ", num_tokens, " rows, expected ", kMaxSkinnyTokens,
         " or fewer");
  }
  if (bias) {
    check_device(*bias, "bias", x);
    if (bias->dim() != 1 || bias->size(0) != out_features || !bias->is_contiguous() ||
        bias->scalar_type() != ScalarType::BFloat16) {
      fail(kOp, "bias has shape ", shape_of(*bias), ", expected a contiguous [", out_features,
           "] of bfloat16");
    }
  }

  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor y = empty_matrix(num_tokens, out_features, x);
  if (num_tokens == 0 || out_features == 0) return y;
  SkinnyLinearArgs args;
  args.x = static_cast<const __nv_bfloat16*>(x.data_ptr());
  args.weight = static_cast<const __nv_bfloat16*>(weight.data_ptr());
  args.bias = bias ? static_cast<const __nv_bfloat16*>(bias->data_ptr()) : nullptr;
  args.y = static_cast<__nv_bfloat16*>(y.data_ptr());
  args.num_tokens = static_cast<int>(num_tokens);
  args.out_features = static_cast<int>(out_features);
  args.in_features = static_cast<int>(in_features);
  // The stride of a single row means nothing, and need not be one that the copies accept.
  args.x_row_stride = num_tokens > 1 ? x.stride(0) : in_features;
  args.weight_row_stride = out_features > 1 ? weight.stride(0) : in_features;
  const cudaStream_t stream = current_stream(x.get_device_index());
  const cudaError_t error = launch_skinny_linear(args, is_capturing(stream), stream);
  if (error != cudaSuccess) {
    fail(kOp, "launch on x ", shape_of(x), " and weight ", shape_of(weight),
         " failed: ", cudaGetErrorString(error));
  }
  return y;
}

}  // namespace
}  // namespace fusewright::gemm

STABLE_TORCH_LIBRARY_FRAGMENT(fw_cuda, m) {
  m.def("skinny_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fw_cuda, CUDA, m) {
  m.impl("skinny_linear", TORCH_BOX(&fusewright::gemm::skinny_linear));
}
