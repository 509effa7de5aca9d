// A linear layer for few tokens: y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], of bfloat16, of
// FP8 with scales, or of a weight of FP8 and an x of bfloat16, with float accumulation, rounded
// once; or what is made of such sums on the spot: a gated activation, that in FP8; or, of two
// linears in a row, the residual add and the RMSNorm between them (see Epilogue).
//
// Limit: memory. A call streams the weight; x and y are small beside it. What it takes to stay near
// that limit:
// - Bytes in flight, in an order that memory likes. One thread of a block issues tensor copies
//   (TMA) into a ring of shared-memory stages. A copy takes 512 bytes of each of its rows, and L2
//   is asked for no more than it takes: promotion to 256 bytes cost 5 % (docs/decisions).
// - Tensor cores, with 16 rows of the weight as the tall operand and 8 tokens as the narrow one
//   (mma m16n8k16): M = 1 costs them what M = 8 does, and that is little. FP8 MMAs (m16n8k32)
//   are, on sm_90, conversions to half, which is exact, and MMAs of halves.
// - Small blocks, two to six a multiprocessor: what one is late another takes on. Where N gives too
//   few, the `splits` blocks of a cluster share a tile along K, and add their sums through
//   distributed shared memory in order of rank: one launch, no atomics.
// - No gap between layers. Launched programmatically, the next call's blocks start while this one
//   drains, and fill their stages with weights before they wait for its result.
//
// Each element's sum has one order, whatever num_tokens is within a batch class (2, 8, 16, 32
// tokens): repeats are equal to the bit, and so is a token's result in another batch of the class.
//
// Free of any framework: pointers, strides and a stream. The instructions need sm_90.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "../collective/push.cuh"
#include "../common/mma.cuh"
#include "async_copy.cuh"
#include "skinny.h"
#include "skinny_tile.cuh"

