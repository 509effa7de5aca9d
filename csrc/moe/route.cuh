// The router of a mixture of experts in one launch: logits of x and the router's weight, the scale
// of the norm before it, scores, the choice of experts and their weights.
//
// A cluster of blocks serves up to eight tokens, which are the narrow operand of the tensor cores.
// A block holds some experts: its warps read their rows into registers before they wait for x, each
// a slice of the columns, and the block sends its logits to the one that chooses for that token.
// There all experts are ranked at once: a thread counts how many are ahead of its own, so that the
// choice has no serial steps. Equal scores go to the lower expert; NaN comes after all numbers.
// Every sum has one order, whatever num_tokens is.
#pragma once

#include <cuda_bf16.h>

#include "../common/cluster.cuh"
#include "moe.h"
#include "tile.cuh"

namespace fusewright::moe {

constexpr int kRouteWarps = 8;  // of a block
constexpr int kNormWarps = 2;   // more, for the norm's scales: eight lanes a token
template <bool kWide>
constexpr int kTileExperts = kWide ? 16 : 8;    // of a block at most: an MMA's rows, or half
constexpr int kVectors = 8;                     // of 16 bytes, that a lane holds of a row
constexpr int kWarpColumns = kVectors * 4 * 8;  // four lanes share a row
constexpr int kSpan = kRouteWarps * kWarpColumns;

// The shared memory of a block that chooses the experts of a token.
struct Choice {
  Inbox inbox;
  float norm_scale[kMaxTokens];
  float group_score[kMaxGroups];
  float chosen_score[kMaxTopK];
  int chosen[kMaxTopK];
  float choice[kMaxExperts];              // what experts are chosen by
  alignas(16) uint32_t key[kMaxExperts];  // its order, of integers; 0 behind the last expert
  float score[kMaxExperts];
  float logits[kMaxExperts];  // of this block's token, as messages fill them
};

// Where two blocks of the streaming GEMM run, their deep rings leave 8.5 KB: a block of few experts
// starts beside them, and not behind them.
template <bool kWide>
struct RouteShared : Choice {
  float sums[kRouteWarps][kTileExperts<kWide>][kMaxTokens];
};
static_assert(sizeof(RouteShared<false>) + 1024 <= 8704);

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int other = kWarpSize / 2; other; other /= 2) v += __shfl_xor_sync(kAllLanes, v, other);
  return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int other = kWarpSize / 2; other; other /= 2) {
    v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, other));
  }
  return v;
}

// Whether expert a, of that choice, is ahead of expert b.
__device__ __forceinline__ bool is_ahead(float choice_a, int a, float choice_b, int b) {
  return choice_a > choice_b || (choice_a == choice_b && a < b);
}

// A lane's part of a row: the vectors from `column` on, zeros from `last` on.
__device__ __forceinline__ void load_vectors(uint4 (&to)[kVectors], const __nv_bfloat16* row,
                                             int column, int last) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = column + i * 32;
    to[i] = at < last ? *reinterpret_cast<const uint4*>(row + at) : uint4{};
  }
}

// Keeps the compiler from loading vectors one by one as they are used.
__device__ __forceinline__ void load_all(uint4 (&v)[kVectors]) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    asm volatile("" : "+r"(v[i].x), "+r"(v[i].y), "+r"(v[i].z), "+r"(v[i].w));
  }
}

// Sums of up to 16 experts by 8 tokens over this warp's columns. The first span's weights are read
// before the wait. kWide: more than eight experts; else the MMA's other rows are zeros.
template <bool kWide>
__device__ __forceinline__ void add_logits(const RouteArgs& args, int first_expert, int num_experts,
                                           int first_token, int num_tokens, float (&sums)[4]) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, row = lane / 4;
  const int hidden = args.hidden;
  const __nv_bfloat16* low_row =
      args.router_weight + static_cast<int64_t>(first_expert + row) * hidden;
  const __nv_bfloat16* high_row = low_row + 8 * hidden;
  const __nv_bfloat16* x = args.x + (first_token + row) * args.x_row_stride;
  const int low_last = row < num_experts ? hidden : 0,
            high_last = row + 8 < num_experts ? hidden : 0;
  const int x_last = row < num_tokens ? hidden : 0;
  float halves[2][4] = {};  // chains of MMAs
  uint4 low[kVectors] = {}, high[kVectors] = {}, values[kVectors];
  // From one span of zeros on, which brings the first weights, and the loop's instructions near.
#pragma unroll 1
  for (int from = -kSpan; from < hidden; from += kSpan) {
    const int column = from + warp * kWarpColumns + lane % 4 * 8;
    if (from == 0) wait_for_previous();
    load_vectors(values, x, column, from < 0 ? column : x_last);
    load_all(values);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint4 a = low[i], c = high[i], b = values[i];
      mma<__nv_bfloat16>(halves[0], a.x, c.x, a.y, c.y, b.x, b.y);
      mma<__nv_bfloat16>(halves[1], a.z, c.z, a.w, c.w, b.z, b.w);
    }
    load_vectors(low, low_row, column + kSpan, low_last);
    if constexpr (kWide) load_vectors(high, high_row, column + kSpan, high_last);
    if (from < 0) start_next();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = halves[0][i] + halves[1][i];
}

