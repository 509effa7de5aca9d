// fw_cuda::add_rms_norm: argument checks, outputs and the choice of type; the work is in the
// header.
#include <tuple>

#include "../common/binding.h"
#include "add_rms_norm.cuh"

namespace fusewright::norm {
namespace {

constexpr const char* kOp = "fw_cuda::add_rms_norm";

void check_matrix(const Tensor& t, const char* name, const Tensor& x) {
  if (t.dim() != 2 || x.dim() != 2 || t.size(0) != x.size(0) || t.size(1) != x.size(1)) {
    fail(kOp, name, " has shape ", shape_of(t), ", expected [num_tokens, hidden] as x ",
         shape_of(x));
  }
  if (t.size(1) > 1 && t.stride(1) != 1) {
    fail(kOp, name, " ", shape_of(t), " has stride ", t.stride(1),
         " in its last dimension, expected 1: call .contiguous()");
  }
}

void check_like(const Tensor& t, const char* name, const Tensor& x) {
  if (t.scalar_type() != x.scalar_type()) {
    fail(kOp, name, " has another dtype than x, expected the same for x, residual and weight");
  }
  if (!t.is_cuda() || t.get_device_index() != x.get_device_index()) {
    fail(kOp, name, " is not on x's device, cuda:", x.get_device_index());
  }
}

template <typename T>
void run(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, const Tensor& y,
         const Tensor& residual_out) {
  AddRmsNormArgs<T> args;
  args.x = static_cast<const T*>(x.data_ptr());
  args.residual = static_cast<const T*>(residual.data_ptr());
  args.weight = static_cast<const T*>(weight.data_ptr());
  args.y = static_cast<T*>(y.data_ptr());
  args.residual_out = static_cast<T*>(residual_out.data_ptr());
  args.num_tokens = x.size(0);
  args.hidden = static_cast<int>(x.size(1));
  args.x_row_stride = x.stride(0);
  args.residual_row_stride = residual.stride(0);
  args.eps = static_cast<float>(eps);
  const cudaError_t error = launch_add_rms_norm(args, current_stream(x.get_device_index()));
  if (error != cudaSuccess) {
    fail(kOp, "launch on x ", shape_of(x), " failed: ", cudaGetErrorString(error));
  }
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const Tensor& weight, double eps) {
  if (!x.is_cuda()) fail(kOp, "x is not on a CUDA device");
  check_matrix(x, "x", x);
  check_matrix(residual, "residual", x);
  check_like(residual, "residual", x);
  check_like(weight, "weight", x);
  const int64_t num_tokens = x.size(0), hidden = x.size(1);
  if (hidden < 1 || hidden > kMaxHidden) {
    fail(kOp, "hidden of x ", shape_of(x), " is ", hidden, ", expected 1 to ", kMaxHidden);
  }
  if (num_tokens >= int64_t{1} << 31) {
    fail(kOp, "num_tokens of x ", shape_of(x), " is ", num_tokens, ", expected less than 2^31");
  }
  if (weight.dim() != 1 || weight.size(0) != hidden || !weight.is_contiguous()) {
    fail(kOp, "weight has shape ", shape_of(weight), ", expected a contiguous [", hidden, "]");
  }

  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor y = empty_matrix(num_tokens, hidden, x);
  const Tensor residual_out = empty_matrix(num_tokens, hidden, x);
  if (num_tokens == 0) return {y, residual_out};
  switch (x.scalar_type()) {
    case ScalarType::BFloat16:
      run<__nv_bfloat16>(x, residual, weight, eps, y, residual_out);
      break;
    case ScalarType::Half:
      run<__half>(x, residual, weight, eps, y, residual_out);
      break;
    case ScalarType::Float:
      run<float>(x, residual, weight, eps, y, residual_out);
      break;
    default:
      fail(kOp, "x ", shape_of(x), " has an unsupported dtype of ", x.element_size(),
           " bytes, expected bfloat16, float16 or float32");
  }
  return {y, residual_out};
}

}  // namespace
}  // namespace fusewright::norm

STABLE_TORCH_LIBRARY_FRAGMENT(fw_cuda, m) {
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fw_cuda, CUDA, m) {
  m.impl("add_rms_norm", TORCH_BOX(&fusewright::norm::add_rms_norm));
}