namespace fusewright::gemm {

// With this many steps to go, a block lets the next kernel start; before its wait, if its whole
// share is in its ring.
constexpr int kStepsLeftAtTrigger = 4;

// Where the parts of a block's shared memory lie.
template <typename T>
struct Shared {
  uint32_t base;  // a multiple of 1024, as the swizzle's pattern repeats
  __device__ uint32_t weight(int stage) const { return base + stage * T::kStageBytes; }
  __device__ uint32_t x(int stage) const { return weight(stage) + T::kRows * kRowBytes; }
  __device__ uint32_t full(int stage) const {
    return base + T::kStages * T::kStageBytes + stage * 16;
  }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ uint32_t weight_scale(int stage) const {
    return base + T::kStages * (T::kStageBytes + 16) + stage * T::kScaleBytes;
  }
  __device__ uint32_t x_scale(int stage) const { return weight_scale(stage) + 16; }
};

// What a block adds up: a tile's rows, segments [first, first + num_steps) of K.  Its outputs begin
// at first_output; gated, half of its rows are gates and half the ups of the same outputs.
struct Share {
  int rank, first_output, first, num_steps;
};

// One thread: every copy of the block. Weights for the whole ring are under way before it waits for
// the kernel that makes x.
template <typename T>
__device__ __forceinline__ void produce(const CUtensorMap& weight_map, const CUtensorMap& x_map,
                                        const Shared<T>& shared, const Share& share,
                                        const SkinnyLinearArgs& args) {
  constexpr bool kBlockScales = T::Format::kBlockScales;
  constexpr bool kXBlockScales = kBlockScales && T::Format::kXScaled;
  const int num_groups = args.in_features / kScaleBlock;
  const int bytes = T::kRows * kRowBytes + args.num_tokens * T::kXRowBytes +
                    (kBlockScales ? 16 : 0) + (kXBlockScales ? 16 * args.num_tokens : 0);
  const auto copy_weight = [&](int step, int stage) {
    const uint32_t full = shared.full(stage), to = shared.weight(stage);
    const int line = (share.first + step) * kConsumerWarps;
    barrier_expect_bytes(full, bytes);
    copy_box(to, weight_map, 0, line, share.first_output, full, kEvictFirst);
    if (args.gated()) {
      copy_box(to + T::kRows / 2 * kRowBytes, weight_map, 0, line,
               args.out_features + share.first_output, full, kEvictFirst);
    }
    if (kBlockScales) {
      const int block = share.first_output / kScaleBlock;
      copy_bytes(shared.weight_scale(stage), args.weight_scale + block * num_groups + line, 16,
                 full);
    }
  };
  const auto copy_x = [&](int step, int stage) {
    const uint32_t full = shared.full(stage);
    copy_box(shared.x(stage), x_map, 0, (share.first + step) * T::kXLines, 0, full, kEvictNormal);
    if (kXBlockScales) {
      const int line = (share.first + step) * kConsumerWarps;
      copy_bytes(shared.x_scale(stage), args.x_scale + line * args.num_tokens, 16 * args.num_tokens,
                 full);
    }
    if (share.num_steps - step - 1 == kStepsLeftAtTrigger) start_next();
  };
  const int num_ahead = min(share.num_steps, T::kStages);
  for (int step = 0; step < num_ahead; ++step) copy_weight(step, step);
  // All that this block will fetch is under way: the next kernel's weights may follow.  That kernel
  // waits for this one, of which every thread waits for the one before.
  const bool fetched = share.num_steps <= T::kStages;
  if (fetched) start_next();
  wait_for_previous();
  if (!fetched && share.num_steps <= kStepsLeftAtTrigger) start_next();
  for (int step = 0; step < num_ahead; ++step) copy_x(step, step);
  for (int step = num_ahead; step < share.num_steps; ++step) {
    const int stage = step % T::kStages;
    barrier_wait(shared.empty(stage), (step / T::kStages + 1) % 2);
    copy_weight(step, stage);
    copy_x(step, stage);
  }
}

template <typename T>
using Sums = float[T::kTilesM][T::kTilesN][4];

// Half a line of an FP8 weight, of which `a` has 16 bytes a row, times the line of x, in bfloat16,
// that has its columns, added to sums.
template <typename T>
__device__ __forceinline__ void multiply_wide(uint32_t x, int x_line, int lane,
                                              const uint4 (&a)[T::kTilesM][2], Sums<T>& sums) {
#pragma unroll
  for (int j = 0; j < T::kTilesN; ++j) {
    const uint32_t row = x + (lane / 4 % T::kXRows + 8 * j) * T::kXRowBytes + x_line * kLineBytes;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint4 b = load_shared_16(row + ((lane % 4 * 2 + part) ^ x_line) * 16);
#pragma unroll
      for (int i = 0; i < T::kTilesM; ++i) {
        const auto& [a0, a1] = a[i];
        const uint32_t low[] = {part ? a0.z : a0.x, part ? a0.w : a0.y};
        const uint32_t high[] = {part ? a1.z : a1.x, part ? a1.w : a1.y};
        mma<__nv_bfloat16>(sums[i][j], bf16x2_of_e4m3<0>(low[0]), bf16x2_of_e4m3<0>(high[0]),
                           bf16x2_of_e4m3<1>(low[0]), bf16x2_of_e4m3<1>(high[0]), b.x, b.y);
        mma<__nv_bfloat16>(sums[i][j], bf16x2_of_e4m3<0>(low[1]), bf16x2_of_e4m3<0>(high[1]),
                           bf16x2_of_e4m3<1>(low[1]), bf16x2_of_e4m3<1>(high[1]), b.z, b.w);
      }
    }
  }
}

// One warp's line of one stage, all rows times all tokens, added to sums.
//
// A dot product does not mind the order of K, so each lane reads 16 bytes of a row at once and
// deals its words to the fragments of two MMAs, for the weight as for x: no shuffle, no
// ldmatrix. The swizzle keeps 16-byte chunk c of a line at c ^ (index of the line % 8), here of 4
// lines a row: so two rows' four chunks, which a quarter of the warp reads, touch every bank once.
template <typename T>
__device__ __forceinline__ void multiply_line(const Shared<T>& shared, int stage, int thread,
                                              Sums<T>& sums) {
  const int lane = thread % kWarpSize, line = thread / kWarpSize;
  const auto offset = [&](int row) {
    const int chunk = (lane % 4) ^ (line + 4 * (row % 2));
    return row * kRowBytes + line * kLineBytes + chunk * 16;
  };
  const uint32_t weight_offset = offset(lane / 4), x_offset = offset(lane / 4 % T::kXRows);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t weight = shared.weight(stage) + (weight_offset ^ (half * 64));
    uint4 a[T::kTilesM][2];
#pragma unroll
    for (int i = 0; i < T::kTilesM; ++i) {
      a[i][0] = load_shared_16(weight + 16 * i * kRowBytes);
      a[i][1] = load_shared_16(weight + (16 * i + 8) * kRowBytes);
    }
    if constexpr (T::kXRowBytes != kRowBytes) {
      multiply_wide<T>(shared.x(stage), 2 * line + half, lane, a, sums);
    } else {
      const uint32_t x = shared.x(stage) + (x_offset ^ (half * 64));
#pragma unroll
      for (int j = 0; j < T::kTilesN; ++j) {
        const uint4 b = load_shared_16(x + 8 * j * kRowBytes);
#pragma unroll
        for (int i = 0; i < T::kTilesM; ++i) {
          const auto& [a0, a1] = a[i];
          mma<typename T::Format::Operand>(sums[i][j], a0.x, a1.x, a0.y, a1.y, b.x, b.y);
          mma<typename T::Format::Operand>(sums[i][j], a0.z, a1.z, a0.w, a1.w, b.z, b.w);
        }
      }
    }
  }
}