// Ordered as the numbers are; 0 is below all.
__device__ __forceinline__ uint32_t key_of(float v) {
  const uint32_t bits = __float_as_uint(v == 0.0f ? 0.0f : v);  // -0 is 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Keys of experts outside the best groups become that of minus infinity. A group's score is its
// best expert's choice or, with a correction bias, the sum of its best two.
__device__ __forceinline__ void mask_groups(const RouteArgs& args, Choice& shared) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int size = args.num_experts / args.num_groups;
  for (int group = warp; group < args.num_groups; group += blockDim.x / kWarpSize) {
    float best = -INFINITY, second = -INFINITY;
    for (int i = lane; i < size; i += kWarpSize) {
      const float v = shared.choice[group * size + i];
      second = fmaxf(second, fminf(best, v));
      best = fmaxf(best, v);
    }
#pragma unroll
    for (int other = kWarpSize / 2; other; other /= 2) {
      const float their_best = __shfl_xor_sync(kAllLanes, best, other);
      const float their_second = __shfl_xor_sync(kAllLanes, second, other);
      second = fmaxf(fmaxf(second, their_second), fminf(best, their_best));
      best = fmaxf(best, their_best);
    }
    if (lane == 0) shared.group_score[group] = args.correction_bias ? best + second : best;
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < args.num_experts; expert += blockDim.x) {
    const int group = expert / size;
    const float score = shared.group_score[group];
    int ahead = 0;
    for (int i = 0; i < args.num_groups; ++i) {
      ahead += is_ahead(shared.group_score[i], i, score, group);
    }
    if (ahead >= args.topk_groups) shared.key[expert] = key_of(-INFINITY);
  }
  __syncthreads();
}

// Whether weights follow from the chosen experts' logits alone.
__device__ __forceinline__ bool chosen_suffice(const RouteArgs& args) {
  return args.scoring == Scoring::kSoftmax && args.renormalize && !args.correction_bias;
}

// Logits to scores and to what experts are chosen by: a softmax keeps the order of logits, which do
// not tie where it rounds two to one value.
__device__ __forceinline__ void score_experts(const RouteArgs& args, Choice& shared,
                                              float norm_scale) {
  const int num_experts = args.num_experts, lane = threadIdx.x % kWarpSize;
  for (int expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
    float logit = shared.logits[expert] * norm_scale;
    if (args.router_bias) logit += __bfloat162float(args.router_bias[expert]);
    const float score = logit == logit ? logit : -INFINITY;
    shared.score[expert] = shared.choice[expert] = score;
    shared.key[expert] = key_of(score);
  }
  __syncthreads();
  if (chosen_suffice(args)) return;
  const float* bias = args.correction_bias;
  const bool softmax = args.scoring == Scoring::kSoftmax;
  float highest = 0.0f, factor = 1.0f;
  if (softmax) {  // in every warp alike
    highest = -INFINITY;
    for (int i = lane; i < num_experts; i += kWarpSize) highest = fmaxf(highest, shared.score[i]);
    highest = warp_max(highest);
    float total = 0.0f;
    for (int i = lane; i < num_experts; i += kWarpSize) total += expf(shared.score[i] - highest);
    factor = 1.0f / warp_sum(total);
    __syncthreads();
  }
  for (int expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
    const float logit = shared.score[expert];
    const float score = softmax ? expf(logit - highest) * factor : 1.0f / (1.0f + expf(-logit));
    shared.score[expert] = score;
    if (bias || !softmax) {
      const float choice = score + (bias ? bias[expert] : 0.0f);
      shared.choice[expert] = choice;
      shared.key[expert] = key_of(choice);
    }
  }
  __syncthreads();
}

// The expert whose choice is ahead of all but `rank` others', to shared.chosen[rank], of top_k
// ranks. Adjacent threads, 2^log2_sharers of them, share an expert's comparisons.
__device__ __forceinline__ void rank_experts(const RouteArgs& args, Choice& shared,
                                             int log2_sharers) {
  const int quads = (args.num_experts + 3) / 4, sharers = 1 << log2_sharers;
  const int expert = threadIdx.x >> log2_sharers, sharer = threadIdx.x & (sharers - 1);
  const bool real = expert < args.num_experts;
  int rank = 0;
  if (real) {
    const auto* all = reinterpret_cast<const uint4*>(shared.key);
    const uint32_t key = shared.key[expert];
    const int own = expert / 4;
#pragma unroll 8
    for (int quad = sharer; quad < quads; quad += sharers) {
      const uint4 v = all[quad];
      const uint32_t behind = quad < own ? key - 1 : key;  // a lower expert's equal key is ahead
      rank += (v.x > behind) + (v.y > behind) + (v.z > behind) + (v.w > behind);
    }
    if (sharer == 0) {
      const uint4 v = all[own];
      const int place = expert % 4;
      rank += (v.x == key && place > 0) + (v.y == key && place > 1) + (v.z == key && place > 2);
    }
  }
  for (int other = sharers / 2; other; other /= 2) rank += __shfl_xor_sync(kAllLanes, rank, other);
  if (real && sharer == 0 && rank < args.top_k) {
    shared.chosen[rank] = expert;
    shared.chosen_score[rank] = shared.score[expert];
  }
  __syncthreads();
}

