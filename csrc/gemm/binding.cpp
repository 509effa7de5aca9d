// fw_cuda::skinny_*, cluster_linear, persistent_linear: argument checks and the outputs.
#include <optional>
#include <string>
#include <tuple>

#include "layer.h"
#include "persistent.h"

namespace fusewright::gemm {
namespace {

constexpr const char* kLinear = "fw_cuda::skinny_linear";
constexpr const char* kAddNorm = "fw_cuda::skinny_linear_add_norm_linear";
constexpr const char* kAdd = "fw_cuda::skinny_linear_add";
constexpr const char* kNorm = "fw_cuda::skinny_norm_linear";
constexpr const char* kCluster = "fw_cuda::cluster_linear";
constexpr const char* kPersistent = "fw_cuda::persistent_linear";

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

// Describes a layer of bfloat16 or, with both scales, of FP8, whose result is bfloat16.
Layer describe_many(const char* op, const Tensor& x, const Tensor& weight,
                    const std::optional<Tensor>& x_scale, const std::optional<Tensor>& weight_scale,
                    Epilogue epilogue, int64_t max_tokens) {
  if (x_scale.has_value() != weight_scale.has_value()) {
    fail(op, "one of x_scale and weight_scale is given, expected both or none");
  }
  const ScalarType held = x_scale ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16;
  Layer layer = {describe(op, x, held, weight, held, epilogue, max_tokens), Operands::kBf16};
  if (x_scale) {
    layer.operands = Operands::kFp8;
    if (add_scales(op, layer.args, x, *x_scale, weight, *weight_scale)) {
      fail(op, "scales of blocks, expected one for all, or one a token and a row");
    }
  }
  return layer;
}

// Calls `launch(args, operands, programmatic, stream)` for a result of bfloat16.
template <typename Launch>
Tensor run_many(const char* op, Layer& layer, const Tensor& x, const Tensor& weight,
                const std::optional<Tensor>& bias, const Launch& launch) {
  SkinnyLinearArgs& args = layer.args;
  add_bias(op, args, bias, ScalarType::BFloat16, x);
  if (bias && !is_aligned(*bias)) fail(op, "bias is not on an address that is a multiple of 16");
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor y = empty({args.num_tokens, args.out_features}, aoti_torch_dtype_bfloat16(), x);
  args.y = y.data_ptr();
  run(op, args, x, weight, [&](bool programmatic, cudaStream_t stream) {
    return launch(args, layer.operands, programmatic, stream);
  });
  return y;
}

Tensor cluster_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& x_scale,
                      const std::optional<Tensor>& weight_scale) {
  Layer layer = describe_many(kCluster, x, weight, x_scale, weight_scale, Epilogue::kLinear,
                              kMaxClusterTokens);
  const int least = kMinClusterLines * kLineBytes / static_cast<int>(weight.element_size());
  const SkinnyLinearArgs& args = layer.args;
  if (args.out_features % 8 != 0 || args.out_features > kMaxClusterFeatures ||
      args.in_features < least) {
    fail(kCluster, "weight has shape ", shape_of(weight), ", expected a multiple of 8 rows up to ",
         kMaxClusterFeatures, ", and ", least, " in_features or more");
  }
  return run_many(kCluster, layer, x, weight, bias, launch_cluster_linear);
}

Tensor persistent_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                         const std::string& activation, const std::optional<Tensor>& x_scale,
                         const std::optional<Tensor>& weight_scale) {
  Layer layer = describe_many(kPersistent, x, weight, x_scale, weight_scale,
                              epilogue_of(kPersistent, activation), kMaxPersistentTokens);
  if (!layer.args.gated() || layer.args.out_features % 8 != 0) {
    fail(kPersistent, "weight has shape ", shape_of(weight), " and activation is '", activation,
         "', expected a multiple of 8 outputs, and 'silu' or 'gelu_tanh'");
  }
  return run_many(kPersistent, layer, x, weight, bias, launch_persistent_linear);
}

}  // namespace
}  // namespace fusewright::gemm

STABLE_TORCH_LIBRARY_FRAGMENT(fw_cuda, m) {
  m.def(
      "cluster_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? x_scale=None, "
      "Tensor? weight_scale=None) -> Tensor");
  m.def(
      "persistent_linear(Tensor x, Tensor weight, Tensor? bias, str activation, "
      "Tensor? x_scale=None, Tensor? weight_scale=None) -> Tensor");
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
}
