// fw_cuda::packed_*: argument checks and the outputs.
#include <algorithm>
#include <bit>
#include <optional>
#include <string>
#include <tuple>

#include "layer.h"

namespace fusewright::gemm {
namespace {

constexpr const char* kPacked = "fw_cuda::packed_linear";
constexpr const char* kPackedAddNorm = "fw_cuda::packed_linear_add_norm_linear";

// A weight of four bits: [rows, in_features / 2] of uint8, unsigned integers less 8 or less zero
// points, or, if `floats`, E2M1; with scales of groups, or of rows, or both.
struct PackedWeight {
  const Tensor& weight;
  const Tensor& scale;
  const std::optional<Tensor>& zero;
  const std::optional<Tensor>& row_scale;
  bool floats;
};

// The kernel's format for scales of `columns` columns, or an error.
Operands packed_operands(const char* op, const PackedWeight& packed, int64_t groups,
                         int64_t columns) {
  const ScalarType type = packed.scale.scalar_type();
  const bool zero = packed.zero.has_value(), row_scale = packed.row_scale.has_value();
  if (packed.floats && !zero) {
    const bool exponents = type == ScalarType::Float8_e8m0fnu;
    if (exponents && columns == 32 && !row_scale) return Operands::kMxFp4;
    if (type == ScalarType::Float8_e4m3fn && columns == 16 && row_scale) return Operands::kNvFp4;
  } else if (!packed.floats && !row_scale) {
    const bool half = type == ScalarType::Half;
    if (half && columns == 128) return Operands::kInt4;
    if (half && !zero && (columns == 32 || columns == 64)) return Operands::kInt4SmallGroups;
    if (type == ScalarType::Float && groups == 1 && !zero) return Operands::kInt4Channel;
  }
  fail(op, "weight_scale has shape ", shape_of(packed.scale), " and elements of ",
       packed.scale.element_size(), " bytes for ", columns, " columns each, ",
       zero ? "with" : "without", " zero points, ", row_scale ? "with" : "without",
       " scales of rows: expected float16 for 128 columns, or without zero points for 32 or 64; "
       "float32 for whole rows; of E2M1 float8_e8m0fnu for 32, or float8_e4m3fn for 16 beside "
       "scales of rows");
}

Layer describe_packed(const char* op, const Tensor& x, const PackedWeight& packed,
                      Epilogue epilogue, int64_t max_tokens) {
  const auto& [weight, scale, zero, row_scale, floats] = packed;
  if (!x.is_cuda()) fail(op, "x is not on a CUDA device");
  check_matrix(op, x, "x", ScalarType::BFloat16);
  check_matrix(op, weight, "weight", ScalarType::Byte);
  check_device(op, weight, "weight", x);
  check_device(op, scale, "weight_scale", x);
  const int64_t num_tokens = x.size(0), in_features = x.size(1), rows = weight.size(0);
  if (2 * weight.size(1) != in_features || in_features % (2 * kLineBytes) != 0 ||
      in_features == 0 || in_features >= int64_t{1} << 28 || rows >= int64_t{1} << 28) {
    fail(op, "x ", shape_of(x), " and weight ", shape_of(weight),
         ", expected a weight of half as many columns, which are a multiple of ", kLineBytes,
         ", and less than 2^28 of each");
  }
  const int64_t groups = scale.dim() == 2 ? scale.size(1) : 0;
  if (groups == 0 || in_features % groups != 0 || scale.size(0) != rows || !scale.is_contiguous()) {
    fail(op, "weight_scale has shape ", shape_of(scale), ", expected a contiguous [", rows,
         ", groups]");
  }
  const int64_t columns = in_features / groups;
  const Operands operands = packed_operands(op, packed, groups, columns);
  const bool for_many = operands == Operands::kInt4 || operands == Operands::kMxFp4;
  const int64_t most = for_many ? max_tokens : std::min<int64_t>(max_tokens, kMaxWideTokens);
  if (num_tokens > most) {
    fail(op, "x ", shape_of(x), " has ", num_tokens, " rows, expected ", most, " or fewer");
  }
  SkinnyLinearArgs args = operands_of(op, x, weight, epilogue);
  args.group.scale = scale.data_ptr();
  args.group.count = static_cast<int>(groups);
  args.group.log2_columns = groups == 1 ? 31 : std::countr_zero(static_cast<uint64_t>(columns));
  if (zero) {
    check_device(op, *zero, "weight_zero", x);
    if (shape_of(*zero) != shape_of(scale) || zero->scalar_type() != ScalarType::Half ||
        !zero->is_contiguous()) {
      fail(op, "weight_zero has shape ", shape_of(*zero), ", expected float16 of the shape ",
           shape_of(scale), " of weight_scale, contiguous");
    }
    args.group.zero = zero->data_ptr();
  }
  if (operands == Operands::kInt4Channel || operands == Operands::kNvFp4) {
    const Tensor& of_rows = row_scale ? *row_scale : scale;
    check_scale(op, of_rows, "the scale of rows", x);
    if (!is_dense(of_rows, rows, 1, false)) {
      fail(op, "the scale of rows has shape ", shape_of(of_rows), ", expected [", rows, ", 1]");
    }
    args.weight_scale = static_cast<const float*>(of_rows.data_ptr());
    args.weight_scale_stride = 1;
  }
  return {args, operands};
}

Tensor packed_linear(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                     const std::optional<Tensor>& weight_zero,
                     const std::optional<Tensor>& weight_row_scale,
                     const std::optional<Tensor>& bias, bool floats,
                     const std::optional<std::string>& activation) {
  const PackedWeight packed{weight, weight_scale, weight_zero, weight_row_scale, floats};
  Layer layer =
      describe_packed(kPacked, x, packed, epilogue_of(kPacked, activation), kMaxPackedTokens);
  add_bias(kPacked, layer.args, bias, ScalarType::BFloat16, x);
  return run_bf16(kPacked, layer, x, weight);
}

// Two layers: (y of the second, the sum of the first and the residual).
std::tuple<Tensor, Tensor> packed_linear_add_norm_linear(
    const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
    const std::optional<Tensor>& weight_zero, const std::optional<Tensor>& weight_row_scale,
    const std::optional<Tensor>& bias, bool floats, const Tensor& residual,
    const Tensor& norm_weight, double eps, double norm_offset, const Tensor& next_weight,
    const Tensor& next_scale, const std::optional<Tensor>& next_zero,
    const std::optional<Tensor>& next_row_scale, const std::optional<Tensor>& next_bias,
    bool next_floats, const std::optional<std::string>& activation) {
  const char* op = kPackedAddNorm;
  const PackedWeight packed{weight, weight_scale, weight_zero, weight_row_scale, floats};
  const PackedWeight next{next_weight, next_scale, next_zero, next_row_scale, next_floats};
  const Layer layer = describe_packed(op, x, packed, Epilogue::kAdd, kMaxWideTokens);
  const Added first =
      add(op, layer, x, weight, bias, residual, norm_weight, std::nullopt, 1.0, norm_offset);
  const Layer behind =
      describe_packed(op, first.weighted, next, epilogue_of(op, activation), kMaxWideTokens);
  return {norm_linear(op, behind, first.weighted, first.squares, eps, next_weight, next_bias),
          first.total};
}

}  // namespace
}  // namespace fusewright::gemm

STABLE_TORCH_LIBRARY_FRAGMENT(fw_cuda, m) {
  m.def(
      "packed_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? weight_zero, "
      "Tensor? weight_row_scale, Tensor? bias, bool floats, str? activation=None) -> Tensor");
  m.def(
      "packed_linear_add_norm_linear(Tensor x, Tensor weight, Tensor weight_scale, "
      "Tensor? weight_zero, Tensor? weight_row_scale, Tensor? bias, bool floats, Tensor residual, "
      "Tensor norm_weight, float eps, float norm_offset, Tensor next_weight, Tensor next_scale, "
      "Tensor? next_zero, Tensor? next_row_scale, Tensor? next_bias, bool next_floats, "
      "str? activation=None) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fw_cuda, CUDA, m) {
  m.impl("packed_linear", TORCH_BOX(&fusewright::gemm::packed_linear));
  m.impl("packed_linear_add_norm_linear",
         TORCH_BOX(&fusewright::gemm::packed_linear_add_norm_linear));
}
