// A tile's sums are added up over warps and blocks, scaled, and written as the epilogue has it.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "../collective/push.cuh"
#include "../common/cluster.cuh"
#include "skinny.h"
#include "skinny_tile.cuh"

namespace fusewright::gemm {

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
  if (epilogue == Epilogue::kRelu) return gate < 0.0f ? 0.0f : gate;  // NaN stays
  if (epilogue == Epilogue::kRelu2) return gate < 0.0f ? 0.0f : gate * gate;
  if (epilogue == Epilogue::kGelu) return 0.5f * gate * (1.0f + erff(gate * 0.7071067812f));
  constexpr float kSqrtTwoOverPi = 0.7978845608f;
  const float inner = kSqrtTwoOverPi * (gate + 0.044715f * gate * gate * gate);
  return 0.5f * gate * (1.0f + tanhf(inner));
}

// The blocks that share a tile send their sums to the first of them, behind its ring. A launch has
// memory for as many blocks as there are.
template <typename T>
struct RankSums {
  Inbox inbox;
  float sums[kMaxSplits - 1][T::kXRows][T::kRows];  // of each block but the first

  __host__ __device__ static constexpr int bytes(int splits) {
    return splits > 1 ? sizeof(Inbox) + (splits - 1) * sizeof(sums[0]) : 0;
  }
};

// A tile's sums where they are added up: those of this block's warps, and of the other blocks.
template <typename T>
struct TileSums {
  const float* warps;
  const RankSums<T>* ranks;
  int splits;

  __device__ __forceinline__ float add_warps(int token, int row) const {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kConsumerWarps; ++warp) {
      total += warps[warp * T::kWarpSums + token * T::kSumPitch + row];
    }
    return total;
  }

  // In order of warps, then of blocks.
  __device__ __forceinline__ float add_all(int token, int row) const {
    float total = add_warps(token, row);
#pragma unroll 1
    for (int rank = 1; rank < splits; ++rank) total += ranks->sums[rank - 1][token][row];
    return total;
  }
};

// Sends the sums of this block's warps to the first block of the cluster.
template <typename T>
__device__ __forceinline__ void send_sums(const TileSums<T>& sums, RankSums<T>& to, int rank,
                                          int x_rows) {
#pragma unroll 1
  for (int item = threadIdx.x; item < x_rows * T::kRows; item += kThreads) {
    const int token = item / T::kRows, row = item % T::kRows;
    to.inbox.send(&to.sums[rank - 1][token][row], sums.add_warps(token, row), 0);
  }
}

// The scale of x for a token's sums; 1 if x has none, or if block scales were applied before.
template <typename T>
__device__ __forceinline__ float x_scale_of(const SkinnyLinearArgs& args, int token) {
  if constexpr (!T::Format::kXScaled || T::Format::kBlockScales) return 1.0f;
  return args.x_scale[token * args.x_scale_stride];
}

// Scales of the weight: of an output's row and, for a gated layer, of its up row.
struct Scales {
  float weight = 1.0f, up = 1.0f;
};

// Reads the scales of row n, which are multiplied with the finished sums.  Like the weight, they
// are constants, so the caller reads them before it waits for the kernel ahead.
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

// What a norm multiplies a token's sums with, and the mean that a layer norm takes from its row.
struct Norm {
  float scale = 1.0f, mean = 0.0f;
};

// A row's sum, scaled, with its bias; that of a layer norm's x has its mean taken away.
template <typename T>
__device__ __forceinline__ float finish_sum(const SkinnyLinearArgs& args, const TileSums<T>& sums,
                                            int token, int row, int n, float scale,
                                            const Norm& norm) {
  float total = sums.add_all(token, row);
  if (std::is_same_v<typename T::Format, Bf16> && args.x_rows() > args.num_tokens) {
    total = (total - norm.mean * sums.add_all(args.num_tokens, row)) * norm.scale +
            sums.add_all(args.num_tokens + 1, row);
  } else {
    total *= scale * norm.scale;
  }
  return args.bias ? total + load_element(args.bias, n, args.element) : total;
}

// The sum of the groups of token thread / 8, of [num_tokens, groups]; for complete warps.
__device__ __forceinline__ float sum_groups(int thread, const float* of_tokens, int groups,
                                            int num_tokens) {
  const int token = thread / 8;
  float total = 0.0f;
  if (token < num_tokens) {
    const auto* of_token = reinterpret_cast<const float4*>(of_tokens + token * groups);
#pragma unroll 8
    for (int i = thread % 8; i < groups / 4; i += 8) {
      const float4 v = of_token[i];
      total += (v.x + v.y) + (v.z + v.w);
    }
  }
#pragma unroll
  for (int other = 4; other; other /= 2) total += __shfl_xor_sync(~0u, total, other);
  return total;
}

