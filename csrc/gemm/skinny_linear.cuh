// A linear layer for few tokens: y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], of bfloat16, of
// FP8 with scales, or of a weight of FP8 and an x of bfloat16, with float accumulation, rounded
// once; or what is made of such sums on the spot: a gated activation, that in FP8; or, of two
// linears in a row, the residual add and the RMSNorm between them (see Epilogue).
//
// Limit: memory. A call streams the weight; x and y are small beside it. What it takes to stay near
// that limit:
// - Bytes in flight, in an order that memory likes. One thread of a block issues tensor copies
//   (TMA) into a ring of shared-memory stages. A copy takes 512 bytes of each of its rows, and L2
//   is asked for no more than it takes: promotion to 256 bytes cost 5 % (docs/lab/linear.md).
// - Tensor cores, with 16 rows of the weight as the tall operand and 8 tokens as the narrow one
//   (mma m16n8k16): M = 1 costs them what M = 8 does, and that is little. FP8 MMAs (m16n8k32)
//   are, on sm_90, conversions to half, which is exact, and MMAs of halves.
// - Small blocks, two to six a multiprocessor: what one is late another takes on. Where N gives too
//   few, the `splits` blocks of a cluster share a tile along K, and send their sums to the first of
//   them, which adds them up in order of rank: one launch, no atomics.
// - No gap between layers. Launched programmatically, the next call's blocks start while this one
//   drains, and fill their stages with weights before they wait for its result.
//
// Each element's sum has one order, whatever num_tokens is within a batch class (2, 8, 16, 32
// tokens): repeats are equal to the bit, and so is a token's result in another batch of the class.
//
// Free of any framework: pointers, strides and a stream. The instructions need sm_90.
#pragma once

#include "../common/mma.cuh"
#include "async_copy.cuh"
#include "skinny_packed.cuh"
#include "skinny_write.cuh"

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

