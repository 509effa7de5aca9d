// fw_cuda::moe_*: argument checks and the outputs.
#include "../common/binding.h"

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "../gemm/skinny.h"
#include "moe.h"

namespace fusewright::moe {
namespace {

constexpr const char* kRoute = "fw_cuda::moe_route";
constexpr const char* kGateUp = "fw_cuda::moe_gate_up";
constexpr const char* kDown = "fw_cuda::moe_down";
constexpr const char* kDownNorm = "fw_cuda::moe_down_norm";
using gemm::kScaleBlock;

template <typename T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

// A contiguous tensor of that shape and dtype on x's device.
void check_contiguous(const char* op, const Tensor& t, const char* name, const Tensor& x,
                      std::initializer_list<int64_t> sizes, ScalarType dtype,
                      const char* dtype_name) {
  check_device(op, t, name, x);
  bool fits = t.dim() == static_cast<int64_t>(sizes.size()) && t.is_contiguous() &&
              t.scalar_type() == dtype;
  std::ostringstream expected;
  int64_t d = 0;
  for (const int64_t size : sizes) {
    expected << (d ? ", " : "") << size;
    fits = fits && t.size(d) == size;
    ++d;
  }
  if (!fits) {
    fail(op, name, " has shape ", shape_of(t), ", expected a contiguous [", expected.str(), "] of ",
         dtype_name);
  }
}

void check_float(const char* op, const Tensor& t, const char* name, const Tensor& x,
                 std::initializer_list<int64_t> sizes) {
  check_contiguous(op, t, name, x, sizes, ScalarType::Float, "float32");
}

const __nv_bfloat16* bf16(const char* op, const Tensor& t, const char* name, const Tensor& x,
                          std::initializer_list<int64_t> sizes) {
  check_contiguous(op, t, name, x, sizes, ScalarType::BFloat16, "bfloat16");
  return data<const __nv_bfloat16>(t);
}

// Sums of squares of groups of x's columns, 8 or 16 each: what an add with a norm leaves.
template <typename Args>
void add_squares(const char* op, Args& args, const std::optional<Tensor>& squares, const Tensor& x,
                 double eps) {
  if (!squares) return;
  const int64_t columns = x.size(1), groups = squares->dim() == 2 ? squares->size(1) : 0;
  if (columns % 64 != 0 || (groups * 16 != columns && groups * 8 != columns)) {
    fail(op, "x ", shape_of(x), " with squares ", shape_of(*squares),
         ", expected x's columns a multiple of 64 and a square for every 8 or 16 of them");
  }
  check_float(op, *squares, "squares", x, {x.size(0), groups});
  if (!is_aligned(*squares)) fail(op, "squares are not on an address that is a multiple of 16");
  args.squares = data<const float>(*squares);
  args.num_square_groups = static_cast<int>(groups);
  args.eps = static_cast<float>(eps);
}

template <typename Args, typename Launch>
void run(const char* op, const Args& args, const Tensor& x, const Launch& launch) {
  const cudaStream_t stream = current_stream(x.get_device_index());
  const cudaError_t error = launch(args, is_capturing(op, stream), stream);
  if (error != cudaSuccess) {
    fail(op, "launch on ", shape_of(x), " failed: ", cudaGetErrorString(error));
  }
}

// The choice of experts, as (weights, ids), each [num_tokens, top_k], by falling score.
std::tuple<Tensor, Tensor> moe_route(const Tensor& x, const Tensor& router_weight, int64_t top_k,
                                     const std::string& scoring, bool renormalize, double scaling,
                                     const std::optional<Tensor>& correction_bias,
                                     int64_t num_groups, int64_t topk_groups,
                                     const std::optional<Tensor>& squares, double eps,
                                     const std::optional<Tensor>& router_bias) {
  if (!x.is_cuda()) fail(kRoute, "x is not on a CUDA device");
  check_matrix(kRoute, x, "x", ScalarType::BFloat16);
  const int64_t num_tokens = x.size(0), hidden = x.size(1);
  if (router_weight.dim() != 2) {
    fail(kRoute, "router_weight has shape ", shape_of(router_weight), ", expected [experts, ",
         hidden, "]");
  }
  const int64_t num_experts = router_weight.size(0);
  RouteArgs args = {};
  args.x = data<const __nv_bfloat16>(x);
  args.router_weight = bf16(kRoute, router_weight, "router_weight", x, {num_experts, hidden});
  if (hidden < 8 || hidden % 8 != 0 || !is_aligned(router_weight)) {
    fail(kRoute, "router_weight ", shape_of(router_weight),
         ", expected a multiple of 8 columns on an address that is a multiple of 16");
  }
  if (num_experts < 1 || num_experts > kMaxExperts) {
    fail(kRoute, "router_weight has ", num_experts, " experts, expected 1 to ", kMaxExperts);
  }
  if (num_groups < 1 || num_groups > kMaxGroups || num_experts % num_groups != 0 ||
      topk_groups < 1 || topk_groups > num_groups) {
    fail(kRoute, topk_groups, " of ", num_groups, " groups of ", num_experts,
         " experts, expected equal groups, ", kMaxGroups, " or fewer");
  }
  const int64_t reachable = num_experts / num_groups * topk_groups;
  if (top_k < 1 || top_k > kMaxTopK || top_k > reachable) {
    fail(kRoute, "top_k is ", top_k, ", expected 1 to ", std::min<int64_t>(kMaxTopK, reachable));
  }
  if (scoring != "softmax" && scoring != "sigmoid") {
    fail(kRoute, "scoring is '", scoring, "', expected 'softmax' or 'sigmoid'");
  }
  if (correction_bias) {
    check_float(kRoute, *correction_bias, "correction_bias", x, {num_experts});
    args.correction_bias = data<const float>(*correction_bias);
  }
  if (router_bias) args.router_bias = bf16(kRoute, *router_bias, "router_bias", x, {num_experts});
  add_squares(kRoute, args, squares, x, eps);
  args.scaling = static_cast<float>(scaling);
  args.num_tokens = static_cast<int>(num_tokens);
  args.hidden = static_cast<int>(hidden);
  args.num_experts = static_cast<int>(num_experts);
  args.top_k = static_cast<int>(top_k);
  args.num_groups = static_cast<int>(num_groups);
  args.topk_groups = static_cast<int>(topk_groups);
  args.scoring = scoring == "softmax" ? Scoring::kSoftmax : Scoring::kSigmoid;
  args.renormalize = renormalize;
  args.x_row_stride = num_tokens > 1 ? x.stride(0) : hidden;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor weights = empty({num_tokens, top_k}, aoti_torch_dtype_float32(), x);
  const Tensor ids = empty({num_tokens, top_k}, aoti_torch_dtype_int32(), x);
  args.topk_weights = data<float>(weights);
  args.topk_ids = data<int>(ids);
  if (num_tokens > 0) {
    run(kRoute, args, x, [](auto&&... a) { return launch_route(a...); });
  }
  return {weights, ids};
}

struct Call {
  ExpertsArgs args = {};
  Operands operands = Operands::kBf16;
};

// Checks the arguments that gate_up and down share. `halves` is 2 where the weight has gates and
// ups.
Call describe(const char* op, const Tensor& x, const char* x_name, const Tensor& weight,
              const std::optional<Tensor>& weight_scale, const Tensor& ids, int64_t halves) {
  if (!x.is_cuda()) fail(op, x_name, " is not on a CUDA device");
  check_matrix(op, x, x_name, ScalarType::BFloat16);
  check_device(op, weight, "weight", x);
  const ScalarType dtype = weight_scale ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16;
  if (weight.dim() != 3 || !weight.is_contiguous() || weight.scalar_type() != dtype ||
      !is_aligned(weight)) {
    fail(op, "weight has shape ", shape_of(weight), ", expected a contiguous [experts, rows, ",
         x.size(1), "] of ", weight_scale ? "float8_e4m3fn" : "bfloat16",
         " on an address that is a multiple of 16");
  }
  const int64_t num_experts = weight.size(0), rows = weight.size(1), in_features = weight.size(2);
  const int64_t line = 128 / weight.element_size();
  if (in_features != x.size(1) || in_features % line != 0 || in_features > 16384 ||
      rows % (8 * halves) != 0 || num_experts * rows >= int64_t{1} << 30) {
    fail(op, "weight ", shape_of(weight), " and ", x_name, " ", shape_of(x),
         ", expected the same in_features, a multiple of ", line, " and 16384 or fewer, rows a ",
         "multiple of ", 8 * halves, ", less than 2^30 rows in all");
  }
  if (ids.dim() != 2) fail(op, "ids have shape ", shape_of(ids), ", expected [tokens, top_k]");
  const int64_t num_tokens = ids.size(0), top_k = ids.size(1);
  check_contiguous(op, ids, "ids", x, {num_tokens, top_k}, ScalarType::Int, "int32");
  if (num_tokens > kMaxTokens || top_k > kMaxTopK) {
    fail(op, "ids ", shape_of(ids), ", expected ", kMaxTokens, " or fewer tokens, ", kMaxTopK,
         " or fewer experts each");
  }
  Call call;
  ExpertsArgs& args = call.args;
  if (weight_scale) {
    const bool blocks = weight_scale->dim() == 3 && weight_scale->size(1) != rows;
    if (blocks && (rows / halves % kScaleBlock != 0)) {
      fail(op, "weight ", shape_of(weight), " with scales of blocks, expected rows a multiple of ",
           kScaleBlock * halves);
    }
    call.operands = blocks ? Operands::kFp8Blocks : Operands::kFp8Rows;
    check_float(
        op, *weight_scale, "weight_scale", x,
        {num_experts, blocks ? rows / kScaleBlock : rows, blocks ? in_features / kScaleBlock : 1});
    args.weight_scale = data<const float>(*weight_scale);
  }
  args.x = data<const __nv_bfloat16>(x);
  args.weight = weight.data_ptr();
  args.topk_ids = data<const int>(ids);
  args.num_tokens = static_cast<int>(num_tokens);
  args.top_k = static_cast<int>(top_k);
  args.num_experts = static_cast<int>(num_experts);
  args.in_features = static_cast<int>(in_features);
  args.out_features = static_cast<int>(rows / halves);
  args.x_row_stride = x.size(0) > 1 ? x.stride(0) : in_features;
  return call;
}

Tensor moe_gate_up(const Tensor& x, const Tensor& weight, const Tensor& ids,
                   const std::optional<Tensor>& weight_scale, const std::string& activation,
                   const std::optional<Tensor>& squares, double eps) {
  Call call = describe(kGateUp, x, "x", weight, weight_scale, ids, 2);
  ExpertsArgs& args = call.args;
  if (x.size(0) != args.num_tokens) {
    fail(kGateUp, "x ", shape_of(x), " and ids ", shape_of(ids), " differ in tokens");
  }
  if (activation != "silu" && activation != "gelu_tanh") {
    fail(kGateUp, "activation is '", activation, "', expected 'silu' or 'gelu_tanh'");
  }
  args.activation = activation == "silu" ? Activation::kSiluMul : Activation::kGeluTanhMul;
  add_squares(kGateUp, args, squares, x, eps);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const int64_t pairs = int64_t{args.num_tokens} * args.top_k;
  const Tensor y = empty({pairs, args.out_features}, dtype_of(x), x);
  args.y = data<__nv_bfloat16>(y);
  if (pairs > 0 && args.out_features > 0) {
    run(kGateUp, args, x, [&](const ExpertsArgs& a, bool programmatic, cudaStream_t stream) {
      return launch_gate_up(a, call.operands, programmatic, stream);
    });
  }
  return y;
}

Tensor run_down(const char* op, Call& call, const Tensor& h, const Tensor& ids,
                const Tensor& topk_weights, const std::optional<Tensor>& residual,
                const std::optional<Tensor>& shared, bool ids_ready) {
  ExpertsArgs& args = call.args;
  const int64_t num_tokens = args.num_tokens, out_features = args.out_features;
  if (h.size(0) != ids.numel() || (h.size(0) > 1 && h.stride(0) != h.size(1))) {
    fail(op, "h has shape ", shape_of(h), ", expected a contiguous [", ids.numel(), ", ",
         args.in_features, "]");
  }
  check_float(op, topk_weights, "topk_weights", h, {num_tokens, args.top_k});
  args.topk_weights = data<const float>(topk_weights);
  if (residual) args.residual = bf16(op, *residual, "residual", h, {num_tokens, out_features});
  if (shared) args.shared = bf16(op, *shared, "shared", h, {num_tokens, out_features});
  args.ids_ready = ids_ready;
  const torch::stable::accelerator::DeviceGuard guard(h.get_device_index());
  const Tensor y = empty({num_tokens, out_features}, dtype_of(h), h);
  args.y = data<__nv_bfloat16>(y);
  if (num_tokens > 0 && out_features > 0) {
    run(op, args, h, [&](const ExpertsArgs& a, bool programmatic, cudaStream_t stream) {
      return launch_down(a, call.operands, programmatic, stream);
    });
  }
  return y;
}

Tensor moe_down(const Tensor& h, const Tensor& weight, const Tensor& ids,
                const Tensor& topk_weights, const std::optional<Tensor>& weight_scale,
                const std::optional<Tensor>& residual, const std::optional<Tensor>& shared,
                bool ids_ready) {
  Call call = describe(kDown, h, "h", weight, weight_scale, ids, 1);
  return run_down(kDown, call, h, ids, topk_weights, residual, shared, ids_ready);
}

// (y, y * norm_weight, the sums of squares of y): what a linear with squares takes.
std::tuple<Tensor, Tensor, Tensor> moe_down_norm(
    const Tensor& h, const Tensor& weight, const Tensor& ids, const Tensor& topk_weights,
    const Tensor& norm_weight, const std::optional<Tensor>& weight_scale,
    const std::optional<Tensor>& residual, const std::optional<Tensor>& shared, bool ids_ready) {
  Call call = describe(kDownNorm, h, "h", weight, weight_scale, ids, 1);
  ExpertsArgs& args = call.args;
  const int64_t num_tokens = args.num_tokens, out_features = args.out_features;
  if (out_features % 64 != 0) {
    fail(kDownNorm, "weight ", shape_of(weight), ", expected rows a multiple of 64");
  }
  args.norm_weight = bf16(kDownNorm, norm_weight, "norm_weight", h, {out_features});
  const Tensor weighted = empty({num_tokens, out_features}, dtype_of(h), h);
  const Tensor squares =
      empty({num_tokens, out_features / kTileRows}, aoti_torch_dtype_float32(), h);
  args.weighted = data<__nv_bfloat16>(weighted);
  args.squares_out = data<float>(squares);
  const Tensor y = run_down(kDownNorm, call, h, ids, topk_weights, residual, shared, ids_ready);
  return {y, weighted, squares};
}

}  // namespace
}  // namespace fusewright::moe