// The norm's scale of token thread / 8, from its sums of squares; for complete warps.
__device__ __forceinline__ float norm_scale(int thread, const float* token_squares, int groups,
                                            int num_tokens, int in_features, float eps) {
  const float total = sum_groups(thread, token_squares, groups, num_tokens);
  return rsqrtf(total / static_cast<float>(in_features) + eps);
}

// The norm of token thread / 8; for complete warps.
__device__ __forceinline__ Norm norm_of(int thread, const SkinnyLinearArgs& args) {
  const float width = static_cast<float>(args.in_features);
  float square = sum_groups(thread, args.squares, args.num_groups, args.num_tokens) / width;
  float mean = 0.0f;
  if (args.centered) {
    const float* sums = args.squares + args.num_tokens * args.num_groups;
    mean = sum_groups(thread, sums, args.num_groups, args.num_tokens) / width;
    square = fmaxf(square - mean * mean, 0.0f);
  }
  return {rsqrtf(square + args.eps), mean};
}

// The outputs of a tile, items of [token][width], which the first block of a cluster writes.
struct Part {
  int log2_width, end;

  __device__ __forceinline__ int token(int item) const { return item >> log2_width; }
  __device__ __forceinline__ int row(int item) const { return item & ((1 << log2_width) - 1); }
};

template <typename T>
__device__ __forceinline__ Part part_of(const SkinnyLinearArgs& args, const Share& share) {
  const int log2_width = args.gated() ? T::kLog2Rows - 1 : T::kLog2Rows;
  return {log2_width, share.rank ? 0 : args.num_tokens << log2_width};
}

// An item takes these from memory, and reads them before its sum is known.
struct Ahead {
  float x_scale, residual, norm_weight;
};

template <typename T>
__device__ __forceinline__ Ahead read_ahead(const SkinnyLinearArgs& args, const Share& share,
                                            const Part& part, int item) {
  const int token = part.token(item), n = share.first_output + part.row(item);
  if (item >= part.end || n >= args.out_features) return {};
  Ahead ahead = {x_scale_of<T>(args, token), 0.0f, 0.0f};
  if (args.epilogue == Epilogue::kAdd) {
    const int64_t at = static_cast<int64_t>(token) * args.out_features + n;
    ahead.residual = __bfloat162float(args.residual[at]);
    ahead.norm_weight = __bfloat162float(args.norm_weight[n]) + args.norm_offset;
  }
  return ahead;
}

// One output of the add.  Half warps come here as a whole: their items are a group.
__device__ __forceinline__ void write_added(const SkinnyLinearArgs& args, int token, int n,
                                            float sum, const Ahead& ahead) {
  constexpr Element kElement = Element::kBFloat16;
  const float scaled = rounded(rounded(sum, kElement) * args.factor, kElement);
  const float total = rounded(scaled + ahead.residual, kElement);
  const int64_t at = static_cast<int64_t>(token) * args.out_features + n;
  store_element(args.y, at, kElement, total);
  args.weighted[at] = __float2bfloat16_rn(total * ahead.norm_weight);
  const unsigned half = 0xffffu << (threadIdx.x & 16);
  const auto sum_group = [&](float v) {
#pragma unroll
    for (int other = kNormGroup / 2; other; other /= 2) v += __shfl_xor_sync(half, v, other);
    return v;
  };
  const float squares = sum_group(total * total);
  if (n % kNormGroup == 0) args.squares_out[at / kNormGroup] = squares;
  if (!args.centered) return;
  const float sums = sum_group(total);
  const int64_t behind = static_cast<int64_t>(args.num_tokens) * args.out_features;
  if (n % kNormGroup == 0) args.squares_out[(behind + at) / kNormGroup] = sums;
  if (token == 0) {
    args.weighted[behind + n] = args.norm_weight[n];
    args.weighted[behind + args.out_features + n] =
        args.norm_bias ? args.norm_bias[n] : __float2bfloat16_rn(0.0f);
  }
}

