// fw_cuda::skinny_*: argument checks and the outputs.
#include "../common/binding.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <string>
#include <tuple>

#include "../collective/groups.h"
#include "persistent.h"
#include "skinny.h"

namespace fusewright::gemm {
namespace {

constexpr const char* kLinear = "fw_cuda::skinny_linear";
constexpr const char* kAddNorm = "fw_cuda::skinny_linear_add_norm_linear";
constexpr const char* kAdd = "fw_cuda::skinny_linear_add";
constexpr const char* kNorm = "fw_cuda::skinny_norm_linear";
constexpr const char* kCluster = "fw_cuda::cluster_linear";
constexpr const char* kPacked = "fw_cuda::packed_linear";
constexpr const char* kPackedAddNorm = "fw_cuda::packed_linear_add_norm_linear";
constexpr const char* kPersistent = "fw_cuda::persistent_linear";

// The arguments but for scales, bias and outputs, checked.
SkinnyLinearArgs describe(const char* op, const Tensor& x, ScalarType x_dtype, const Tensor& weight,
                          ScalarType weight_dtype, Epilogue epilogue,
                          int64_t max_tokens = kMaxSkinnyTokens) {
  if (!x.is_cuda()) fail(op, "x is not on a CUDA device");
  check_matrix(op, x, "x", x_dtype);
  check_matrix(op, weight, "weight", weight_dtype);
  check_device(op, weight, "weight", x);
  const int64_t num_tokens = x.size(0), in_features = x.size(1), rows = weight.size(0);
  const int64_t line = kLineBytes / static_cast<int64_t>(weight.element_size());
  if (weight.size(1) != in_features) {
    fail(op, "x ", shape_of(x), " and weight ", shape_of(weight), " differ in in_features");
  }
  if (in_features < line || in_features % line != 0 || in_features >= int64_t{1} << 30 ||
      rows >= int64_t{1} << 28) {
    fail(op, "weight has shape ", shape_of(weight), ", expected in_features a multiple of ", line,
         " and less than 2^30, less than 2^28 rows");
  }
  if (num_tokens > max_tokens) {
    fail(op, "x ", shape_of(x), " has ", num_tokens, " rows, expected ", max_tokens, " or fewer");
  }
  SkinnyLinearArgs args = {};
  args.epilogue = epilogue;
  if (args.gated() && rows % 2 != 0) {
    fail(op, "weight has shape ", shape_of(weight), ", expected an even number of rows: gate, up");
  }
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  args.element = Element::kBFloat16;
  args.num_tokens = static_cast<int>(num_tokens);
  args.out_features = static_cast<int>(args.gated() ? rows / 2 : rows);
  args.in_features = static_cast<int>(in_features);
  // The stride of a single row means nothing, and need not be one that the copies accept.
  args.x_row_stride = num_tokens > 1 ? x.stride(0) : in_features;
  args.weight_row_stride = rows > 1 ? weight.stride(0) : in_features;
  return args;
}

void add_bias(const char* op, SkinnyLinearArgs& args, const std::optional<Tensor>& bias,
              ScalarType dtype, const Tensor& x) {
  if (!bias) return;
  check_device(op, *bias, "bias", x);
  const int64_t rows = int64_t{args.gated() ? 2 : 1} * args.out_features;
  if (bias->dim() != 1 || bias->size(0) != rows || !bias->is_contiguous() ||
      bias->scalar_type() != dtype) {
    fail(op, "bias has shape ", shape_of(*bias), ", expected a contiguous [", rows,
         "] of the dtype of the sums");
  }
  args.bias = bias->data_ptr();
}

// Calls `launch(programmatic, stream)`, unless there is nothing to compute.
template <typename Launch>
void run(const char* op, const SkinnyLinearArgs& args, const Tensor& x, const Tensor& weight,
         const Launch& launch) {
  if (args.num_tokens == 0 || args.out_features == 0) return;
  const cudaStream_t stream = current_stream(x.get_device_index());
  const cudaError_t error = launch(is_capturing(op, stream), stream);
  if (error != cudaSuccess) {
    fail(op, "launch on x ", shape_of(x), " and weight ", shape_of(weight),
         " failed: ", cudaGetErrorString(error));
  }
}

// Over `peers`, if there are any.
void run(const char* op, const SkinnyLinearArgs& args, Operands operands, const Tensor& x,
         const Tensor& weight, const collective::Peers* peers = nullptr) {
  run(op, args, x, weight, [&](bool programmatic, cudaStream_t stream) {
    return peers ? launch_skinny_reduce(args, *peers, programmatic, stream)
                 : launch_skinny_linear(args, operands, programmatic, stream);
  });
}

void check_scale(const char* op, const Tensor& t, const char* name, const Tensor& x) {
  check_device(op, t, name, x);
  if (t.dim() != 2 || t.scalar_type() != ScalarType::Float) {
    fail(op, name, " has shape ", shape_of(t), ", expected two dimensions of float32");
  }
}

// Whether t is [rows, cols] and consecutive in memory, along columns first or along rows first.
bool is_dense(const Tensor& t, int64_t rows, int64_t cols, bool column_major) {
  const int64_t row_stride = column_major ? 1 : cols, col_stride = column_major ? rows : 1;
  return t.size(0) == rows && t.size(1) == cols && (rows < 2 || t.stride(0) == row_stride) &&
         (cols < 2 || t.stride(1) == col_stride);
}

Epilogue epilogue_of(const char* op, const std::optional<std::string>& activation) {
  if (!activation) return Epilogue::kLinear;
  if (*activation == "silu") return Epilogue::kSiluMul;
  if (*activation == "gelu_tanh") return Epilogue::kGeluTanhMul;
  if (*activation == "relu") return Epilogue::kRelu;
  if (*activation == "relu2") return Epilogue::kRelu2;
  if (*activation == "gelu") return Epilogue::kGelu;
  if (*activation == "gelu_new") return Epilogue::kGeluNew;
  fail(op, "activation is '", *activation,
       "', expected 'silu', 'gelu_tanh', 'relu', 'relu2', 'gelu' or 'gelu_new'");
}

// Holds what a layer's kernel takes, and of which operands.
struct Layer {
  SkinnyLinearArgs args;
  Operands operands;
};

void check_block_scales(const char* op, const Tensor& x, std::initializer_list<Tensor> scales) {
  bool aligned = true;
  for (const Tensor& t : scales) aligned = aligned && is_aligned(t);
  if (x.size(1) % kRowBytes != 0 || !aligned) {
    fail(op, "x ", shape_of(x), " with a scale for each ", kScaleBlock,
         " columns: expected in_features a multiple of ", kRowBytes,
         " and scales on addresses that are multiples of 16");
  }
}

// Describes a layer of bfloat16 activations: of a weight of bfloat16 or, with its scales, of FP8.
Layer describe_bf16(const char* op, const Tensor& x, const Tensor& weight,
                    const std::optional<Tensor>& weight_scale, Epilogue epilogue,
                    int64_t max_tokens = kMaxSkinnyTokens) {
  if (!weight_scale) {
    return {
        describe(op, x, ScalarType::BFloat16, weight, ScalarType::BFloat16, epilogue, max_tokens),
        Operands::kBf16};
  }
  auto args = describe(op, x, ScalarType::BFloat16, weight, ScalarType::Float8_e4m3fn, epilogue,
                       kMaxWideTokens);
  check_scale(op, *weight_scale, "weight_scale", x);
  args.weight_scale = static_cast<const float*>(weight_scale->data_ptr());
  const int64_t rows = weight.size(0), groups = x.size(1) / kScaleBlock;
  if (is_dense(*weight_scale, 1, 1, false)) return {args, Operands::kFp8ByBf16};
  if (is_dense(*weight_scale, rows, 1, false)) {
    args.weight_scale_stride = 1;
    return {args, Operands::kFp8ByBf16};
  }
  const int64_t blocks = (rows + kScaleBlock - 1) / kScaleBlock;
  if (!is_dense(*weight_scale, blocks, groups, false) || args.gated()) {
    fail(op, "weight_scale has shape ", shape_of(*weight_scale), ", expected [1, 1], [", rows,
         ", 1] or, without an activation, [", blocks, ", ", groups, "] beside x of bfloat16");
  }
  check_block_scales(op, x, {*weight_scale});
  return {args, Operands::kFp8BlocksByBf16};
}

Tensor run_bf16(const char* op, Layer& layer, const Tensor& x, const Tensor& weight,
                const collective::Peers* peers = nullptr) {
  SkinnyLinearArgs& args = layer.args;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor y = empty({args.num_tokens, args.out_features}, dtype_of(x), x);
  args.y = y.data_ptr();
  run(op, args, layer.operands, x, weight, peers);
  return y;
}

// The residual and the norm of the add: t is [rows, out_features], or [out_features].
const __nv_bfloat16* added(const char* op, const Tensor& t, const char* name,
                           const SkinnyLinearArgs& args, const Tensor& x, bool matrix) {
  check_device(op, t, name, x);
  const bool fits = t.dim() == (matrix ? 2 : 1) && t.size(t.dim() - 1) == args.out_features &&
                    (!matrix || t.size(0) == args.num_tokens);
  if (!fits || !t.is_contiguous() || t.scalar_type() != ScalarType::BFloat16) {
    std::ostringstream rows;
    if (matrix) rows << args.num_tokens << ", ";
    fail(op, name, " has shape ", shape_of(t), ", expected a contiguous [", rows.str(),
         args.out_features, "] of bfloat16");
  }
  return static_cast<const __nv_bfloat16*>(t.data_ptr());
}

struct Added {
  Tensor weighted, total, squares;
};

// A connected group, for sums of bfloat16 that fit its inboxes.
collective::Peers peers_of(const char* op, const std::string& group_name,
                           const SkinnyLinearArgs& args, const Tensor& x) {
  if (args.weight_scale || args.out_features % kNormGroup != 0) {
    fail(op, "sums over ranks are of weights of bfloat16 with a multiple of ", kNormGroup,
         " rows, not of ", args.out_features, args.weight_scale ? " of FP8" : "");
  }
  const collective::Peers peers = collective::find_group(op, group_name, x.get_device_index());
  const int64_t packets =
      int64_t{args.num_tokens} * args.out_features / collective::kPacketElements;
  if (packets > peers.packets) {
    fail(op, "x ", shape_of(x), " sends ", packets * 16, " bytes, expected ", peers.packets * 16,
         " or fewer");
  }
  return peers;
}

// x * weight.T + bias, summed over a group's ranks if one is named, times factor, + residual; that
// times the norm's weight and its offset, and its sums of squares.  `center`: the norm is a layer
// norm; the sums of what is added follow those of squares, the norm's weight and bias the product.
Added add(const char* op, Layer layer, const Tensor& x, const Tensor& weight,
          const std::optional<Tensor>& bias, const Tensor& residual, const Tensor& norm_weight,
          const std::optional<std::string>& group_name = std::nullopt, double factor = 1.0,
          double norm_offset = 0.0, const std::optional<Tensor>& norm_bias = std::nullopt,
          bool center = false) {
  SkinnyLinearArgs& args = layer.args;
  args.factor = static_cast<float>(factor);
  args.norm_offset = static_cast<float>(norm_offset);
  add_bias(op, args, bias, ScalarType::BFloat16, x);
  args.residual = added(op, residual, "residual", args, x, true);
  args.norm_weight = added(op, norm_weight, "norm_weight", args, x, false);
  if (norm_bias) args.norm_bias = added(op, *norm_bias, "norm_bias", args, x, false);
  if (center ? group_name || norm_offset != 0.0 : norm_bias.has_value()) {
    fail(op, "a layer norm has neither a group nor an offset, and no other norm a bias");
  }
  args.centered = center;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const int64_t tokens = args.num_tokens, groups = args.out_features / kNormGroup;
  const Tensor weighted = empty({center ? tokens + 2 : tokens, args.out_features}, dtype_of(x), x);
  const Tensor squares =
      empty({center ? 2 * tokens : tokens, groups}, aoti_torch_dtype_float32(), x);
  args.weighted = static_cast<__nv_bfloat16*>(weighted.data_ptr());
  args.squares_out = static_cast<float*>(squares.data_ptr());
  collective::Peers peers;
  if (group_name) peers = peers_of(op, *group_name, args, x);
  const Tensor total = run_bf16(op, layer, x, weight, group_name ? &peers : nullptr);
  return {weighted, total, squares};
}

// A layer that reads what `add` made, or an op like it: the norm's scale is in sums of squares of
// kNormGroup columns, or of half as many.
Tensor norm_linear(const char* op, Layer layer, const Tensor& weighted, const Tensor& squares,
                   double eps, const Tensor& weight, const std::optional<Tensor>& bias,
                   bool center = false) {
  SkinnyLinearArgs& args = layer.args;
  args.centered = center;
  if (center) args.num_tokens -= 2;
  if (center && args.weight_scale) fail(op, "joins no weight of FP8 to a layer norm");
  add_bias(op, args, bias, ScalarType::BFloat16, weighted);
  check_device(op, squares, "squares", weighted);
  const int64_t most_groups = weighted.size(1) / (kNormGroup / 2);
  const int64_t groups = squares.dim() == 2 ? squares.size(1) : 0;
  const int64_t rows = int64_t{center ? 2 : 1} * args.num_tokens;
  if (groups == 0 || squares.size(0) != rows ||
      (groups != most_groups && groups != most_groups / 2) || !squares.is_contiguous() ||
      squares.scalar_type() != ScalarType::Float) {
    fail(op, "squares have shape ", shape_of(squares), ", expected a contiguous [", rows, ", ",
         most_groups / 2, "] or [", rows, ", ", most_groups, "] of float32");
  }
  const torch::stable::accelerator::DeviceGuard guard(weighted.get_device_index());
  args.squares = static_cast<const float*>(squares.data_ptr());
  args.num_groups = static_cast<int>(groups);
  args.eps = static_cast<float>(eps);
  return run_bf16(op, layer, weighted, weight);
}

// Two layers: (y of the second, the sum of the first and the residual).
std::tuple<Tensor, Tensor> skinny_linear_add_norm_linear(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
    const Tensor& residual, const Tensor& norm_weight, double eps, const Tensor& next_weight,
    const std::optional<Tensor>& next_bias, const std::optional<std::string>& activation,
    const std::optional<Tensor>& weight_scale, const std::optional<Tensor>& next_weight_scale,
    const std::optional<std::string>& group_name, double factor, double norm_offset,
    const std::optional<Tensor>& norm_bias, bool center) {
  const Layer layer =
      describe_bf16(kAddNorm, x, weight, weight_scale, Epilogue::kAdd, kMaxNormedTokens);
  const Added first = add(kAddNorm, layer, x, weight, bias, residual, norm_weight, group_name,
                          factor, norm_offset, norm_bias, center);
  const Layer next = describe_bf16(kAddNorm, first.weighted, next_weight, next_weight_scale,
                                   epilogue_of(kAddNorm, activation));
  return {norm_linear(kAddNorm, next, first.weighted, first.squares, eps, next_weight, next_bias,
                      center),
          first.total};
}

// Its first layer alone: (the sum times the norm's weight, the sum, its sums of squares).
std::tuple<Tensor, Tensor, Tensor> skinny_linear_add(const Tensor& x, const Tensor& weight,
                                                     const std::optional<Tensor>& bias,
                                                     const Tensor& residual,
                                                     const Tensor& norm_weight,
                                                     const std::optional<Tensor>& weight_scale) {
  const Layer layer =
      describe_bf16(kAdd, x, weight, weight_scale, Epilogue::kAdd, kMaxNormedTokens);
  const Added made = add(kAdd, layer, x, weight, bias, residual, norm_weight);
  return {made.weighted, made.total, made.squares};
}

// Its second layer alone.
Tensor skinny_norm_linear(const Tensor& weighted, const Tensor& squares, double eps,
                          const Tensor& weight, const std::optional<Tensor>& bias,
                          const std::optional<std::string>& activation,
                          const std::optional<Tensor>& weight_scale) {
  const Layer layer =
      describe_bf16(kNorm, weighted, weight, weight_scale, epilogue_of(kNorm, activation));
  return norm_linear(kNorm, layer, weighted, squares, eps, weight, bias);
}

// Whether the scales are of blocks; sets strides for the others.
bool add_scales(const char* op, SkinnyLinearArgs& args, const Tensor& x, const Tensor& x_scale,
                const Tensor& weight, const Tensor& weight_scale) {
  check_scale(op, x_scale, "x_scale", x);
  check_scale(op, weight_scale, "weight_scale", x);
  args.x_scale = static_cast<const float*>(x_scale.data_ptr());
  args.weight_scale = static_cast<const float*>(weight_scale.data_ptr());
  const int64_t tokens = args.num_tokens, rows = weight.size(0);
  if (is_dense(x_scale, 1, 1, false) && is_dense(weight_scale, 1, 1, false)) return false;
  if (is_dense(x_scale, tokens, 1, false) && is_dense(weight_scale, rows, 1, false)) {
    args.x_scale_stride = args.weight_scale_stride = 1;
    return false;
  }
  const int64_t groups = args.in_features / kScaleBlock;
  const int64_t blocks = (rows + kScaleBlock - 1) / kScaleBlock;
  if (is_dense(x_scale, tokens, groups, true) && is_dense(weight_scale, blocks, groups, false)) {
    check_block_scales(op, x, {x_scale, weight_scale});
    return true;
  }
  fail(op, "scales ", shape_of(x_scale), " and ", shape_of(weight_scale), " of x ", shape_of(x),
       " and ", rows, " rows of weight, expected [1, 1] and [1, 1], [M, 1] and [N, 1]",
       ", or [M, K / 128] column-major and [N / 128, K / 128]");
}

// The dtype of the sums, and that of an empty tensor of it.
int32_t set_element(const char* op, SkinnyLinearArgs& args, ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16:
      args.element = Element::kBFloat16;
      return aoti_torch_dtype_bfloat16();
    case ScalarType::Half:
      args.element = Element::kHalf;
      return aoti_torch_dtype_float16();
    case ScalarType::Float:
      args.element = Element::kFloat;
      return aoti_torch_dtype_float32();
    default:
      fail(op, "out_dtype is none of bfloat16, float16, float32");
  }
}

// bfloat16, or FP8 where scales are given: of the weight alone, if x stays bfloat16.
Tensor skinny_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                     const std::optional<Tensor>& x_scale,
                     const std::optional<Tensor>& weight_scale, std::optional<ScalarType> out_dtype,
                     const std::optional<std::string>& activation,
                     const std::optional<Tensor>& out_scale) {
  if (x_scale && !weight_scale) fail(kLinear, "x_scale is given, expected weight_scale too");
  const Epilogue epilogue = epilogue_of(kLinear, activation);
  Layer layer = {};
  SkinnyLinearArgs& args = layer.args;
  if (x_scale) {
    const ScalarType held = ScalarType::Float8_e4m3fn;
    args = describe(kLinear, x, held, weight, held, epilogue);
    const bool blocks = add_scales(kLinear, args, x, *x_scale, weight, *weight_scale);
    layer.operands = blocks ? Operands::kFp8Blocks : Operands::kFp8;
    if (blocks && args.gated()) {
      fail(kLinear, "scales of blocks, expected one for all, or one a token and a row");
    }
  } else {
    layer = describe_bf16(kLinear, x, weight, weight_scale, epilogue);
  }
  const ScalarType sums =
      weight_scale ? out_dtype.value_or(ScalarType::BFloat16) : ScalarType::BFloat16;
  int32_t dtype = set_element(kLinear, args, sums);
  add_bias(kLinear, args, bias, sums, x);
  if (out_scale) {
    check_scale(kLinear, *out_scale, "out_scale", x);
    if (!is_dense(*out_scale, 1, 1, false)) {
      fail(kLinear, "out_scale has shape ", shape_of(*out_scale), ", expected [1, 1]");
    }
    args.out_scale = static_cast<const float*>(out_scale->data_ptr());
    dtype = aoti_torch_dtype_float8_e4m3fn();
  }
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor y = empty({args.num_tokens, args.out_features}, dtype, x);
  args.y = y.data_ptr();
  run(kLinear, args, layer.operands, x, weight);
  return y;
}

