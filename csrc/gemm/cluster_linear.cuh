// A linear layer for some tokens: y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], of bfloat16 or
// FP8 with float sums, rounded once.
//
// Limit: the bytes of the weight, of which a multiprocessor has 100 to 200 KB to read. So a call
// takes a few microseconds behind the kernel before. What it takes to keep these few:
// - A block a multiprocessor. It fetches weights into a ring of stages before it waits for x.
// - Rows of the weight are the tall operand of warpgroup MMAs, the tokens the other one. x is then
//   read once for all rows of a block, from L2.
// - The blocks of a cluster share a tile along K. Each sends its sums to those who own their rows,
//   from registers into the other's shared memory. All of them add up, in order of rank, round and
//   store: one launch, no atomics.
//
// An element's sum has one order whatever the number of tokens is. Free of any framework; sm_90a.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "../common/cluster.cuh"
#include "../common/numbers.cuh"
#include "../common/wgmma.cuh"
#include "async_copy.cuh"
#include "skinny.h"
#include "wide_mma.cuh"

namespace fusewright::gemm {

constexpr int kComputeGroups = 2;
constexpr int kComputeThreads = kComputeGroups * kWarpgroupThreads;
constexpr int kClusterThreads = kComputeThreads + 32;  // and a warp that copies

// A tile has up to this many rows of the weight, 64 for each warpgroup, whose MMAs also multiply
// what lies behind the last. A unit is eight rows for all tokens, the share of sums that a block
// owns is some units.
constexpr int kUnitRows = 8;
constexpr int kMostTileRows = 112;
constexpr int kMostUnits = kMostTileRows / kUnitRows;
constexpr int kMostClusterSplits = 8;
constexpr int kStoreBarrier = 1;  // named barrier
// More lines of the weight ahead would be in the way of those of x.
constexpr int kMostStages = 10;

// Shared memory holds a ring of stages, a line of the weight and one of x each, and an inbox for
// sums.
template <Operands kOperandsOf, int kTokensOf>
struct ClusterTile {
  static constexpr Operands kOperands = kOperandsOf;
  static constexpr bool kFp8 = kOperands != Operands::kBf16;
  static constexpr int kTokens = kTokensOf;
  static constexpr int kLine = kFp8 ? kLineBytes : kLineBytes / 2;  // elements of a line
  static constexpr int kXBytes = kTokens * kLineBytes;              // of a stage
  // Two units, which a quarter of a warp reads at once, lie 64 bytes apart modulo the banks.
  static constexpr int kUnitBytes = kTokens * kUnitRows * 4 + 64;
  static constexpr int kMostBytes = (kFp8 ? 225 : 226) * 1024;  // of dynamic shared memory
};

template <typename T>
struct ClusterShared {
  uint64_t full[kMostStages], empty[kMostStages];
  Inbox inbox;
  // FP8: of all tokens, and of the rows that the block owns.
  float x_scales[T::kFp8 ? T::kTokens : 1], weight_scales[T::kFp8 ? kMostTileRows : 1];
};

// Says what a block computes: a tile's rows of the weight from `row` on, over some lines of K; and
// which units of these rows it owns.
struct ClusterShare {
  int rank, splits, rows, units, stages;
  int row, first_line, num_lines, first_unit, num_units;

  __device__ ClusterShare(const ClusterPlan& plan, int lines)
      : rank(block_rank()),
        splits(plan.splits),
        rows(plan.rows),
        units(plan.rows / kUnitRows),
        stages(plan.stages) {
    row = blockIdx.x / splits * rows;
    first_line = rank * lines / splits;
    num_lines = (rank + 1) * lines / splits - first_line;
    first_unit = first_of(rank);
    num_units = first_of(rank + 1) - first_unit;
  }

  __device__ __forceinline__ int first_of(int owner) const { return owner * units / splits; }
  __device__ __forceinline__ int owner_of(int unit) const {
    return ((unit + 1) * splits - 1) / units;
  }
};

// Says where the stages and the inbox are.
template <typename T>
struct ClusterMemory {
  uint32_t weights, x, inbox;
  int stage_bytes;

