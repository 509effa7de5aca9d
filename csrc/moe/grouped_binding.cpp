// fw_cuda::moe_grouped_linear: argument checks and the output.
#include <optional>
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

void check_weight(const Tensor& weight, const Tensor& x, int64_t halves, ScalarType dtype,
                  int64_t line) {
  check_device(kOp, weight, "weight", x);
  if (weight.dim() != 3 || !weight.is_contiguous() || !is_aligned(weight) ||
      weight.scalar_type() != dtype) {
    fail(kOp, "weight has shape ", shape_of(weight), ", expected a contiguous [experts, rows, ",
         x.size(1), "] of x's type on an address that is a multiple of 16");
  }
  const int64_t experts = weight.size(0), rows = weight.size(1), columns = weight.size(2);
  if (columns != x.size(1) || columns % line != 0 || rows % (kGroupedLine * halves) != 0 ||
      columns < 1 || rows < 1 || rows >= int64_t{1} << 30 || columns >= int64_t{1} << 30) {
    fail(kOp, "weight ", shape_of(weight), " and x ", shape_of(x),
         ", expected the same in_features, multiples of ", line,
         ", and out_features, multiples of ", kGroupedLine);
  }
  if (experts < 1 || experts > kMaxGroupedExperts) {
    fail(kOp, "weight has ", experts, " experts, expected 1 to ", kMaxGroupedExperts);
  }
}

void check_floats(const Tensor& t, const char* name, const Tensor& x) {
  check_device(kOp, t, name, x);
  if (t.scalar_type() != ScalarType::Float) fail(kOp, name, " is not of float32");
}

// Sets what the scales belong to, and where they are.
void describe_scales(GroupedArgs& args, const Tensor& x, const Tensor& weight,
                     const Tensor& x_scale, const Tensor& weight_scale, int64_t halves) {
  check_floats(x_scale, "x_scale", x);
  check_floats(weight_scale, "weight_scale", x);
  const int64_t experts = weight.size(0), rows = weight.size(1);
  const int64_t groups = weight.size(2) / kScaleBlock;
  const bool three =
      weight_scale.dim() == 3 && weight_scale.is_contiguous() && weight_scale.size(0) == experts;
  const bool of_rows = three && weight_scale.size(1) == rows && weight_scale.size(2) == 1;
  const bool of_blocks = three && rows % (kScaleBlock * halves) == 0 &&
                         weight_scale.size(1) == rows / kScaleBlock &&
                         weight_scale.size(2) == groups;
  if (!of_rows && !of_blocks) {
    fail(kOp, "weight ", shape_of(weight), " has weight_scale ", shape_of(weight_scale),
         ", expected a contiguous [", experts, ", ", rows, ", 1], or [", experts, ", ",
         rows / kScaleBlock, ", ", groups, "] and a multiple of ", kScaleBlock, " out_features");
  }
  const int64_t of_row = of_rows ? 1 : groups;
  if (x_scale.dim() != 2 || x_scale.size(0) != x.size(0) || x_scale.size(1) != of_row) {
    fail(kOp, "x_scale has shape ", shape_of(x_scale), ", expected [", x.size(0), ", ", of_row,
         "]");
  }
  args.scales = of_rows ? Scales::kRows : Scales::kBlocks;
  args.x_scale = static_cast<const float*>(x_scale.data_ptr());
  args.weight_scale = static_cast<const float*>(weight_scale.data_ptr());
  args.x_scale_row = x_scale.stride(0);
  args.x_scale_group = x_scale.stride(1);
}

Tensor moe_grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& order,
                          const Tensor& offsets, int64_t slots_a_row, const std::string& activation,
                          bool x_sorted, bool y_sorted, const std::optional<Tensor>& x_scale,
                          const std::optional<Tensor>& weight_scale) {
  if (!x.is_cuda()) fail(kOp, "x is not on a CUDA device");
  if (x_scale.has_value() != weight_scale.has_value()) {
    fail(kOp, "one of x_scale and weight_scale is given, expected both or none");
  }
  const ScalarType dtype = x_scale ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16;
  check_matrix(kOp, x, "x", dtype);
  if (activation != "" && activation != "silu" && activation != "gelu_tanh") {
    fail(kOp, "activation is '", activation, "', expected '', 'silu' or 'gelu_tanh'");
  }
  GroupedArgs args = {};
  args.gated = activation != "";
  args.activation = activation == "gelu_tanh" ? Activation::kGeluTanhMul : Activation::kSiluMul;
  const int64_t halves = args.gated ? 2 : 1;
  check_weight(weight, x, halves, dtype, x_scale ? kScaleBlock : kGroupedLine);
  if (x_scale) describe_scales(args, x, weight, *x_scale, *weight_scale, halves);
  const int64_t num_slots = order.dim() == 1 ? order.size(0) : -1;
  if (slots_a_row < 1 || x.size(0) * slots_a_row != num_slots || num_slots >= int64_t{1} << 30 ||
      (x_sorted && slots_a_row != 1)) {
    fail(kOp, "x ", shape_of(x), " with ", slots_a_row, " slots a row and order ", shape_of(order),
         ", expected fewer than 2^30 slots, and as many rows of x; with x_sorted, a row each");
  }
  args.order = check_index(order, "order", x, num_slots);
  args.offsets = check_index(offsets, "offsets", x, weight.size(0) + 1);
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  args.num_slots = static_cast<int>(num_slots);
  args.num_experts = static_cast<int>(weight.size(0));
  args.in_features = static_cast<int>(weight.size(2));
  args.out_features = static_cast<int>(weight.size(1) / halves);
  args.x_rows = static_cast<int>(x.size(0));
  args.slots_a_row = static_cast<int>(slots_a_row);
  args.x_row_stride = x.size(0) > 1 ? x.stride(0) : x.size(1);
  args.x_sorted = x_sorted;
  args.y_sorted = y_sorted;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor y = empty({num_slots, args.out_features}, aoti_torch_dtype_bfloat16(), x);
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
      "int slots_a_row=1, str activation=\"\", bool x_sorted=False, bool y_sorted=False, "
      "Tensor? x_scale=None, Tensor? weight_scale=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fw_cuda, CUDA, m) {
  m.impl("moe_grouped_linear", TORCH_BOX(&fusewright::moe::moe_grouped_linear));
}