// One thread: every copy of the block. Weights for the whole ring are under way before it waits for
// the kernel that makes x.
template <typename T>
__device__ __forceinline__ void produce(const CUtensorMap& weight_map, const CUtensorMap& x_map,
                                        const Shared<T>& shared, const Share& share,
                                        const SkinnyLinearArgs& args) {
  constexpr bool kBlockScales = T::Format::kBlockScales;
  constexpr bool kXBlockScales = kBlockScales && T::Format::kXScaled;
  const int num_groups = args.in_features / kScaleBlock;
  const int x_rows = T::Format::kPacked ? T::kXRows : args.x_rows();
  const int bytes = T::kRows * kRowBytes + x_rows * T::kXRowBytes + (kBlockScales ? 16 : 0) +
                    (kXBlockScales ? 16 * args.num_tokens : 0);
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
    const int x_line = (share.first + step) * T::kXLines;
    if constexpr (T::Format::kPacked) {
      copy_box(shared.x(stage), x_map, 0, 0, x_line, full, kEvictNormal);
    } else {
      copy_box(shared.x(stage), x_map, 0, x_line, 0, full, kEvictNormal);
    }
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
template <typename T, typename Multiply>
__device__ __forceinline__ void consume(const Shared<T>& shared, int num_steps,
                                        const Multiply& multiply) {
  // A shuffle is not done twice. Of threadIdx itself, ptxas reads the special register again in
  // every step, in front of the loads.
  const int thread = __shfl_sync(~0u, threadIdx.x, threadIdx.x % kWarpSize);
  int stage = 0;
  uint32_t parity = 0;
  for (int step = 0; step < num_steps; ++step) {
    barrier_wait(shared.full(stage), parity);
    multiply(step, stage, thread);
    barrier_arrive_warp(shared.empty(stage), thread % kWarpSize);
    if (++stage == T::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// A weight of four bits has sums and a table of scales of its own, others have nothing.
struct Unpacked {
  struct Table {
    template <typename... Of>
    __device__ explicit Table(const Of&...) {}
  };
};
template <typename T>
struct PackedOf {
  using Type = Unpacked;
};
template <typename T>
  requires T::Format::kPacked
struct PackedOf<T> {
  using Type = PackedSums<T>;
};

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

template <typename T, typename Ranks>
__global__ void __launch_bounds__(kThreads)
    skinny_linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                         const __grid_constant__ CUtensorMap x_map,
                         const __grid_constant__ SkinnyLinearArgs args, int splits,
                         const __grid_constant__ Ranks ranks) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<T> shared{shared_address(memory)};
  auto& rank_sums = *reinterpret_cast<RankSums<T>*>(memory + T::kSharedBytes);
  Share share;
  share.rank = blockIdx.x % splits;
  share.first_output = blockIdx.x / splits * (args.gated() ? T::kRows / 2 : T::kRows);
  const int row_bytes = row_bytes_of<typename T::Format>(args.in_features);
  const int steps = (row_bytes + kRowBytes - 1) / kRowBytes;
  share.first = steps * share.rank / splits;
  share.num_steps = steps * (share.rank + 1) / splits - share.first;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), kConsumerWarps);
    }
    if (splits > 1) rank_sums.inbox.init();
    barrier_init_fence();
    if (splits > 1) rank_sums.inbox.expect((splits - 1) * args.x_rows() * T::kRows * 4);
  }
  __syncthreads();
  if (splits > 1) cluster_arrive();

  constexpr int kConsumers = kConsumerWarps * kWarpSize;
  Sums<T> sums = {};
  if (threadIdx.x == kConsumers) produce<T>(weight_map, x_map, shared, share, args);
  Scales scales;
  const Part part = part_of<T>(args, share);
  if constexpr (T::Format::kScaled) {
    scales = read_scales<T>(args, share.first_output + part.row(threadIdx.x));
  }
  using Packed = typename PackedOf<T>::Type;
  const typename Packed::Table table(memory + T::kSharedBytes + RankSums<T>::bytes(splits),
                                     args.group, share.first * kStepColumns,
                                     share.num_steps * kStepColumns);
  if constexpr (T::Format::kPacked) {
    if (threadIdx.x < kConsumers) table.begin(args, share.first_output);
  }
  wait_for_previous();  // every thread: the kernel before may read what y overwrites
  unsigned epoch = 0;
  if constexpr (kReduces<Ranks>) epoch = collective::epoch_of(ranks);
  const Ahead ahead = read_ahead<T>(args, share, part, threadIdx.x);
  const float out_scale = T::Format::kScaled && args.out_scale ? *args.out_scale : 1.0f;
  Norm norm;
  if (threadIdx.x < kConsumers) {
    if (args.squares) norm = norm_of(threadIdx.x, args);
    Packed packed;
    if constexpr (T::Format::kPacked) {
      copy_async_wait<0>();
      sync_threads<kConsumers>();
    }
    consume<T>(shared, share.num_steps, [&](int step, int stage, int thread) {
      if constexpr (T::Format::kPacked) {
        const int column = step * kStepColumns + thread / kWarpSize * 2 * kLineBytes;
        packed.multiply(shared.weight(stage), shared.x(stage), table, column, thread);
      } else if constexpr (T::Format::kBlockScales) {
        Sums<T> part = {};
        multiply_line<T>(shared, stage, thread, part);
        add_scaled<T>(shared, stage, thread, args.num_tokens, part, sums);
      } else {
        multiply_line<T>(shared, stage, thread, sums);
      }
    });
    if constexpr (T::Format::kPacked) packed.finish(sums);
  }
  __syncthreads();  // no warp reads the stages any more
  auto* norms = reinterpret_cast<Norm*>(memory + T::kSumBytes);
  if (threadIdx.x < kConsumers) {
    store_sums<T>(reinterpret_cast<float*>(memory), sums);
    if (threadIdx.x % 8 == 0) norms[threadIdx.x / 8] = norm;
  }
  __syncthreads();
  const TileSums<T> tile_sums{reinterpret_cast<const float*>(memory), &rank_sums, splits};
  if (splits > 1) {
    cluster_wait();  // every block of the cluster has an inbox
    if (share.rank) {
      send_sums<T>(tile_sums, rank_sums, share.rank, args.x_rows());
    } else {
      rank_sums.inbox.wait(0);
    }
  }
  if constexpr (kReduces<Ranks>) {
    const collective::WordExchange exchange(ranks, epoch);
    if (threadIdx.x == kConsumers) exchange.count();
    write_reduced<T>(args, exchange, tile_sums, share, part, ahead);
  } else if (args.epilogue == Epilogue::kAdd) {
    write_sum<T>(args, tile_sums, norms, share, part, scales, ahead);
  } else {
    write_part<T>(args, tile_sums, norms, share, part, scales, ahead, out_scale);
  }
}

}  // namespace fusewright::gemm
