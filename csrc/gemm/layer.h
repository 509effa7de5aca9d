// A linear layer's arguments, checked, and its outputs: what the bindings of this folder share.
#pragma once

#include <optional>
#include <string>

#include "../collective/groups.h"
#include "../common/binding.h"
#include "skinny.h"

namespace fusewright::gemm {

// The arguments of x [num_tokens, in_features] and of a weight's rows, however wide these are
// stored.
inline SkinnyLinearArgs operands_of(const char* op, const Tensor& x, const Tensor& weight,
                                    Epilogue epilogue) {
  const int64_t num_tokens = x.size(0), in_features = x.size(1), rows = weight.size(0);
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
  args.weight_row_stride = rows > 1 ? weight.stride(0) : weight.size(1);
  return args;
}

// The arguments but for scales, bias and outputs, checked.
inline SkinnyLinearArgs describe(const char* op, const Tensor& x, ScalarType x_dtype,
                                 const Tensor& weight, ScalarType weight_dtype, Epilogue epilogue,
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
  return operands_of(op, x, weight, epilogue);
}

inline void add_bias(const char* op, SkinnyLinearArgs& args, const std::optional<Tensor>& bias,
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
inline void run(const char* op, const SkinnyLinearArgs& args, const Tensor& x, const Tensor& weight,
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
inline void run(const char* op, const SkinnyLinearArgs& args, Operands operands, const Tensor& x,
                const Tensor& weight, const collective::Peers* peers = nullptr) {
  run(op, args, x, weight, [&](bool programmatic, cudaStream_t stream) {
    return peers ? launch_skinny_reduce(args, operands, *peers, programmatic, stream)
                 : launch_skinny_linear(args, operands, programmatic, stream);
  });
}

inline void check_scale(const char* op, const Tensor& t, const char* name, const Tensor& x) {
  check_device(op, t, name, x);
  if (t.dim() != 2 || t.scalar_type() != ScalarType::Float) {
    fail(op, name, " has shape ", shape_of(t), ", expected two dimensions of float32");
  }
}

// Whether t is [rows, cols] and consecutive in memory, along columns first or along rows first.
inline bool is_dense(const Tensor& t, int64_t rows, int64_t cols, bool column_major) {
  const int64_t row_stride = column_major ? 1 : cols, col_stride = column_major ? rows : 1;
  return t.size(0) == rows && t.size(1) == cols && (rows < 2 || t.stride(0) == row_stride) &&
         (cols < 2 || t.stride(1) == col_stride);
}

inline Epilogue epilogue_of(const char* op, const std::optional<std::string>& activation) {
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

inline Tensor run_bf16(const char* op, Layer& layer, const Tensor& x, const Tensor& weight,
                       const collective::Peers* peers = nullptr) {
  SkinnyLinearArgs& args = layer.args;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor y = empty({args.num_tokens, args.out_features}, dtype_of(x), x);
  args.y = y.data_ptr();
  run(op, args, layer.operands, x, weight, peers);
  return y;
}

// The residual and the norm of the add: t is [rows, out_features], or [out_features].
inline const __nv_bfloat16* added(const char* op, const Tensor& t, const char* name,
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

// A connected group, for sums that fit its inboxes.
inline collective::Peers peers_of(const char* op, const std::string& group_name,
                                  const SkinnyLinearArgs& args, const Tensor& x) {
  if (args.out_features % kNormGroup != 0) {
    fail(op, "sums over ranks are of weights with a multiple of ", kNormGroup, " rows, not of ",
         args.out_features);
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
inline Added add(const char* op, Layer layer, const Tensor& x, const Tensor& weight,
                 const std::optional<Tensor>& bias, const Tensor& residual,
                 const Tensor& norm_weight,
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
inline Tensor norm_linear(const char* op, Layer layer, const Tensor& weighted,
                          const Tensor& squares, double eps, const Tensor& weight,
                          const std::optional<Tensor>& bias, bool center = false) {
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

}  // namespace fusewright::gemm
