// fw_cuda::moe_packed_* and moe_sum_norm: argument checks and outputs.
#include <bit>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>

#include "../common/binding.h"
#include "grouped.h"
#include "packed.h"

namespace fusewright::moe {
namespace {

constexpr const char* kOp = "fw_cuda::moe_packed_linear";
constexpr const char* kSum = "fw_cuda::moe_sum_norm";

const int* check_index(const Tensor& t, const char* name, const Tensor& x, int64_t size) {
  check_device(kOp, t, name, x);
  if (t.dim() != 1 || t.size(0) != size || !t.is_contiguous() ||
      t.scalar_type() != ScalarType::Int) {
    fail(kOp, name, " has shape ", shape_of(t), ", expected a contiguous [", size, "] of int32");
  }
  return static_cast<const int*>(t.data_ptr());
}

// Checks the weight, whose rows are a multiple of `step`, its scales and its bias.
template <typename Args>
void check_weight(Args& args, const Tensor& x, const Tensor& weight, const Tensor& scale,
                  const std::optional<Tensor>& bias, bool floats, int64_t step) {
  check_device(kOp, weight, "weight", x);
  check_device(kOp, scale, "weight_scale", x);
  if (weight.dim() != 3 || !weight.is_contiguous() || !is_aligned(weight) ||
      weight.scalar_type() != ScalarType::Byte || 2 * weight.size(2) != x.size(1) ||
      x.size(1) % 64 != 0 || x.size(1) > 16384 || weight.size(1) % step != 0 ||
      weight.size(0) < 1 || weight.size(0) > kMaxPackedExperts ||
      weight.size(1) >= int64_t{1} << 24) {
    fail(kOp, "weight ", shape_of(weight), " and x ", shape_of(x),
         ", expected a contiguous [experts, rows, columns / 2] of uint8 on an address that is a "
         "multiple of 16, columns a multiple of 64 up to 16384, rows of ",
         step, ", and ", kMaxPackedExperts, " or fewer experts");
  }
  const int64_t experts = weight.size(0), rows = weight.size(1);
  const int64_t groups = scale.dim() == 3 ? scale.size(2) : 0;
  const int64_t columns = groups ? x.size(1) / groups : 0;
  const ScalarType type = floats ? ScalarType::Float8_e8m0fnu : ScalarType::Half;
  if (groups == 0 || scale.size(0) != experts || scale.size(1) != rows || !scale.is_contiguous() ||
      !is_aligned(scale) || scale.scalar_type() != type || columns * groups != x.size(1) ||
      columns < 32 || !std::has_single_bit(static_cast<uint64_t>(columns)) ||
      groups * scale.element_size() % 2 != 0) {
    fail(kOp, "weight_scale has shape ", shape_of(scale), ", expected a contiguous [", experts,
         ", ", rows, ", groups] of ", floats ? "float8_e8m0fnu" : "float16",
         " for groups of 32, 64, 128 or more columns");
  }
  if (bias) {
    check_device(kOp, *bias, "bias", x);
    if (bias->dim() != 2 || bias->size(0) != experts || bias->size(1) != rows ||
        !bias->is_contiguous() || bias->scalar_type() != ScalarType::BFloat16) {
      fail(kOp, "bias has shape ", shape_of(*bias), ", expected a contiguous [", experts, ", ",
           rows, "] of bfloat16");
    }
    args.bias = static_cast<const __nv_bfloat16*>(bias->data_ptr());
  }
  args.weight = static_cast<const uint8_t*>(weight.data_ptr());
  args.num_experts = static_cast<int>(experts);
  args.in_features = static_cast<int>(x.size(1));
  args.out_features = static_cast<int>(args.gated ? rows / 2 : rows);
  args.groups = static_cast<int>(groups);
  args.log2_columns = std::countr_zero(static_cast<uint64_t>(columns));
}

void check_squares(PackedArgs& args, const Tensor& x, const Tensor& squares, double eps) {
  check_device(kOp, squares, "squares", x);
  const int64_t columns = x.size(1), groups = squares.dim() == 2 ? squares.size(1) : 0;
  if (!args.ids || squares.size(0) != x.size(0) || columns % 64 != 0 ||
      (groups * 16 != columns && groups * 8 != columns) || !squares.is_contiguous() ||
      !is_aligned(squares) || squares.scalar_type() != ScalarType::Float) {
    fail(kOp, "squares have shape ", shape_of(squares), " beside x ", shape_of(x),
         ", expected a contiguous row of float32 for each token, a number for every 8 or 16 "
         "columns, and unsorted slots");
  }
  args.squares = static_cast<const float*>(squares.data_ptr());
  args.num_square_groups = static_cast<int>(groups);
  args.eps = static_cast<float>(eps);
}

Gate gate_of(const std::string& activation, double alpha, const std::optional<double>& limit,
             double up_offset, bool interleaved) {
  if (activation != "" && activation != "silu" && activation != "gelu_tanh") {
    fail(kOp, "activation is '", activation, "', expected '', 'silu' or 'gelu_tanh'");
  }
  const auto kind = activation == "gelu_tanh" ? Activation::kGeluTanhMul : Activation::kSiluMul;
  return {kind, static_cast<float>(alpha), static_cast<float>(limit.value_or(INFINITY)),
          static_cast<float>(up_offset), interleaved};
}

// Without offsets, `chosen` are the experts of slots [tokens, top_k]; with them, slots by expert.
Tensor moe_packed_linear(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                         const std::optional<Tensor>& bias, const Tensor& chosen,
                         const std::optional<Tensor>& offsets, int64_t top_k, bool floats,
                         const std::string& activation, double alpha,
                         const std::optional<double>& limit, double up_offset, bool interleaved,
                         const std::optional<Tensor>& squares, double eps) {
  if (!x.is_cuda()) fail(kOp, "x is not on a CUDA device");
  check_matrix(kOp, x, "x", ScalarType::BFloat16);
  PackedArgs args = {};
  args.gated = activation != "";
  args.gate = gate_of(activation, alpha, limit, up_offset, interleaved);
  check_weight(args, x, weight, weight_scale, bias, floats, 16);
  args.scale = weight_scale.data_ptr();
  if (x.size(1) < kMinPackedColumns) {
    fail(kOp, "x ", shape_of(x), ", expected ", kMinPackedColumns, " columns or more");
  }
  const int64_t slots = chosen.numel();
  const int64_t slots_a_row = x.size(0) == slots ? 1 : top_k;
  const int64_t tokens = top_k > 0 ? slots / top_k : 0;
  if (top_k < 1 || top_k > kMaxTopK || tokens * top_k != slots || slots > kMaxPackedSlots ||
      x.size(0) * slots_a_row != slots) {
    fail(kOp, "x ", shape_of(x), " and chosen ", shape_of(chosen), " with top_k ", top_k,
         ", expected a row for each token or each choice, 1 to ", kMaxTopK, " choices, and ",
         kMaxPackedSlots, " or fewer in all");
  }
  if (offsets) {
    if (args.num_experts + slots / 8 > kMaxPackedEntries) {
      fail(kOp, "chosen ", shape_of(chosen), " of ", args.num_experts, " experts, expected ",
           kMaxPackedEntries, " or fewer experts and eights of slots");
    }
    args.order = check_index(chosen, "chosen", x, slots);
    args.offsets = check_index(*offsets, "offsets", x, args.num_experts + 1);
  } else {
    check_device(kOp, chosen, "chosen", x);
    if (!chosen.is_contiguous() || chosen.scalar_type() != ScalarType::Int || tokens > kMaxTokens) {
      fail(kOp, "chosen has shape ", shape_of(chosen), ", expected contiguous int32 of ",
           kMaxTokens, " or fewer tokens where there are no offsets");
    }
    args.ids = static_cast<const int*>(chosen.data_ptr());
  }
  if (squares) check_squares(args, x, *squares, eps);
  args.x = static_cast<const __nv_bfloat16*>(x.data_ptr());
  args.x_row_stride = x.size(0) > 1 ? x.stride(0) : x.size(1);
  args.num_slots = static_cast<int>(slots);
  args.top_k = static_cast<int>(top_k);
  args.slots_a_row = static_cast<int>(slots_a_row);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor y = empty({slots, args.out_features}, aoti_torch_dtype_bfloat16(), x);
  args.y = static_cast<__nv_bfloat16*>(y.data_ptr());
  if (slots == 0) return y;
  const cudaStream_t stream = current_stream(x.get_device_index());
  const PackedFormat format = floats ? PackedFormat::kMxFp4 : PackedFormat::kInt4;
  const cudaError_t error = launch_packed(args, format, is_capturing(kOp, stream), stream);
  if (error != cudaSuccess) {
    fail(kOp, "launch on ", shape_of(x), " failed: ", cudaGetErrorString(error));
  }
  return y;
}

// The same layer for more rows an expert. Rows of y are in the order of the sort with an
// activation, and rows of x without one.
Tensor moe_packed_grouped(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                          const std::optional<Tensor>& bias, const Tensor& order,
                          const Tensor& offsets, int64_t top_k, bool floats,
                          const std::string& activation, double alpha,
                          const std::optional<double>& limit, double up_offset, bool interleaved) {
  if (!x.is_cuda()) fail(kOp, "x is not on a CUDA device");
  check_matrix(kOp, x, "x", ScalarType::BFloat16);
  GroupedArgs args = {};
  args.gated = activation != "";
  args.gate = gate_of(activation, alpha, limit, up_offset, interleaved);
  check_weight(args, x, weight, weight_scale, bias, floats, args.gated ? 128 : 64);
  args.packed_scale = static_cast<const uint8_t*>(weight_scale.data_ptr());
  const int64_t slots = order.dim() == 1 ? order.size(0) : -1;
  args.slots_a_row = static_cast<int>(args.gated ? top_k : 1);
  if (top_k < 1 || x.size(0) * args.slots_a_row != slots || slots >= int64_t{1} << 30) {
    fail(kOp, "x ", shape_of(x), " and order ", shape_of(order), " with top_k ", top_k,
         ", expected a row for each token with an activation, else for each choice");
  }
  args.order = check_index(order, "order", x, slots);
  args.offsets = check_index(offsets, "offsets", x, args.num_experts + 1);
  args.x = x.data_ptr();
  args.num_slots = static_cast<int>(slots);
  args.x_rows = static_cast<int>(x.size(0));
  args.x_row_stride = x.size(0) > 1 ? x.stride(0) : x.size(1);
  args.x_sorted = !args.gated;
  args.y_sorted = args.gated;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor y = empty({slots, args.out_features}, aoti_torch_dtype_bfloat16(), x);
  args.y = static_cast<__nv_bfloat16*>(y.data_ptr());
  if (slots == 0) return y;
  const cudaStream_t stream = current_stream(x.get_device_index());
  const cudaError_t error = launch_packed_grouped(args, floats, is_capturing(kOp, stream), stream);
  if (error != cudaSuccess) {
    fail(kOp, "launch on ", shape_of(x), " failed: ", cudaGetErrorString(error));
  }
  return y;
}

const __nv_bfloat16* of_tokens(const std::optional<Tensor>& t, const char* name, const Tensor& y,
                               int64_t rows) {
  if (!t) return nullptr;
  check_device(kSum, *t, name, y);
  if (t->numel() != rows * y.size(1) || t->size(t->dim() - 1) != y.size(1) || !t->is_contiguous() ||
      !is_aligned(*t) || t->scalar_type() != ScalarType::BFloat16) {
    fail(kSum, name, " has shape ", shape_of(*t), ", expected a contiguous [", rows, ", ",
         y.size(1), "] of bfloat16");
  }
  return static_cast<const __nv_bfloat16*>(t->data_ptr());
}

// (the sum, that times the norm's weight, the sums of squares of every eight columns).
std::tuple<Tensor, Tensor, Tensor> moe_sum_norm(const Tensor& y, const Tensor& topk_weights,
                                                const Tensor& norm_weight,
                                                const std::optional<Tensor>& residual,
                                                const std::optional<Tensor>& shared) {
  if (!y.is_cuda()) fail(kSum, "y is not on a CUDA device");
  check_matrix(kSum, y, "y", ScalarType::BFloat16);
  check_device(kSum, topk_weights, "topk_weights", y);
  const int64_t tokens = topk_weights.dim() == 2 ? topk_weights.size(0) : 0;
  const int64_t top_k = tokens ? topk_weights.size(1) : 0, hidden = y.size(1);
  if (tokens * top_k != y.size(0) || top_k > kMaxTopK || hidden % 64 != 0 || !y.is_contiguous() ||
      !topk_weights.is_contiguous() || topk_weights.scalar_type() != ScalarType::Float) {
    fail(kSum, "y ", shape_of(y), " and topk_weights ", shape_of(topk_weights),
         ", expected contiguous [tokens * top_k, hidden] and [tokens, top_k] of float32, hidden a "
         "multiple of 64 and top_k ",
         kMaxTopK, " or less");
  }
  SumArgs args = {};
  args.y = static_cast<const __nv_bfloat16*>(y.data_ptr());
  args.topk_weights = static_cast<const float*>(topk_weights.data_ptr());
  args.norm_weight = of_tokens(norm_weight, "norm_weight", y, 1);
  args.residual = of_tokens(residual, "residual", y, tokens);
  args.shared = of_tokens(shared, "shared", y, tokens);
  args.num_tokens = static_cast<int>(tokens);
  args.top_k = static_cast<int>(top_k);
  args.hidden = static_cast<int>(hidden);
  const torch::stable::accelerator::DeviceGuard guard(y.get_device_index());
  const Tensor total = empty({tokens, hidden}, aoti_torch_dtype_bfloat16(), y);
  const Tensor weighted = empty({tokens, hidden}, aoti_torch_dtype_bfloat16(), y);
  const Tensor squares = empty({tokens, hidden / 8}, aoti_torch_dtype_float32(), y);
  args.total = static_cast<__nv_bfloat16*>(total.data_ptr());
  args.weighted = static_cast<__nv_bfloat16*>(weighted.data_ptr());
  args.squares = static_cast<float*>(squares.data_ptr());
  if (tokens == 0) return {total, weighted, squares};
  const cudaStream_t stream = current_stream(y.get_device_index());
  const cudaError_t error = launch_sum(args, is_capturing(kSum, stream), stream);
  if (error != cudaSuccess) {
    fail(kSum, "launch on ", shape_of(y), " failed: ", cudaGetErrorString(error));
  }
  return {total, weighted, squares};
}

}  // namespace
}  // namespace fusewright::moe

STABLE_TORCH_LIBRARY_FRAGMENT(fw_cuda, m) {
  m.def(
      "moe_packed_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, "
      "Tensor chosen, Tensor? offsets, int top_k, bool floats, str activation=\"\", "
      "float alpha=1.0, float? limit=None, float up_offset=0.0, bool interleaved=False, "
      "Tensor? squares=None, float eps=0.0) -> Tensor");
  m.def(
      "moe_packed_grouped(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, "
      "Tensor order, Tensor offsets, int top_k, bool floats, str activation=\"\", "
      "float alpha=1.0, float? limit=None, float up_offset=0.0, bool interleaved=False) "
      "-> Tensor");
  m.def(
      "moe_sum_norm(Tensor y, Tensor topk_weights, Tensor norm_weight, Tensor? residual=None, "
      "Tensor? shared=None) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fw_cuda, CUDA, m) {
  m.impl("moe_packed_linear", TORCH_BOX(&fusewright::moe::moe_packed_linear));
  m.impl("moe_packed_grouped", TORCH_BOX(&fusewright::moe::moe_packed_grouped));
  m.impl("moe_sum_norm", TORCH_BOX(&fusewright::moe::moe_sum_norm));
}
