// The weighted sum of a few tokens' experts, the residual, and the norm's weight: a thread has
// eight columns of a token, and leaves the sum of their squares.
//
// Rounds where separate ops would. What was complete before the experts' layers is read before the
// wait: the kernel ahead has waited for it.
#pragma once

#include "../common/device.cuh"
#include "../common/numbers.cuh"
#include "packed.h"

namespace fusewright::moe {

constexpr int kSumThreads = 64;

__device__ __forceinline__ void unpack_eight(const uint4& v, float (&to)[8]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_bfloat16(words[i]);
    to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ uint4 pack_eight(const float (&v)[8]) {
  return {pack<__nv_bfloat16>(v[0], v[1]), pack<__nv_bfloat16>(v[2], v[3]),
          pack<__nv_bfloat16>(v[4], v[5]), pack<__nv_bfloat16>(v[6], v[7])};
}

// v rounded to bfloat16, plus `more`.
__device__ __forceinline__ void add_rounded(float (&v)[8], const uint4& more) {
  float other[8];
  unpack_eight(more, other);
  unpack_eight(pack_eight(v), v);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] += other[i];
}

__global__ void __launch_bounds__(kSumThreads) sum_kernel(const __grid_constant__ SumArgs args) {
  const int units = args.hidden / 8, i = blockIdx.x * kSumThreads + threadIdx.x;
  const int token = i / units, unit = i % units;
  start_next();
  if (token >= args.num_tokens) return;
  const auto read = [&](const __nv_bfloat16* from, int64_t row) {
    return reinterpret_cast<const uint4*>(from + row * args.hidden)[unit];
  };
  uint4 residual = {}, norm_weight = {};
  if (args.residual) residual = read(args.residual, token);
  if (args.norm_weight) norm_weight = read(args.norm_weight, 0);
  float weights[kMaxTopK];
#pragma unroll
  for (int k = 0; k < kMaxTopK; ++k) {
    weights[k] = k < args.top_k ? args.topk_weights[token * args.top_k + k] : 0.0f;
  }
  wait_for_previous();
  float total[8] = {};
#pragma unroll
  for (int k = 0; k < kMaxTopK; ++k) {
    if (k >= args.top_k) break;
    float v[8];
    unpack_eight(read(args.y, token * args.top_k + k), v);
#pragma unroll
    for (int j = 0; j < 8; ++j) total[j] = fmaf(weights[k], v[j], total[j]);
  }
  if (args.shared) add_rounded(total, read(args.shared, token));
  if (args.residual) add_rounded(total, residual);
  const uint4 rounded = pack_eight(total);
  const int64_t at = static_cast<int64_t>(token) * units + unit;
  reinterpret_cast<uint4*>(args.total)[at] = rounded;
  if (!args.norm_weight) return;
  float weight[8], squares = 0.0f;
  unpack_eight(rounded, total);
  unpack_eight(norm_weight, weight);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    squares = fmaf(total[j], total[j], squares);
    total[j] *= weight[j];
  }
  reinterpret_cast<uint4*>(args.weighted)[at] = pack_eight(total);
  args.squares[at] = squares;
}

}  // namespace fusewright::moe