STABLE_TORCH_LIBRARY_FRAGMENT(fw_cuda, m) {
  m.def(
      "moe_route(Tensor x, Tensor router_weight, int top_k, str scoring=\"softmax\", "
      "bool renormalize=True, float scaling=1.0, Tensor? correction_bias=None, int num_groups=1, "
      "int topk_groups=1, Tensor? squares=None, float eps=0.0, Tensor? router_bias=None) "
      "-> (Tensor, Tensor)");
  m.def(
      "moe_gate_up(Tensor x, Tensor weight, Tensor ids, Tensor? weight_scale=None, "
      "str activation=\"silu\", Tensor? squares=None, float eps=0.0) -> Tensor");
  m.def(
      "moe_down(Tensor h, Tensor weight, Tensor ids, Tensor topk_weights, "
      "Tensor? weight_scale=None, Tensor? residual=None, Tensor? shared=None, "
      "bool ids_ready=False) -> Tensor");
  m.def(
      "moe_down_norm(Tensor h, Tensor weight, Tensor ids, Tensor topk_weights, Tensor norm_weight, "
      "Tensor? weight_scale=None, Tensor? residual=None, Tensor? shared=None, "
      "bool ids_ready=False) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fw_cuda, CUDA, m) {
  m.impl("moe_route", TORCH_BOX(&fusewright::moe::moe_route));
  m.impl("moe_gate_up", TORCH_BOX(&fusewright::moe::moe_gate_up));
  m.impl("moe_down", TORCH_BOX(&fusewright::moe::moe_down));
  m.impl("moe_down_norm", TORCH_BOX(&fusewright::moe::moe_down_norm));
}
