// A linear layer by a weight of four bits for some tokens: y[m, n] = sum_k x[m, k] * weight[n, k] +
// bias[n], or an activation of it, with float sums, rounded once. Numbers of the weight are made in
// bfloat16, with their scales.
//
// Limit: the bytes of the weight for few tokens, the matrix units for more. What it takes:
// - The weight is the tall operand of warpgroup MMAs and comes from registers, where it is made:
//   each number once for all tokens, in two and a half instructions. x comes from shared memory,
//   as tensor copies leave it, so that columns are in their own order.
// - Two rings of stages: lines of 256 columns of the weight, of which those of the whole ring are
//   under way before the wait for x, and lines of 64 columns of x.
// - Registers hold the numbers of two lines of x: those of one are made while the other's are
//   multiplied.
// - The `splits` blocks of a cluster share a tile along K. Each leaves its sums in its shared
//   memory; all of them add up, in order of rank, and store a part of the tile.
//
// Free of any framework; sm_90a.
#pragma once

#include "../common/cluster.cuh"
#include "../common/numbers.cuh"
#include "../common/wgmma.cuh"
#include "async_copy.cuh"
#include "packed_numbers.cuh"
#include "skinny.h"
#include "skinny_packed.cuh"
#include "skinny_write.cuh"

namespace fusewright::gemm {

constexpr int kPackedComputeThreads = 2 * kWarpgroupThreads;
constexpr int kPackedThreads = kPackedComputeThreads + kWarpgroupThreads;  // of which one copies
constexpr int kLog2PackedRows = 7, kPackedRows = 1 << kLog2PackedRows;     // of a tile
constexpr int kPackedLineColumns = 2 * kLineBytes;  // of a line of the weight
constexpr int kXLineColumns = kLineBytes / 2;       // of a line of x
constexpr int kXLinesOfLine = kPackedLineColumns / kXLineColumns;
constexpr int kMostPackedSplits = 8;
constexpr int kMostPackedBytes = 225 * 1024;  // of dynamic shared memory
constexpr int kPackedSumPitch = kPackedRows + 4;

// kZeros: there are zero points.
template <typename Format_, bool kZeros_, int kTokens_, int kStages_, int kXStages_>
struct PackedTile {
  using Format = Format_;
  using Table = ScaleTable<Format, kPackedRows, kPackedComputeThreads / kWarpSize>;
  static constexpr bool kZeros = kZeros_;
  static constexpr int kTokens = kTokens_, kStages = kStages_, kXStages = kXStages_;
  // Blocks a multiprocessor, and the registers of a thread that multiplies.
  static constexpr int kBlocks = kTokens <= 64 ? 2 : 1, kRegisters = kTokens <= 64 ? 104 : 232;
  static_assert(kXStages + 2 < kXLinesOfLine * kStages, "weights are ahead of x");
  static constexpr int kWeightBytes = kPackedRows * kLineBytes, kXBytes = kTokens * kLineBytes;
  static constexpr int kRingBytes = kStages * kWeightBytes + kXStages * kXBytes;
  static constexpr int kSumBytes = kTokens * kPackedSumPitch * 4;
  static constexpr int kBytes = kRingBytes > kSumBytes ? kRingBytes : kSumBytes;
};

template <typename T>
struct PackedShared {
  uint64_t full[T::kStages], empty[T::kStages], x_full[T::kXStages], x_empty[T::kXStages];
};

// What a block computes: a tile's outputs from `output` on, over some lines of K.
struct PackedShare {
  int rank, splits, log2_outputs, output, first, num_lines;