// sums += part, each times the scale of the weight's block and, if x has scales, that of the token.
template <typename T>
__device__ __forceinline__ void add_scaled(const Shared<T>& shared, int stage, int thread,
                                           int num_tokens, const Sums<T>& part, Sums<T>& sums) {
  const int lane = thread % kWarpSize, line = thread / kWarpSize;
  const float weight_scale = load_shared_float(shared.weight_scale(stage) + 4 * line);
#pragma unroll
  for (int j = 0; j < T::kTilesN; ++j) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      float scale = weight_scale;
      if constexpr (T::Format::kXScaled) {
        const int token = min(8 * j + lane % 4 * 2 + odd, num_tokens - 1);
        scale *= load_shared_float(shared.x_scale(stage) + 4 * (line * num_tokens + token));
      }
#pragma unroll
      for (int i = 0; i < T::kTilesM; ++i) {
        sums[i][j][odd] += part[i][j][odd] * scale;
        sums[i][j][2 + odd] += part[i][j][2 + odd] * scale;
      }
    }
  }
}

// One consumer warp: its line of every stage.
template <typename T>
__device__ __forceinline__ void consume(const Shared<T>& shared, int num_steps, int num_tokens,
                                        Sums<T>& sums) {
  // A shuffle is not done twice. Of threadIdx itself, ptxas reads the special register again in
  // every step, in front of the loads.
  const int thread = __shfl_sync(~0u, threadIdx.x, threadIdx.x % kWarpSize);
  int stage = 0;
  uint32_t parity = 0;
  for (int step = 0; step < num_steps; ++step) {
    barrier_wait(shared.full(stage), parity);
    if constexpr (T::Format::kBlockScales) {
      Sums<T> part = {};
      multiply_line<T>(shared, stage, thread, part);
      add_scaled<T>(shared, stage, thread, num_tokens, part, sums);
    } else {
      multiply_line<T>(shared, stage, thread, sums);
    }
    __syncwarp();
    if (thread % kWarpSize == 0) barrier_arrive(shared.empty(stage));
    if (++stage == T::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// Fragments to shared memory, over the stages, as [warp][token][row].
template <typename T>
__device__ __forceinline__ void store_sums(float* to, const Sums<T>& sums) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int i = 0; i < T::kTilesM; ++i) {
#pragma unroll
    for (int j = 0; j < T::kTilesN; ++j) {
      const int token = 8 * j + lane % 4 * 2;
      if (token >= T::kXRows) continue;
      float* at = to + warp * T::kWarpSums + token * T::kSumPitch + 16 * i + lane / 4;
      at[0] = sums[i][j][0];
      at[T::kSumPitch] = sums[i][j][1];
      at[8] = sums[i][j][2];
      at[T::kSumPitch + 8] = sums[i][j][3];
    }
  }
}

__device__ __forceinline__ float load_element(const void* p, int64_t i, Element element) {
  if (element == Element::kBFloat16) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  }
  if (element == Element::kHalf) return __half2float(static_cast<const __half*>(p)[i]);
  return static_cast<const float*>(p)[i];
}

__device__ __forceinline__ float rounded(float v, Element element) {
  if (element == Element::kBFloat16) return __bfloat162float(__float2bfloat16_rn(v));
  return element == Element::kHalf ? __half2float(__float2half_rn(v)) : v;
}

