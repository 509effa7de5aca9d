// The interface between the ops fw_cuda::moe_* and their kernels. It is plain C++, without torch
// and without device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

struct __nv_bfloat16;

namespace fusewright::moe {

// Limits of the kernels that stream chosen experts for few tokens.
constexpr int kMaxTokens = 8;
constexpr int kMaxTopK = 16;
constexpr int kMaxPairs = kMaxTokens * kMaxTopK;

// Rows of a chosen expert's weight that a block takes at once: gates, and as many ups; or outputs
// of down, which share a sum of squares.
constexpr int kTileRows = 8;

// Limits of the router, which takes any number of tokens, eight a cluster.
constexpr int kMaxExperts = 256;
constexpr int kMaxGroups = 32;

enum class Scoring { kSoftmax, kSigmoid };

struct RouteArgs {
  const __nv_bfloat16* x;              // [num_tokens, hidden]
  const __nv_bfloat16* router_weight;  // [num_experts, hidden], contiguous
  const float*
      squares;  // of a weighted x: [num_tokens, num_square_groups] (gemm/skinny.h); or nullptr
  int num_square_groups;
  const __nv_bfloat16* router_bias;  // [num_experts], added to logits; or nullptr
  const float* correction_bias;  // [num_experts], added to scores for the choice alone; or nullptr
  float* topk_weights;           // [num_tokens, top_k], by falling score
  int* topk_ids;                 // likewise
  float eps;                     // with squares: added to the mean square
  float scaling;                 // of the weights
  int num_tokens, hidden;        // hidden: a multiple of 8
  int num_experts, top_k;
  int num_groups, topk_groups;  // experts of the best groups alone are chosen; 1 and 1: no groups
  Scoring scoring;
  bool renormalize;  // the weights of a token to a sum of 1, before scaling
  int64_t x_row_stride;
};

// The formats of expert weights. FP8 has a scale a row, or one for each block of 128 by 128. x
// stays bfloat16: few tokens are limited by weight bytes, and rounding x to FP8 would gain nothing.
enum class Operands { kBf16, kFp8Rows, kFp8Blocks };

enum class Activation { kSiluMul, kGeluTanhMul };

// y is act(gate) * up, of gates and ups rounded to bfloat16: both clamped, up with an offset, the
// gate times alpha inside of the logistic function.
struct Gate {
  Activation activation;
  float alpha, limit, up_offset;  // limit: infinity where there is none
  bool interleaved;  // the weight's rows are pairs of a gate and its up, not two halves
};

// x: rows of in_features elements; weight: [num_experts, rows, in_features]; a pair is a token and
// one of its experts, token * top_k + slot.
struct ExpertsArgs {
  const __nv_bfloat16* x;     // gate_up: a row a token; down: a row a pair, contiguous
  const void* weight;         // contiguous; gate_up: an expert's gates, then its ups
  const float* weight_scale;  // FP8: [num_experts, rows], or [num_experts, rows / 128, in / 128]
  const int* topk_ids;  // [num_tokens, top_k]; a token's are distinct; outside the experts: none
  __nv_bfloat16* y;     // gate_up: [pairs, out_features]; down: [num_tokens, out_features]
  int num_tokens, top_k, num_experts;
  int in_features;   // a multiple of 128 bytes of weight
  int out_features;  // gate_up: half of the weight's rows; down: all of them
  int64_t x_row_stride;

  // gate_up
  const float* squares;  // of a weighted x: [num_tokens, num_square_groups]; or nullptr
  int num_square_groups;
  float eps;
  Activation activation;

  // down
  const float* topk_weights;         // [num_tokens, top_k]
  const __nv_bfloat16* residual;     // [num_tokens, out_features], contiguous; or nullptr
  const __nv_bfloat16* shared;       // likewise: the shared experts' result
  const __nv_bfloat16* norm_weight;  // [out_features], with the two results below; or nullptr
  __nv_bfloat16* weighted;           // [num_tokens, out_features]: y * norm_weight
  float* squares_out;                // [num_tokens, out_features / kTileRows]: of y
  bool ids_ready;  // ids and weights were complete before the kernel ahead let this one start
};

// `programmatic`: start before the kernel ahead has finished. Weights are then read before that
// one's results are waited for: they must not be among them.
cudaError_t launch_route(const RouteArgs& args, bool programmatic, cudaStream_t stream);
cudaError_t launch_gate_up(const ExpertsArgs& args, Operands operands, bool programmatic,
                           cudaStream_t stream);
cudaError_t launch_down(const ExpertsArgs& args, Operands operands, bool programmatic,
                        cudaStream_t stream);

}  // namespace fusewright::moe