  __device__ ClusterMemory(const uint8_t* memory, const ClusterShare& share) {
    const int weight_bytes = share.rows * kLineBytes;
    stage_bytes = weight_bytes + T::kXBytes;
    weights = (shared_address(memory) + kAtomBytes - 1) / kAtomBytes * kAtomBytes;
    x = weights + weight_bytes;
    inbox = weights + share.stages * stage_bytes;
  }
};

// One thread issues every copy of the block.
template <typename T>
struct ClusterCopier {
  const CUtensorMap &weight_map, &x_map;
  ClusterShared<T>& shared;
  const ClusterShare& share;
  const ClusterMemory<T>& memory;

  __device__ __forceinline__ void copy_weight(int line, int stage) const {
    const uint32_t full = shared_address(&shared.full[stage]);
    barrier_expect_bytes(full, memory.stage_bytes);
    copy_box(memory.weights + stage * memory.stage_bytes, weight_map, 0, share.first_line + line,
             share.row, full, kEvictFirst);
  }

  __device__ __forceinline__ void copy_x(int line, int stage) const {
    copy_box(memory.x + stage * memory.stage_bytes, x_map, 0, share.first_line + line, 0,
             shared_address(&shared.full[stage]), kEvictNormal);
  }

  __device__ __forceinline__ int ahead() const { return min(share.num_lines, share.stages); }

  // Runs before others know of the barriers.
  __device__ __forceinline__ void begin() const {
    for (int stage = 0; stage < share.stages; ++stage) {
      barrier_init(shared_address(&shared.full[stage]), 1);
      barrier_init(shared_address(&shared.empty[stage]), kComputeThreads / 32);
    }
    barrier_init_fence();
    for (int line = 0; line < ahead(); ++line) copy_weight(line, line);
  }