__device__ __forceinline__ void store_element(void* p, int64_t i, Element element, float v) {
  if (element == Element::kBFloat16) {
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(v);
  } else if (element == Element::kHalf) {
    static_cast<__half*>(p)[i] = __float2half_rn(v);
  } else if (element == Element::kE4M3) {
    static_cast<__nv_fp8_e4m3*>(p)[i] = __nv_fp8_e4m3(v);  // to nearest, saturated
  } else {
    static_cast<float*>(p)[i] = v;
  }
}

__device__ __forceinline__ float activated(float gate, Epilogue epilogue) {
  if (epilogue == Epilogue::kSiluMul) return gate / (1.0f + expf(-gate));
  constexpr float kSqrtTwoOverPi = 0.7978845608f;
  const float inner = kSqrtTwoOverPi * (gate + 0.044715f * gate * gate * gate);
  return 0.5f * gate * (1.0f + tanhf(inner));
}

// A row's sum over ranks and warps, in order.
template <typename T>
__device__ __forceinline__ float add_up(uint32_t sums, int splits, int token, int row) {
  const uint32_t address = sums + (token * T::kSumPitch + row) * 4;
  float total = 0.0f;
  for (int rank = 0; rank < splits; ++rank) {
#pragma unroll
    for (int warp = 0; warp < kConsumerWarps; ++warp) {
      total += load_from_rank(address + warp * T::kWarpSums * 4, rank);
    }
  }
  return total;
}

// x's scale of a row's sum, but for those of blocks.
template <typename T>
__device__ __forceinline__ float x_scale_of(const SkinnyLinearArgs& args, int token) {
  if constexpr (!T::Format::kXScaled || T::Format::kBlockScales) return 1.0f;
  return args.x_scale[token * args.x_scale_stride];
}

// The weight's, of a row and, gated, of its up's row.
struct Scales {
  float weight = 1.0f, up = 1.0f;
};

// Read before the wait, as the weight is, and multiplied behind the sum.  What is used before the
// sum is waited for before it; what is read behind it, where a block has nothing else to do.
template <typename T>
__device__ __forceinline__ Scales read_scales(const SkinnyLinearArgs& args, int n) {
  Scales scales;
  if constexpr (T::Format::kScaled) {
    if (n >= args.out_features) return scales;
    scales.weight = args.weight_scale[n * args.weight_scale_stride];
    const int up_n = n + args.out_features;
    if (args.gated()) scales.up = args.weight_scale[up_n * args.weight_scale_stride];
  }
  return scales;
}

// A row's sum, scaled, with its bias.
template <typename T>
__device__ __forceinline__ float finish_sum(const SkinnyLinearArgs& args, uint32_t sums, int splits,
                                            int token, int row, int n, float scale) {
  const float total = add_up<T>(sums, splits, token, row) * scale;
  return args.bias ? total + load_element(args.bias, n, args.element) : total;
}

// The norm's scale of token thread / 8, from its sums of squares [num_tokens, groups]; for complete
// warps.
__device__ __forceinline__ float norm_scale(int thread, const float* token_squares, int groups,
                                            int num_tokens, int in_features, float eps) {
  const int token = thread / 8;
  float total = 0.0f;
  if (token < num_tokens) {
    const auto* squares = reinterpret_cast<const float4*>(token_squares + token * groups);
#pragma unroll 8
    for (int i = thread % 8; i < groups / 4; i += 8) {
      const float4 v = squares[i];
      total += (v.x + v.y) + (v.z + v.w);
    }
  }
#pragma unroll
  for (int other = 4; other; other /= 2) total += __shfl_xor_sync(~0u, total, other);
  return rsqrtf(total / static_cast<float>(in_features) + eps);
}

// What a block writes of the outputs of its cluster's tile: items [first, end) of [token][width].
// The add's are one block's: half warps are to hold whole groups.
struct Part {
  int width, first, end;
};

template <typename T>
__device__ __forceinline__ Part part_of(const SkinnyLinearArgs& args, const Share& share,
                                        int splits) {
  const int width = args.gated() ? T::kRows / 2 : T::kRows;
  const int num_items = args.num_tokens * width;
  if (args.epilogue == Epilogue::kAdd) return {width, 0, share.rank ? 0 : num_items};
  return {width, num_items * share.rank / splits, num_items * (share.rank + 1) / splits};
}