// Writes the choice of one token. One warp calls it.
__device__ __forceinline__ void write_choice(const RouteArgs& args, const Choice& shared, int token,
                                             bool real) {
  const int slot = threadIdx.x;
  float weight = 0.0f;
  if (slot < args.top_k) {
    weight = shared.chosen_score[slot];
    if (chosen_suffice(args)) weight = expf(weight - shared.chosen_score[0]);
  }
  if (args.renormalize) weight /= warp_sum(weight) + 1e-20f;
  if (slot >= args.top_k || !real) return;
  const int64_t at = static_cast<int64_t>(token) * args.top_k + slot;
  args.topk_weights[at] = weight * args.scaling;
  args.topk_ids[at] = shared.chosen[slot];
}

// This block's logits of every token, to the blocks that choose; and the norm's scales.
template <bool kWide>
__device__ __forceinline__ void send_logits(const RouteArgs& args, RouteShared<kWide>& shared,
                                            int block_experts, int first_token, int num_tokens) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int first_expert = block_rank() * block_experts;
  const int num_experts = max(0, min(block_experts, args.num_experts - first_expert));
  if (warp < kRouteWarps) {
    float sums[4] = {};
    add_logits<kWide>(args, first_expert, num_experts, first_token, num_tokens, sums);
    float (&to)[kTileExperts<kWide>][kMaxTokens] = shared.sums[warp];
    const int row = lane / 4, token = lane % 4 * 2;
    *reinterpret_cast<float2*>(&to[row][token]) = {sums[0], sums[1]};
    if constexpr (kWide) *reinterpret_cast<float2*>(&to[row + 8][token]) = {sums[2], sums[3]};
  } else {
    wait_for_previous();
    const int groups = args.num_square_groups, thread = threadIdx.x % (kMaxTokens * 8);
    const float scale = gemm::norm_scale(thread, args.squares + first_token * groups, groups,
                                         num_tokens, args.hidden, args.eps);
    if (lane % 8 == 0) shared.norm_scale[thread / 8] = scale;
  }
  cluster_wait();  // every inbox of the cluster is ready
  __syncthreads();
  if (threadIdx.x >= kTileExperts<kWide> * kMaxTokens) return;
  const int expert = threadIdx.x / kMaxTokens, token = threadIdx.x % kMaxTokens;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kRouteWarps; ++i) sum += shared.sums[i][expert][token];
  if (expert < num_experts && token < num_tokens) {
    shared.inbox.send(&shared.logits[first_expert + expert], sum, token);
  }
}

// Blocks of `block_experts` experts, `cluster` of them a cluster.
template <bool kWide>
__global__ void __launch_bounds__((kRouteWarps + kNormWarps) * kWarpSize, kWide ? 1 : 2)
    route_kernel(const __grid_constant__ RouteArgs args, int block_experts, int cluster,
                 int log2_sharers) {
  __shared__ RouteShared<kWide> shared;
  const int warp = threadIdx.x / kWarpSize;
  const int rank = block_rank(), first_token = blockIdx.x / cluster * kMaxTokens;
  const int num_tokens = min(kMaxTokens, args.num_tokens - first_token);
  if (threadIdx.x == 0) {
    shared.inbox.init();
    barrier_init_fence();
    shared.inbox.expect(args.num_experts * 4);
  }
  if (threadIdx.x < kMaxTopK) shared.chosen[threadIdx.x] = 0;
  if (threadIdx.x < 3 && args.num_experts + threadIdx.x < kMaxExperts) {
    shared.key[args.num_experts + threadIdx.x] = 0;
  }
  cluster_arrive();
  // The choice is made once of no logits before, while there is time, to bring its instructions
  // near.
#pragma unroll 1
  for (int real = 0; real < 2; ++real) {
    if (real) {
      send_logits<kWide>(args, shared, block_experts, first_token, num_tokens);
      if (rank >= num_tokens) return;
      shared.inbox.wait(0);
    }
    score_experts(args, shared, args.squares ? shared.norm_scale[rank % kMaxTokens] : 1.0f);
    if (args.num_groups > 1) mask_groups(args, shared);
    rank_experts(args, shared, log2_sharers);
    if (warp == 0) write_choice(args, shared, first_token + rank, real);
  }
}

}  // namespace fusewright::moe