  __device__ PackedShare(const SkinnyLinearArgs& args, int splits)
      : rank(splits > 1 ? block_rank() : 0),
        splits(splits),
        log2_outputs(args.gated() ? kLog2PackedRows - 1 : kLog2PackedRows),
        output(blockIdx.x / splits << log2_outputs) {
    const int lines = args.in_features / kPackedLineColumns;
    first = rank * lines / splits;
    num_lines = (rank + 1) * lines / splits - first;
  }
};

// A position in a ring.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// One thread issues every copy of the block.
template <typename T>
__device__ __forceinline__ void copy_packed(const CUtensorMap& weight_map, const CUtensorMap& x_map,
                                            PackedShared<T>& shared, uint32_t memory,
                                            const SkinnyLinearArgs& args,
                                            const PackedShare& share) {
  const uint32_t x_memory = memory + T::kStages * T::kWeightBytes;
  RingPlace<T::kStages> place;
  RingPlace<T::kXStages> x_place;
  int line = 0;
  const auto copy_weight = [&] {
    const uint32_t full = shared_address(&shared.full[place.stage]);
    const uint32_t to = memory + place.stage * T::kWeightBytes;
    barrier_expect_bytes(full, T::kWeightBytes);
    copy_box(to, weight_map, 0, share.first + line, share.output, full, kEvictFirst);
    if (args.gated()) {
      copy_box(to + T::kWeightBytes / 2, weight_map, 0, share.first + line,
               args.out_features + share.output, full, kEvictFirst);
    }
    place.next();
    ++line;
  };
  const int ahead = min(share.num_lines, T::kStages);
  while (line < ahead) copy_weight();
  const bool fetched = ahead == share.num_lines;
  if (fetched) start_next();
  wait_for_previous();
  const int first_x = share.first * kXLinesOfLine, x_lines = share.num_lines * kXLinesOfLine;
  for (int x_line = 0; x_line < x_lines; ++x_line) {
    if (x_line >= T::kXStages) {
      barrier_wait(shared_address(&shared.x_empty[x_place.stage]), x_place.parity ^ 1);
    }
    const uint32_t full = shared_address(&shared.x_full[x_place.stage]);
    barrier_expect_bytes(full, T::kXBytes);
    copy_box(x_memory + x_place.stage * T::kXBytes, x_map, 0, first_x + x_line, 0, full,
             kEvictNormal);
    x_place.next();
    // The line whose stage came free with the line of x whose stage this one took.
    if ((x_line - T::kXStages + 1) % kXLinesOfLine == kXLinesOfLine - 1 && x_line >= T::kXStages &&
        line < share.num_lines) {
      barrier_wait(shared_address(&shared.empty[place.stage]), place.parity ^ 1);
      copy_weight();
    }
  }
  if (!fetched) start_next();
}

// What the numbers of a row are scaled with, and their zero point, each twice in bfloat16.
struct RowScale {
  uint32_t scale, zero;
};

template <typename T>
__device__ __forceinline__ RowScale row_scale(const typename T::Table& table, int row, int column) {
  if constexpr (!T::Format::kScaleBytes) return {};
  const uint32_t place = table.place(row, column);
  RowScale of = {number_scale<typename T::Format>(place), 0};
  if constexpr (T::kZeros) of.zero = twice_bf16(load_shared_half(table.zero_place(place)));
  return of;
}

// The neighbours of a byte of a word in bfloat16, of a row with this scale. `bytes` is bytes_of.
template <typename T>
__device__ __forceinline__ uint32_t neighbours(uint32_t w, uint32_t bytes, const RowScale& of) {
  if constexpr (T::Format::kFloats) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(w << 4), "r"(w), "r"(bytes));
    return times_bf16x2((d << 2) & kSignedFloat, of.scale);
  } else {
    // The byte, and twelve bits above it the byte again.
    const uint32_t twice = __byte_perm(w, 0, bytes) * 0x1001u;
    uint32_t d = and_or(twice, kNibbles, kMagic);
    if constexpr (T::kZeros) {
      d = minus_bf16x2(minus_bf16x2(d, kMagic), of.zero);
    } else {
      d = minus_bf16x2(d, kMagicAndEight);
    }
    return T::Format::kScaleBytes ? times_bf16x2(d, of.scale) : d;
  }
}

// Selects byte `quad` of a word; of floats, that of both words of the permutation, each with its
// sign above.
template <typename T>
__device__ __forceinline__ uint32_t bytes_of(int quad) {
  return T::Format::kFloats ? 0xc480u + quad * 0x1111u : 0x4440u + quad;
}