Tensor cluster_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  SkinnyLinearArgs args = describe(kCluster, x, ScalarType::BFloat16, weight, ScalarType::BFloat16,
                                   Epilogue::kLinear, kMaxClusterTokens);
  if (args.out_features % 8 != 0 || args.out_features > kMaxClusterFeatures ||
      args.in_features < kMinClusterDepth) {
    fail(kCluster, "weight has shape ", shape_of(weight), ", expected a multiple of 8 rows up to ",
         kMaxClusterFeatures, ", and ", kMinClusterDepth, " in_features or more");
  }
  add_bias(kCluster, args, bias, ScalarType::BFloat16, x);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor y = empty({args.num_tokens, args.out_features}, dtype_of(x), x);
  args.y = y.data_ptr();
  run(kCluster, args, x, weight, [&](bool programmatic, cudaStream_t stream) {
    return launch_cluster_linear(args, programmatic, stream);
  });
  return y;
}

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
  SkinnyLinearArgs args = {};
  args.epilogue = epilogue;
  if (args.gated() && rows % 2 != 0) {
    fail(op, "weight has shape ", shape_of(weight), ", expected an even number of rows: gate, up");
  }
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  args.element = Element::kBFloat16;
  args.num_tokens = static_cast<int>(num_tokens);
  args.out_features = static_cast<int>(args.gated() ? rows / 2 : rows);
  args.in_features = static_cast<int>(in_features);
  args.x_row_stride = num_tokens > 1 ? x.stride(0) : in_features;
  args.weight_row_stride = rows > 1 ? weight.stride(0) : in_features / 2;
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

