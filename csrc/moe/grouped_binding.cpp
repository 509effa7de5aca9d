// fw_cuda::moe_grouped_linear: argument checks and the output.
#include <string>

#include "../common/binding.h"
#include "grouped.h"

namespace fusewright::moe {
namespace {

constexpr const char* kOp = "fw_cuda::moe_grouped_linear";

const int* check_index(const Tensor& t, const char* name, const Tensor& x, int64_t size) {
  check_device(kOp, t, name, x);
  if (t.dim() != 1 || t.size(0) != size || !t.is_contiguous() ||
      t.scalar_type() != ScalarType::Int) {
    fail(kOp, name, " has shape ", shape_of(t), ", expected a contiguous [", size, "] of int32");
  }
  return static_cast<const int*>(t.data_ptr());
}

void check_weight(const Tensor& weight, const Tensor& x, int64_t halves) {
  check_device(kOp, weight, "weight", x);
  if (weight.dim() != 3 || !weight.is_contiguous() || !is_aligned(weight) ||
      weight.scalar_type() != ScalarType::BFloat16) {
    fail(kOp, "weight has shape ", shape_of(weight), ", expected a contiguous [experts, rows, ",
         x.size(1), "] of bfloat16 on an address that is a multiple of 16");
  }
  const int64_t experts = weight.size(0), rows = weight.size(1), columns = weight.size(2);
  if (columns != x.size(1) || columns % kGroupedLine != 0 || rows % (kGroupedLine * halves) != 0 ||
      columns < 1 || rows < 1 || rows >= int64_t{1} << 30 || columns >= int64_t{1} << 30) {
    fail(kOp, "weight ", shape_of(weight), " and x ", shape_of(x),
         ", expected the same in_features and as many out_features, multiples of ", kGroupedLine);
  }
  if (experts < 1 || experts > kMaxGroupedExperts) {
    fail(kOp, "weight has ", experts, " experts, expected 1 to ", kMaxGroupedExperts);
  }
}

Tensor moe_grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& order,
                          const Tensor& offsets, int64_t slots_a_row, const std::string& activation,
                          bool x_sorted, bool y_sorted) {
  if (!x.is_cuda()) fail(kOp, "x is not on a CUDA device");
  check_matrix(kOp, x, "x", ScalarType::BFloat16);
  if (activation != "" && activation != "silu" && activation != "gelu_tanh") {
    fail(kOp, "activation is '", activation, "', expected '', 'silu' or 'gelu_tanh'");
  }
  GroupedArgs args = {};
  args.gated = activation != "";
  args.activation = activation == "gelu_tanh" ? Activation::kGeluTanhMul : Activation::kSiluMul;
  check_weight(weight, x, args.gated ? 2 : 1);
  const int64_t num_slots = order.dim() == 1 ? order.size(0) : -1;
  if (slots_a_row < 1 || x.size(0) * slots_a_row != num_slots || num_slots >= int64_t{1} << 30 ||
      (x_sorted && slots_a_row != 1)) {
    fail(kOp, "x ", shape_of(x), " with ", slots_a_row, " slots a row and order ", shape_of(order),
         ", expected fewer than 2^30 slots, and as many rows of x; with x_sorted, a row each");
  }
  args.order = check_index(order, "order", x, num_slots);
  args.offsets = check_index(offsets, "offsets", x, weight.size(0) + 1);
  args.x = static_cast<const __nv_bfloat16*>(x.data_ptr());
  args.weight = static_cast<const __nv_bfloat16*>(weight.data_ptr());
  args.num_slots = static_cast<int>(num_slots);
  args.num_experts = static_cast<int>(weight.size(0));
  args.in_features = static_cast<int>(weight.size(2));
  args.out_features = static_cast<int>(weight.size(1) / (args.gated ? 2 : 1));
  args.x_rows = static_cast<int>(x.size(0));
  args.slots_a_row = static_cast<int>(slots_a_row);
  args.x_row_stride = x.size(0) > 1 ? x.stride(0) : x.size(1);
  args.x_sorted = x_sorted;
  args.y_sorted = y_sorted;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor y = empty({num_slots, args.out_features}, dtype_of(x), x);
  args.y = static_cast<__nv_bfloat16*>(y.data_ptr());
  if (num_slots == 0) return y;
  const cudaStream_t stream = current_stream(x.get_device_index());
  const cudaError_t error = launch_grouped(args, is_capturing(kOp, stream), stream);
  if (error != cudaSuccess) {
    fail(kOp, "launch on ", shape_of(x), " failed: ", cudaGetErrorString(error));
  }
  return y;
}

}  // namespace
}  // namespace fusewright::moe

STABLE_TORCH_LIBRARY_FRAGMENT(fw_cuda, m) {
  m.def(
      "moe_grouped_linear(Tensor x, Tensor weight, Tensor order, Tensor offsets, "
      "int slots_a_row=1, str activation=\"\", bool x_sorted=False, bool y_sorted=False) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fw_cuda, CUDA, m) {
  m.impl("moe_grouped_linear", TORCH_BOX(&fusewright::moe::moe_grouped_linear));
}