// What an item takes from memory, read before its sum is known.
struct Ahead {
  float x_scale, residual, norm_weight;
};

template <typename T>
__device__ __forceinline__ Ahead read_ahead(const SkinnyLinearArgs& args, const Share& share,
                                            const Part& part, int item) {
  const int token = item / part.width, n = share.first_output + item % part.width;
  if (item >= part.end || n >= args.out_features) return {};
  Ahead ahead = {x_scale_of<T>(args, token), 0.0f, 0.0f};
  if (args.epilogue == Epilogue::kAdd) {
    const int64_t at = static_cast<int64_t>(token) * args.out_features + n;
    ahead.residual = __bfloat162float(args.residual[at]);
    ahead.norm_weight = __bfloat162float(args.norm_weight[n]);
  }
  return ahead;
}

// One output of the add.  Half warps come here as a whole: their items are a group.
__device__ __forceinline__ void write_added(const SkinnyLinearArgs& args, int token, int n,
                                            float sum, const Ahead& ahead) {
  const float total = rounded(rounded(sum, args.element) + ahead.residual, args.element);
  const int64_t at = static_cast<int64_t>(token) * args.out_features + n;
  store_element(args.y, at, args.element, total);
  args.weighted[at] = __float2bfloat16_rn(total * ahead.norm_weight);
  float squares = total * total;
  const unsigned half = 0xffffu << (threadIdx.x & 16);
#pragma unroll
  for (int other = kNormGroup / 2; other; other /= 2) {
    squares += __shfl_xor_sync(half, squares, other);
  }
  if (n % kNormGroup == 0) args.squares_out[at / kNormGroup] = squares;
}

// An add over ranks: this rank's sums go to the others, and y is made of the sums of all. Two
// passes over the items of the tile, so that all of them travel at once. A word has the outputs of
// two lanes. `first` is of the thread's first item.
template <typename T>
__device__ __forceinline__ void write_reduced(const SkinnyLinearArgs& args,
                                              const collective::WordExchange& exchange,
                                              uint32_t sums, const Share& share, const Part& part,
                                              int splits, const Ahead& first) {
  const unsigned half = 0xffffu << (threadIdx.x & 16);
  const bool even = threadIdx.x % 2 == 0;
  const auto sendable_pair = [&](int token, int row, int n) {
    const float sum = finish_sum<T>(args, sums, splits, token, row, n, 1.0f);
    const __nv_bfloat16 rounded = __float2bfloat16_rn(sum);
    const unsigned own = reinterpret_cast<const uint16_t&>(rounded);
    return collective::without_negative_zeros(own | __shfl_down_sync(half, own, 1) << 16);
  };
  const auto each_item = [&](const auto& visit) {
    for (int item = part.first + threadIdx.x; item < part.end; item += kThreads) {
      const int token = item / part.width, row = item % part.width, n = share.first_output + row;
      if (n >= args.out_features) continue;
      const int64_t word = (static_cast<int64_t>(token) * args.out_features + n) / 2;
      visit(item, token, n, word, sendable_pair(token, row, n));
    }
  };
  each_item([&](int, int, int, int64_t word, unsigned pair) {
    if (even) exchange.push(word, pair);
  });
  each_item([&](int item, int token, int n, int64_t word, unsigned pair) {
    const bool is_first = item < part.first + kThreads;
    const Ahead ahead = is_first ? first : read_ahead<T>(args, share, part, item);
    float low = 0.0f, high = 0.0f;
    if (even) {
      exchange.pull(word, pair, [&](unsigned found) {
        low += __uint_as_float(found << 16);
        high += __uint_as_float(found & 0xffff0000u);
      });
    }
    const float odd = __shfl_up_sync(half, high, 1);
    write_added(args, token, n, even ? low : odd, ahead);
  });
}