Tensor persistent_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                         const std::string& activation) {
  SkinnyLinearArgs args =
      describe(kPersistent, x, ScalarType::BFloat16, weight, ScalarType::BFloat16,
               epilogue_of(kPersistent, activation), kMaxPersistentTokens);
  if (!args.gated() || args.out_features % 8 != 0) {
    fail(kPersistent, "weight has shape ", shape_of(weight), " and activation is '", activation,
         "', expected a multiple of 8 outputs, and 'silu' or 'gelu_tanh'");
  }
  add_bias(kPersistent, args, bias, ScalarType::BFloat16, x);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor y = empty({args.num_tokens, args.out_features}, dtype_of(x), x);
  args.y = y.data_ptr();
  run(kPersistent, args, x, weight, [&](bool programmatic, cudaStream_t stream) {
    return launch_persistent_linear(args, programmatic, stream);
  });
  return y;
}

}  // namespace
}  // namespace fusewright::gemm

STABLE_TORCH_LIBRARY_FRAGMENT(fw_cuda, m) {
  m.def("cluster_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("persistent_linear(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor");
  m.def(
      "skinny_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? x_scale=None, "
      "Tensor? weight_scale=None, ScalarType? out_dtype=None, str? activation=None, "
      "Tensor? out_scale=None) -> Tensor");
  m.def(
      "skinny_linear_add_norm_linear(Tensor x, Tensor weight, Tensor? bias, Tensor residual, "
      "Tensor norm_weight, float eps, Tensor next_weight, Tensor? next_bias, str? activation, "
      "Tensor? weight_scale=None, Tensor? next_weight_scale=None, str? group_name=None, "
      "float factor=1.0, float norm_offset=0.0, Tensor? norm_bias=None, bool center=False) "
      "-> (Tensor, Tensor)");
  m.def(
      "skinny_linear_add(Tensor x, Tensor weight, Tensor? bias, Tensor residual, "
      "Tensor norm_weight, Tensor? weight_scale=None) -> (Tensor, Tensor, Tensor)");
  m.def(
      "packed_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? weight_zero, "
      "Tensor? weight_row_scale, Tensor? bias, bool floats, str? activation=None) -> Tensor");
  m.def(
      "packed_linear_add_norm_linear(Tensor x, Tensor weight, Tensor weight_scale, "
      "Tensor? weight_zero, Tensor? weight_row_scale, Tensor? bias, bool floats, Tensor residual, "
      "Tensor norm_weight, float eps, float norm_offset, Tensor next_weight, Tensor next_scale, "
      "Tensor? next_zero, Tensor? next_row_scale, Tensor? next_bias, bool next_floats, "
      "str? activation=None) -> (Tensor, Tensor)");
  m.def(
      "skinny_norm_linear(Tensor weighted, Tensor squares, float eps, Tensor weight, Tensor? bias, "
      "str? activation=None, Tensor? weight_scale=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fw_cuda, CUDA, m) {
  m.impl("cluster_linear", TORCH_BOX(&fusewright::gemm::cluster_linear));
  m.impl("persistent_linear", TORCH_BOX(&fusewright::gemm::persistent_linear));
  m.impl("skinny_linear", TORCH_BOX(&fusewright::gemm::skinny_linear));
  m.impl("skinny_linear_add_norm_linear",
         TORCH_BOX(&fusewright::gemm::skinny_linear_add_norm_linear));
  m.impl("skinny_linear_add", TORCH_BOX(&fusewright::gemm::skinny_linear_add));
  m.impl("skinny_norm_linear", TORCH_BOX(&fusewright::gemm::skinny_norm_linear));
  m.impl("packed_linear", TORCH_BOX(&fusewright::gemm::packed_linear));
  m.impl("packed_linear_add_norm_linear",
         TORCH_BOX(&fusewright::gemm::packed_linear_add_norm_linear));
}