// Multiplies a warpgroup's 64 rows over the block's lines.
template <typename T>
__device__ __forceinline__ void multiply_packed_lines(PackedShared<T>& shared, uint32_t memory,
                                                      const PackedShare& share,
                                                      const typename T::Table& table,
                                                      float (&sums)[T::kTokens / 2]) {
  constexpr int kColumns = T::Format::kColumns;
  const int thread = threadIdx.x, lane = thread % 32, quad = lane % 4;
  const int row = thread / 32 * 16 + lane / 4;  // and eight below
  const uint32_t bytes = bytes_of<T>(quad);
  const uint32_t weight_row = memory + row * kLineBytes;
  const uint32_t x_memory = memory + T::kStages * T::kWeightBytes;
  RingPlace<T::kStages> place;
  RingPlace<T::kXStages> x_place;
  int previous = 0;
  uint32_t a[2][4][4];
  RowScale of[2] = {};
  for (int line = 0; line < share.num_lines; ++line) {
    barrier_wait(shared_address(&shared.full[place.stage]), place.parity);
    const uint32_t weight = weight_row + place.stage * T::kWeightBytes;
    const int column = line * kPackedLineColumns;
#pragma unroll
    for (int part = 0; part < kXLinesOfLine; ++part) {
      uint32_t (&numbers)[4][4] = a[part % 2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int chunk = part * 2 + half;
        const uint32_t place_of = (chunk ^ (lane / 4)) * 16;
        const uint4 low = load_shared_16(weight + place_of);
        const uint4 high = load_shared_16(weight + 8 * kLineBytes + place_of);
        const auto read = [&](int at) {
#pragma unroll
          for (int k = 0; k < 2; ++k) of[k] = row_scale<T>(table, row + 8 * k, at);
        };
        const auto make = [&](uint32_t (&to)[4], uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
          to[0] = neighbours<T>(a, bytes, of[0]);
          to[1] = neighbours<T>(b, bytes, of[1]);
          to[2] = neighbours<T>(c, bytes, of[0]);
          to[3] = neighbours<T>(d, bytes, of[1]);
        };
        if (kColumns < 128 || chunk % 4 == 0) read(column + chunk * 32);
        make(numbers[half * 2], low.x, high.x, low.y, high.y);
        if (kColumns == 16) read(column + chunk * 32 + 16);
        make(numbers[half * 2 + 1], low.z, high.z, low.w, high.w);
      }
      if (part == kXLinesOfLine - 1) {
        barrier_arrive_warp(shared_address(&shared.empty[place.stage]), lane);
      }
      barrier_wait(shared_address(&shared.x_full[x_place.stage]), x_place.parity);
      const int tokens = static_cast<int>(x_memory) + x_place.stage * T::kXBytes;
      const uint32_t b = uniform(static_cast<int>(low_word(tokens, 0)));
      pin(sums);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        multiply(sums, numbers[k], operand<kAtomBytes>(b, k * 32),
                 line == 0 && part == 0 && k == 0);
      }
      wgmma_commit_group();
      wgmma_wait_group<1>();
#pragma unroll
      for (int k = 0; k < 4; ++k) pin(a[1 - part % 2][k]);  // now free
      if (line > 0 || part > 0) {
        barrier_arrive_warp(shared_address(&shared.x_empty[previous]), lane);
      }
      previous = x_place.stage;
      x_place.next();
    }
    place.next();
  }
  wgmma_wait_group<0>();
  pin(sums);
}

__device__ __forceinline__ float2 load_cluster_pair(uint32_t address) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}