// Writes this block's part of the tile to y.  `next` is of the
// thread's first item, as next_scales are; norm_scales are of the tokens; out_scale is y's, if FP8
// sums have one.
template <typename T>
__device__ __forceinline__ void write_part(const SkinnyLinearArgs& args, uint32_t sums,
                                           const float* norm_scales, const Share& share,
                                           const Part& part, int splits, Scales next_scales,
                                           Ahead next, float out_scale) {
  for (int item = part.first + threadIdx.x; item < part.end; item += kThreads) {
    const int token = item / part.width, row = item % part.width, n = share.first_output + row;
    const Ahead ahead = next;
    const Scales scales = next_scales;
    next = read_ahead<T>(args, share, part, item + kThreads);
    next_scales = read_scales<T>(args, share.first_output + (item + kThreads) % part.width);
    if (n >= args.out_features) continue;
    const float norm = args.squares ? norm_scales[token] : 1.0f;
    float value =
        finish_sum<T>(args, sums, splits, token, row, n, ahead.x_scale * scales.weight * norm);
    if (args.epilogue == Epilogue::kAdd) {
      write_added(args, token, n, value, ahead);
      continue;
    }
    if (args.gated()) {
      const int up_n = n + args.out_features;
      const float up =
          finish_sum<T>(args, sums, splits, token, row + part.width, up_n,
                        (T::Format::kScaled ? ahead.x_scale * scales.up : 1.0f) * norm);
      const float gate = activated(rounded(value, args.element), args.epilogue);
      value = gate * rounded(up, args.element);
    }
    const int64_t at = static_cast<int64_t>(token) * args.out_features + n;
    if (args.out_scale) {
      value = rounded(value, args.element) *
              (1.0f / (T::Format::kScaled ? out_scale : *args.out_scale));
      store_element(args.y, at, Element::kE4M3, value);
    } else {
      store_element(args.y, at, args.element, value);
    }
  }
}

// A kernel that sums over no ranks takes this in place of the peers.
struct OneRank {};
template <typename Ranks>
constexpr bool kReduces = std::is_same_v<Ranks, collective::Peers>;

template <typename T, typename Ranks>
__global__ void __launch_bounds__(kThreads)
    skinny_linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                         const __grid_constant__ CUtensorMap x_map,
                         const __grid_constant__ SkinnyLinearArgs args, int splits,
                         const __grid_constant__ Ranks ranks) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<T> shared{shared_address(memory)};
  Share share;
  share.rank = blockIdx.x % splits;
  share.first_output = blockIdx.x / splits * (args.gated() ? T::kRows / 2 : T::kRows);
  const int row_bytes = args.in_features * T::Format::kBytes;
  const int steps = (row_bytes + kRowBytes - 1) / kRowBytes;
  share.first = steps * share.rank / splits;
  share.num_steps = steps * (share.rank + 1) / splits - share.first;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), kConsumerWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();

  constexpr int kConsumers = kConsumerWarps * kWarpSize;
  Sums<T> sums = {};
  if (threadIdx.x == kConsumers) produce<T>(weight_map, x_map, shared, share, args);
  Scales scales;
  if constexpr (T::Format::kScaled) {
    const Part part = part_of<T>(args, share, splits);
    scales = read_scales<T>(args, share.first_output + (part.first + threadIdx.x) % part.width);
  }
  wait_for_previous();  // every thread: the kernel before may read what y overwrites
  unsigned epoch = 0;
  if constexpr (kReduces<Ranks>) epoch = collective::epoch_of(ranks);
  const Part part = part_of<T>(args, share, splits);
  const Ahead ahead = read_ahead<T>(args, share, part, part.first + threadIdx.x);
  const float out_scale = T::Format::kScaled && args.out_scale ? *args.out_scale : 1.0f;
  float scale = 1.0f;
  if (threadIdx.x < kConsumers) {
    if (args.squares) {
      scale = norm_scale(threadIdx.x, args.squares, args.num_groups, args.num_tokens,
                         args.in_features, args.eps);
    }
    consume<T>(shared, share.num_steps, args.num_tokens, sums);
  }
  __syncthreads();  // no warp reads the stages any more
  float* norm_scales = reinterpret_cast<float*>(memory + T::kSumBytes);
  if (threadIdx.x < kConsumers) {
    store_sums<T>(reinterpret_cast<float*>(memory), sums);
    if (threadIdx.x % 8 == 0) norm_scales[threadIdx.x / 8] = scale;
  }
  if (splits > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if constexpr (kReduces<Ranks>) {
    const collective::WordExchange exchange(ranks, epoch);
    if (threadIdx.x == kConsumers) exchange.count();
    write_reduced<T>(args, exchange, shared.base, share, part, splits, ahead);
  } else {
    write_part<T>(args, shared.base, norm_scales, share, part, splits, scales, ahead, out_scale);
  }
  if (splits > 1) cluster_sync();  // no block leaves while others read it
}

}  // namespace fusewright::gemm