  __device__ __forceinline__ void run() const {
    const bool fetched = ahead() == share.num_lines;
    if (fetched) start_next();
    wait_for_previous();
    for (int line = 0; line < ahead(); ++line) copy_x(line, line);
    int stage = 0;
    uint32_t parity = 0;
    for (int line = ahead(); line < share.num_lines; ++line) {
      barrier_wait(shared_address(&shared.empty[stage]), parity);
      copy_weight(line, stage);
      copy_x(line, stage);
      if (++stage == share.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    if (!fetched) start_next();
  }
};

// Multiplies a warpgroup's 64 rows over the block's lines.
template <typename T>
__device__ __forceinline__ void multiply_lines(ClusterShared<T>& shared, const ClusterShare& share,
                                               const ClusterMemory<T>& memory, int group,
                                               float (&sums)[T::kTokens / 2]) {
  int stage = 0, previous = 0;
  uint32_t parity = 0;
  for (int line = 0; line < share.num_lines; ++line) {
    barrier_wait(shared_address(&shared.full[stage]), parity);
    const int rows = memory.weights + stage * memory.stage_bytes + group * 64 * kLineBytes;
    const int tokens = memory.x + stage * memory.stage_bytes;
    const uint32_t a = uniform(static_cast<int>(low_word(rows, 0)));
    const uint32_t b = uniform(static_cast<int>(low_word(tokens, 0)));
    pin(sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kLineBytes; k += 32) {
      multiply(sums, operand<kAtomBytes>(a, k), operand<kAtomBytes>(b, k), line == 0 && k == 0);
    }
    wgmma_commit_group();
    wgmma_wait_group<1>();
    if (line > 0) barrier_arrive_warp(shared_address(&shared.empty[previous]));
    previous = stage;
    if (++stage == share.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  wgmma_wait_group<0>();
  pin(sums);
}

// The same of FP8. Tensor cores keep 14 bits of a sum of its products, so the sums of each line are
// added up here in float32, while the next line is multiplied.
template <typename T>
struct ClusterFp8 {
  static constexpr int kCount = T::kTokens / 2;
  ClusterShared<T>& shared;
  const ClusterShare& share;
  const ClusterMemory<T>& memory;
  int group;
  int stage = 0, previous = 0;
  uint32_t parity = 0;

  // Starts to multiply the next line.
  __device__ __forceinline__ void start(float (&part)[kCount]) {
    barrier_wait(shared_address(&shared.full[stage]), parity);
    const int rows = memory.weights + stage * memory.stage_bytes + group * 64 * kLineBytes;
    const int tokens = memory.x + stage * memory.stage_bytes;
    const uint32_t a = uniform(static_cast<int>(low_word(rows, 0)));
    const uint32_t b = uniform(static_cast<int>(low_word(tokens, 0)));
    pin(part);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kLineBytes; k += 32) {
      multiply_fp8(part, operand<kAtomBytes>(a, k), operand<kAtomBytes>(b, k), k == 0);
    }
    wgmma_commit_group();
    if (++stage == share.stages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // Adds up the first line that has not been: all but kPending have been multiplied.
  template <int kPending>
  __device__ __forceinline__ void add(float (&part)[kCount], float (&sums)[kCount]) {
    wgmma_wait_group<kPending>();
    pin(part);
    barrier_arrive_warp(shared_address(&shared.empty[previous]));
    if (++previous == share.stages) previous = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += part[i];
  }

  // Goes through the lines of a tile that has no rows for this warpgroup.
  __device__ __forceinline__ void pass() {
    for (int line = 0; line < share.num_lines; ++line) {
      barrier_wait(shared_address(&shared.full[stage]), parity);
      barrier_arrive_warp(shared_address(&shared.empty[stage]));
      if (++stage == share.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }

  __device__ __forceinline__ void multiply_lines(float (&sums)[kCount]) {
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    if (group * 64 >= share.rows) return pass();
    float even[kCount], odd[kCount];
    start(even);
    int line = 1;
    for (; line + 1 < share.num_lines; line += 2) {
      start(odd);
      add<1>(even, sums);
      start(even);
      add<1>(odd, sums);
    }
    if (line < share.num_lines) {
      start(odd);
      add<1>(even, sums);
      add<0>(odd, sums);
    } else {
      add<0>(even, sums);
    }
  }
};

// Copies the scales of all tokens, and of the rows of the weight that the block owns.
template <typename T>
__device__ __forceinline__ void copy_scales(const SkinnyLinearArgs& args, ClusterShared<T>& shared,
                                            const ClusterShare& share) {
  const int at = threadIdx.x, row = share.row + share.first_unit * kUnitRows + at;
  if (at < share.num_units * kUnitRows && row < args.out_features) {
    shared.weight_scales[at] = args.weight_scale[row * args.weight_scale_stride];
  }
  wait_for_previous();
  if (at < args.num_tokens) shared.x_scales[at] = args.x_scale[at * args.x_scale_stride];
}

// Sends a warp's sums, two units of [tokens, 8 rows], to their owners. It works out where to before
// there are sums.
template <typename T>
struct ClusterSender {
  int units;  // how many of the two are there
  uint32_t to[2], counted[2];

  __device__ ClusterSender(ClusterShared<T>& shared, uint32_t inbox, const ClusterShare& share,
                           int warp)
      : units(min(share.units - 2 * warp, 2)) {
    // Two neighbouring rows, of the thread's even or odd tokens.
    const int lane = threadIdx.x % 32;
    const int place = (lane % 4 * 2 + is_odd()) * kUnitRows * 4 + lane / 8 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half >= units) return;
      const int unit = 2 * warp + half;
      const int owner = share.owner_of(unit), first = share.first_of(owner);
      const int slot = share.rank * (share.first_of(owner + 1) - first) + unit - first;
      to[half] = address_in(inbox + slot * T::kUnitBytes + place, owner);
      counted[half] = address_in(shared_address(&shared.inbox.barrier), owner);
    }
  }

  // Whether this thread's row is an odd one.
  __device__ __forceinline__ static bool is_odd() { return threadIdx.x & 4; }

  __device__ __forceinline__ void send(const float (&sums)[T::kTokens / 2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half >= units) return;
#pragma unroll
      for (int i = 0; i < T::kTokens / 8; ++i) {
        const float low = sums[4 * i + 2 * half], high = sums[4 * i + 2 * half + 1];
        const float theirs = __shfl_xor_sync(0xffffffffu, is_odd() ? low : high, 4);
        const float2 pair = is_odd() ? float2{theirs, high} : float2{low, theirs};
        send_pair(to[half] + i * 8 * kUnitRows * 4, pair, counted[half]);
      }
    }
  }
};

__device__ __forceinline__ float4 load_shared_floats(uint32_t address) {
  const uint4 v = load_shared_16(address);
  return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

// Adds up the sums of this block's units, in order of rank, and stores them. Four threads have four
// rows each of two units, for a token.
template <typename T>
__device__ __forceinline__ void store_sums(const SkinnyLinearArgs& args,
                                           const ClusterShared<T>& shared,
                                           const ClusterShare& share, uint32_t inbox) {
  const int quad = threadIdx.x % 4;
  for (int token = threadIdx.x / 4; token < args.num_tokens; token += kComputeThreads / 4) {
    for (int unit = quad / 2; unit < share.num_units; unit += 2) {
      const int column = share.row + (share.first_unit + unit) * kUnitRows + quad % 2 * 4;
      if (column >= args.out_features) break;
      const uint32_t at = inbox + unit * T::kUnitBytes + token * kUnitRows * 4 + quad % 2 * 16;
      float4 total = {};
#pragma unroll 4
      for (int from = 0; from < share.splits; ++from) {
        const float4 v = load_shared_floats(at + from * share.num_units * T::kUnitBytes);
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
      if constexpr (T::kFp8) {
        const float* w = shared.weight_scales + unit * kUnitRows + quad % 2 * 4;
        const float of_x = shared.x_scales[token];
        total.x *= of_x * w[0], total.y *= of_x * w[1];
        total.z *= of_x * w[2], total.w *= of_x * w[3];
      }
      if (args.bias) {
        const uint2 v =
            *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(args.bias) + column);
        const float2 low = unpack_bfloat16(v.x), high = unpack_bfloat16(v.y);
        total.x += low.x, total.y += low.y, total.z += high.x, total.w += high.y;
      }
      const int64_t to = static_cast<int64_t>(token) * args.out_features + column;
      *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(args.y) + to) = {
          pack<__nv_bfloat16>(total.x, total.y), pack<__nv_bfloat16>(total.z, total.w)};
    }
  }
}

// Clusters of plan.splits blocks, each of a tile.
template <typename T>
__global__ void __launch_bounds__(kClusterThreads, 1)
    cluster_linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                          const __grid_constant__ CUtensorMap x_map,
                          const __grid_constant__ SkinnyLinearArgs args, ClusterPlan plan) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ ClusterShared<T> shared;
  const ClusterShare share(plan, args.in_features / T::kLine);
  const ClusterMemory<T> places(memory, share);
  const ClusterCopier<T> copier{weight_map, x_map, shared, share, places};
  if (threadIdx.x == kComputeThreads) copier.begin();
  if (threadIdx.x == 0) {
    shared.inbox.init();
    barrier_init_fence();
    shared.inbox.expect(share.splits * share.num_units * T::kTokens * kUnitRows * 4);
  }
  __syncwarp();
  cluster_arrive();
  __syncthreads();
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (warp == kComputeThreads / 32) {
    if (threadIdx.x % 32 == 0) copier.run();
    __syncwarp();
    cluster_wait();
    return;
  }
  const ClusterSender<T> sender(shared, places.inbox, share, warp);
  float sums[T::kTokens / 2];
  if constexpr (T::kFp8) {
    copy_scales<T>(args, shared, share);
    ClusterFp8<T>{shared, share, places, warp / 4}.multiply_lines(sums);
  } else {
    multiply_lines<T>(shared, share, places, warp / 4, sums);
  }
  cluster_wait();  // every block's inbox is ready
  sender.send(sums);
  if constexpr (T::kFp8) {
    asm volatile("bar.sync %0, %1;" ::"n"(kStoreBarrier), "n"(kComputeThreads) : "memory");
  }
  shared.inbox.wait(0);
  store_sums<T>(args, shared, share, places.inbox);
}

}  // namespace fusewright::gemm