// An add over ranks: this rank's sums go to the others, and y is made of the sums of all. Two
// passes over the items of the tile, so that all of them travel at once. A word has the outputs of
// two lanes. `first` is of the thread's first item.
template <typename T>
__device__ __forceinline__ void write_reduced(const SkinnyLinearArgs& args,
                                              const collective::WordExchange& exchange,
                                              const TileSums<T>& sums, const Share& share,
                                              const Part& part, const Ahead& first) {
  const unsigned half = 0xffffu << (threadIdx.x & 16);
  const bool even = threadIdx.x % 2 == 0;
  const auto sendable_pair = [&](int token, int row, int n) {
    const float scale = read_scales<T>(args, n).weight;
    const float sum = finish_sum<T>(args, sums, token, row, n, scale, {});
    const __nv_bfloat16 rounded = __float2bfloat16_rn(sum);
    const unsigned own = reinterpret_cast<const uint16_t&>(rounded);
    return collective::without_negative_zeros(own | __shfl_down_sync(half, own, 1) << 16);
  };
  const auto each_item = [&](const auto& visit) {
    for (int item = threadIdx.x; item < part.end; item += kThreads) {
      const int token = part.token(item), row = part.row(item), n = share.first_output + row;
      if (n >= args.out_features) continue;
      const int64_t word = (static_cast<int64_t>(token) * args.out_features + n) / 2;
      visit(item, token, n, word, sendable_pair(token, row, n));
    }
  };
  each_item([&](int, int, int, int64_t word, unsigned pair) {
    if (even) exchange.push(word, pair);
  });
  each_item([&](int item, int token, int n, int64_t word, unsigned pair) {
    const bool is_first = item < kThreads;
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

// Calls visit for each output of the tile that this thread has, of which `next` and next_scales are
// of the first: with its token, row, feature, sum, norm, and what was read. Code behind the sums is
// kept short, since it is cold: other kernels ran since the last layer's call.
template <typename T, typename Visit>
__device__ __forceinline__ void each_output(const SkinnyLinearArgs& args, const TileSums<T>& sums,
                                            const Norm* norms, const Share& share, const Part& part,
                                            Scales next_scales, Ahead next, const Visit& visit) {
#pragma unroll 1
  for (int item = threadIdx.x; item < part.end; item += kThreads) {
    const int token = part.token(item), row = part.row(item), n = share.first_output + row;
    const Ahead ahead = next;
    const Scales scales = next_scales;
    next = read_ahead<T>(args, share, part, item + kThreads);
    next_scales = read_scales<T>(args, share.first_output + part.row(item + kThreads));
    if (n >= args.out_features) continue;
    const Norm norm = args.squares ? norms[token] : Norm{};
    const float sum = finish_sum<T>(args, sums, token, row, n, ahead.x_scale * scales.weight, norm);
    visit(token, row, n, sum, norm, ahead, scales);
  }
}

// Writes the tile to y, but for an add. norms are of the tokens; out_scale is y's, if FP8 sums have
// one.
template <typename T>
__device__ __forceinline__ void write_part(const SkinnyLinearArgs& args, const TileSums<T>& sums,
                                           const Norm* norms, const Share& share, const Part& part,
                                           const Scales& first_scales, const Ahead& first,
                                           float out_scale) {
  const auto write = [&](int token, int row, int n, float value, const Norm& norm,
                         const Ahead& ahead, const Scales& scales) {
    if (args.gated()) {
      const int up_n = n + args.out_features;
      const float up = finish_sum<T>(args, sums, token, row + (1 << part.log2_width), up_n,
                                     T::Format::kScaled ? ahead.x_scale * scales.up : 1.0f, norm);
      const float gate = activated(rounded(value, args.element), args.epilogue);
      value = gate * rounded(up, args.element);
    } else if (args.epilogue != Epilogue::kLinear) {
      value = activated(rounded(value, args.element), args.epilogue);
    }
    const int64_t at = static_cast<int64_t>(token) * args.out_features + n;
    if (args.out_scale) {
      value = rounded(value, args.element) *
              (1.0f / (T::Format::kScaled ? out_scale : *args.out_scale));
      store_element(args.y, at, Element::kE4M3, value);
    } else {
      store_element(args.y, at, args.element, value);
    }
  };
  each_output<T>(args, sums, norms, share, part, first_scales, first, write);
}

// Writes the outputs of an add.
template <typename T>
__device__ __forceinline__ void write_sum(const SkinnyLinearArgs& args, const TileSums<T>& sums,
                                          const Norm* norms, const Share& share, const Part& part,
                                          const Scales& first_scales, const Ahead& first) {
  const auto write = [&](int token, int, int n, float sum, const Norm&, const Ahead& ahead,
                         const Scales&) { write_added(args, token, n, sum, ahead); };
  each_output<T>(args, sums, norms, share, part, first_scales, first, write);
}

// A kernel that sums over no ranks takes this in place of the peers.
struct OneRank {};
template <typename Ranks>
constexpr bool kReduces = std::is_same_v<Ranks, collective::Peers>;

}  // namespace fusewright::gemm