// Adds up and stores this block's part of the tile's outputs, two neighbours at a time.
template <typename T>
__device__ __forceinline__ void store_packed(const SkinnyLinearArgs& args, const PackedShare& share,
                                             uint32_t memory) {
  constexpr Element kElement = Element::kBFloat16;
  const int log2_pairs = share.log2_outputs - 1, outputs = 1 << share.log2_outputs;
  const int stride = kPackedComputeThreads * share.splits;
  const auto add_up = [&](int token, int row) {
    float2 total = {};
    const uint32_t at = memory + (token * kPackedSumPitch + row) * 4;
    if (share.splits == 1) {  // a launch without clusters cannot read as one
      total = {load_shared_float(at), load_shared_float(at + 4)};
    }
    for (int rank = 0; rank < share.splits && share.splits > 1; ++rank) {
      const float2 v = load_cluster_pair(address_in(at, rank));
      total.x += v.x, total.y += v.y;
    }
    const int n = share.output + row % outputs + (row >> share.log2_outputs) * args.out_features;
    total.x *= T::Format::kSumFactor, total.y *= T::Format::kSumFactor;
    if (T::Format::kScaled) {
      total.x *= args.weight_scale[n], total.y *= args.weight_scale[n + 1];
    }
    if (args.bias) {
      total.x += load_element(args.bias, n, kElement);
      total.y += load_element(args.bias, n + 1, kElement);
    }
    return total;
  };
  // With many tokens several items are in flight; else the code is kept short.
  constexpr int kAtOnce = T::kTokens > 128 ? 4 : 1;
#pragma unroll kAtOnce
  for (int item = share.rank * kPackedComputeThreads + threadIdx.x;
       item < args.num_tokens << log2_pairs; item += stride) {
    const int token = item >> log2_pairs, row = (item & ((1 << log2_pairs) - 1)) * 2;
    const int n = share.output + row;
    if (n >= args.out_features) continue;
    float2 v = add_up(token, row);
    if (args.epilogue != Epilogue::kLinear) {
      v.x = activated(rounded(v.x, kElement), args.epilogue);
      v.y = activated(rounded(v.y, kElement), args.epilogue);
    }
    if (args.gated()) {
      const float2 up = add_up(token, row + outputs);
      v.x *= rounded(up.x, kElement), v.y *= rounded(up.y, kElement);
    }
    const int64_t at = static_cast<int64_t>(token) * args.out_features + n;
    reinterpret_cast<uint32_t*>(args.y)[at / 2] = pack<__nv_bfloat16>(v.x, v.y);
  }
}

template <typename T>
__device__ __forceinline__ void multiply_and_store(PackedShared<T>& shared, uint32_t rings,
                                                   uint8_t* memory, const PackedShare& share,
                                                   const typename T::Table& table,
                                                   const SkinnyLinearArgs& args) {
  table.begin(args, share.output);
  copy_async_wait<0>();
  sync_threads<kPackedComputeThreads>();
  float sums[T::kTokens / 2];
  multiply_packed_lines<T>(shared, rings, share, table, sums);
  sync_threads<kPackedComputeThreads>();  // no warp reads the stages any more
  const int lane = threadIdx.x % 32;
  auto* to = reinterpret_cast<float*>(memory) + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < T::kTokens / 8; ++i) {
    float* at = to + (8 * i + lane % 4 * 2) * kPackedSumPitch;
    at[0] = sums[4 * i];
    at[kPackedSumPitch] = sums[4 * i + 1];
    at[8] = sums[4 * i + 2];
    at[kPackedSumPitch + 8] = sums[4 * i + 3];
  }
  wait_for_previous();  // which may read what y overwrites
  if (share.splits > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    sync_threads<kPackedComputeThreads>();
  }
  store_packed<T>(args, share, rings);
  __syncwarp();
  if (share.splits > 1) {  // no block leaves while others read its sums
    cluster_arrive();
    cluster_wait();
  }
}

// Clusters of `splits` blocks, each of a tile.
template <typename T>
__global__ void __launch_bounds__(kPackedThreads, T::kBlocks)
    packed_linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                         const __grid_constant__ CUtensorMap x_map,
                         const __grid_constant__ SkinnyLinearArgs args, int splits) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ PackedShared<T> shared;
  const PackedShare share(args, splits);
  const uint32_t rings = shared_address(memory);
  const typename T::Table table(memory + T::kBytes, args.group, share.first * kPackedLineColumns,
                                share.num_lines * kPackedLineColumns);
  if (threadIdx.x == 0) {
    constexpr int kWarps = kPackedComputeThreads / 32;
    for (int stage = 0; stage < T::kStages; ++stage) {
      barrier_init(shared_address(&shared.full[stage]), 1);
      barrier_init(shared_address(&shared.empty[stage]), kWarps);
    }
    for (int stage = 0; stage < T::kXStages; ++stage) {
      barrier_init(shared_address(&shared.x_full[stage]), 1);
      barrier_init(shared_address(&shared.x_empty[stage]), kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= kPackedComputeThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == kPackedComputeThreads) {
      copy_packed<T>(weight_map, x_map, shared, rings, args, share);
    }
    __syncwarp();
    if (splits > 1) {
      cluster_arrive();
      cluster_wait();
      cluster_arrive();
      cluster_wait();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(T::kRegisters));
    multiply_and_store<T>(shared, rings, memory, share, table, args);
  }
}

}  // namespace fusewright::gemm
