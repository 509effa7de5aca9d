// A linear layer with a weight for each expert, for many tokens: y[slot] = x[row of slot] @
// weight[expert of slot]^T, in bfloat16 with float sums, rounded once; or the gated activation of
// such sums. Slots are sorted by expert, and how many an expert has is data of the device.
//
// Limit: matrix multiplication, or the bytes of the weights where experts have few slots. What it
// takes to stay near that:
// - A block a multiprocessor takes tile after tile. A warpgroup fills a ring of shared-memory
//   stages of 64 of in_features, as far ahead as it goes; two compute.
// - Weights come by the copy engine, the expert being a coordinate: rows beyond an expert's are
//   zeros, not the next expert's. Rows of x that have to be gathered come by copies of 16 bytes, to
//   where a swizzled copy would have left them; rows in the order of slots by the copy engine.
// - Gate and up of an output are columns of one MMA, so they meet in one thread's registers.
// - One of the warpgroups is ahead by a few steps: while one rounds and stores, the other computes.
//   A warpgroup without rows of its expert leaves its share out.
//
// An element's sum has one order whatever the other rows are. Free of any framework.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "../common/wgmma.cuh"
#include "../gemm/async_copy.cuh"
#include "grouped_schedule.cuh"

namespace fusewright::moe {

constexpr int kGroupedThreads = 3 * kWarpgroupThreads;
constexpr int kComputingWarps = 8;
constexpr int kLineBytes = 128;     // of in_features a step
constexpr int kWarpgroupRows = 64;  // of an MMA
constexpr int kLeadBarrier = 1;     // named barrier
constexpr int kLead = 2;            // steps by which the first computing warpgroup is ahead
constexpr int kGroupTiles = 16;     // row tiles of an expert walked before the next column tile

// The tile of a block: rows of slots, which the two warpgroups share, by rows of the weight.
// kGathered: x has rows to gather, else places. kGated: outputs are of gate and up.
template <bool kIsGathered, bool kIsGated>
struct GroupedTile {
  static constexpr int kRows = 2 * kWarpgroupRows, kWeightRows = 256, kStages = 4;
  static constexpr bool kGathered = kIsGathered, kGated = kIsGated;
  static constexpr int kBoxRows = kGated ? kWeightRows / 2 : kWeightRows;  // of a weight's copy
  static constexpr int kOutputs = kGated ? kWeightRows / 2 : kWeightRows;
  static constexpr int kXBytes = kRows * kLineBytes, kWeightBytes = kWeightRows * kLineBytes;
  static constexpr int kStageBytes = kXBytes + kWeightBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + kAtomBytes;
  static constexpr int kCopiedBytes = kWeightBytes + (kGathered ? 0 : kXBytes);
};

template <typename T>
struct GroupedShared {
  uint64_t full[T::kStages], empty[T::kStages];
  Schedule schedule;
};

template <int kStages>
struct RingCursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ---- the warpgroup that fills the ring

template <typename T>
struct GroupedFiller {
  const GroupedArgs& args;
  const CUtensorMap &weight_map, &x_map;
  GroupedShared<T>& shared;
  uint32_t ring;
  RingCursor<T::kStages> at;
  // This thread copies 16 bytes of every sixteenth row: where those begin, in units of 16 bytes.
  uint32_t begins[T::kRows / 16];

  __device__ __forceinline__ void find_rows(const GroupedItem& item) {
#pragma unroll
    for (int i = 0; i < T::kRows / 16; ++i) {
      const int row = min(static_cast<int>(threadIdx.x) / 8 + 16 * i, item.rows - 1);
      const int slot = __ldcg(args.order + item.first + row);
      begins[i] = static_cast<uint32_t>(slot / args.slots_a_row) *
                  static_cast<uint32_t>(args.x_row_stride / 8);
    }
  }

  __device__ __forceinline__ void gather(const GroupedItem& item, uint32_t to, int step) const {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    to += row * kLineBytes + ((chunk ^ row % 8) << 4);
    const char* from = reinterpret_cast<const char*>(args.x) + step * kLineBytes + chunk * 16;
#pragma unroll
    for (int i = 0; i < T::kRows / 16; ++i) {
      if (16 * i < item.rows) {
        copy_async_16(to + 16 * i * kLineBytes, from + uint64_t{begins[i]} * 16, true);
      }
    }
  }

  // By one thread: the weight's rows, gates and ups in turn, and rows of x.
  __device__ __forceinline__ void copy(const GroupedItem& item, uint32_t to, uint32_t full,
                                       int step) const {
    barrier_expect_bytes(full, T::kCopiedBytes);
    const int k = step * kGroupedLine;
    if constexpr (!T::kGathered) {
#pragma unroll
      for (int row = 0; row < T::kRows; row += kWarpgroupRows) {
        gemm::copy_box(to + row * kLineBytes, x_map, k, item.first + row, 0, full,
                       gemm::kEvictNormal);
      }
    }
    to += T::kXBytes;
#pragma unroll
    for (int box = 0; box < T::kWeightRows / T::kBoxRows; ++box) {
      const int row =
          T::kGated ? box / 2 * T::kBoxRows + box % 2 * args.out_features : box * T::kBoxRows;
      gemm::copy_box(to + box * T::kBoxRows * kLineBytes, weight_map, k, item.column + row,
                     item.expert, full, gemm::kEvictNormal);
    }
  }

  __device__ __forceinline__ void run(Walk& walk) {
    if (!T::kGathered && threadIdx.x >= 32) return;
    const int steps = args.in_features / kGroupedLine, tiles = walk.num_tiles();
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const GroupedItem item = walk.find(tile);
      if constexpr (T::kGathered) find_rows(item);
      for (int step = 0; step < steps; ++step) {
        const uint32_t full = shared_address(&shared.full[at.stage]);
        const uint32_t to = ring + at.stage * T::kStageBytes;
        barrier_wait(shared_address(&shared.empty[at.stage]), at.parity ^ 1);
        if (threadIdx.x == 0) copy(item, to, full, step);
        if constexpr (T::kGathered) {
          gather(item, to, step);
          copy_async_arrive(full);
        }
        at.advance();
      }
    }
    copy_async_commit();
    copy_async_wait<0>();
  }
};

// ---- the warpgroups that compute

template <typename T>
struct GroupedComputer {
  const GroupedArgs& args;
  GroupedShared<T>& shared;
  uint32_t ring;
  int group;  // of the two
  RingCursor<T::kStages> at;
  float sums[T::kWeightRows / 2];

  __device__ __forceinline__ void wait() const {
    barrier_wait(shared_address(&shared.full[at.stage]), at.parity);
    // Gathered rows were not written by the copy engine, and MMAs read through its eyes.
    if constexpr (T::kGathered) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&shared.empty[stage]));
  }

  __device__ __forceinline__ void start_step(bool first) {
    const int to = ring + at.stage * T::kStageBytes;
    const int rows = group * kWarpgroupRows * kLineBytes;
    const uint32_t word = uniform(static_cast<int>(low_word(to, 0)));
    pin(sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kLineBytes; k += 32) {
      const uint64_t a = operand<kAtomBytes>(word + (rows >> 4), k);
      const uint64_t b = operand<kAtomBytes>(word + (T::kXBytes >> 4), k);
      multiply(sums, a, b, first && k == 0);
    }
    wgmma_commit_group();
  }

  // Steps of a tile that has no rows for this warpgroup.
  __device__ __forceinline__ void pass(int steps) {
    for (int step = 0; step < steps; ++step) {
      wait();
      release(at.stage);
      at.advance();
    }
  }

  // `first_tile`: the other warpgroup waits for the first steps of this one.
  __device__ __forceinline__ void compute(int steps, bool first_tile) {
    const int lead_at = min(kLead, steps) - 1;
    int previous = 0;
    for (int step = 0; step < steps; ++step) {
      wait();
      start_step(step == 0);
      if (first_tile && step == lead_at) {
        asm volatile("bar.arrive %0, %1;" ::"n"(kLeadBarrier), "n"(2 * kWarpgroupThreads)
                     : "memory");
      }
      wgmma_wait_group<1>();
      if (step > 0) release(previous);
      previous = at.stage;
      at.advance();
    }
    wgmma_wait_group<0>();
    pin(sums);
    release(previous);
  }

  template <Activation kActivation>
  __device__ __forceinline__ static float activated(float gate, float up) {
    gate = __bfloat162float(__float2bfloat16_rn(gate));
    up = __bfloat162float(__float2bfloat16_rn(up));
    float exponent = gate;
    if constexpr (kActivation == Activation::kGeluTanhMul) {
      // 0.5 * (1 + tanh(u)) is the logistic function of 2u.
      exponent = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
    }
    return __fdividef(gate, 1.0f + __expf(-exponent)) * up;
  }

  // Two outputs of a row, as bfloat16.
  template <Activation kActivation>
  __device__ __forceinline__ uint32_t outputs(int index) const {
    float low = sums[index], high = sums[index + 1];
    if constexpr (T::kGated) {
      low = activated<kActivation>(low, sums[index + T::kWeightRows / 4]);
      high = activated<kActivation>(high, sums[index + 1 + T::kWeightRows / 4]);
    }
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }

  // Each thread has two neighbouring outputs of every eight of two rows; a quad exchanges them so
  // that each has eight.
  template <Activation kActivation>
  __device__ __forceinline__ void store(const int (&y_row)[2], int column) const {
    constexpr int kEights = T::kOutputs / 8;
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      __nv_bfloat16* to = args.y + static_cast<int64_t>(y_row[r]) * args.out_features + column;
#pragma unroll
      for (int base = 0; base < kEights; base += 4) {
        uint32_t x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = outputs<kActivation>(4 * (base + j) + 2 * r);
        transpose_quad(x[0], x[1], x[2], x[3], quad);
        const int at_column = 8 * (base + quad);
        if (y_row[r] >= 0 && column + at_column < args.out_features) {
          *reinterpret_cast<uint4*>(to + at_column) = uint4{x[0], x[1], x[2], x[3]};
        }
      }
    }
  }

  // The rows of y that this thread's sums belong to, or -1.
  __device__ __forceinline__ void find_rows(const GroupedItem& item, int (&y_row)[2]) const {
    const int row = group * kWarpgroupRows + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int place = item.first + row + 8 * r;
      const bool live = row + 8 * r < item.rows;
      y_row[r] = !live ? -1 : args.y_sorted ? place : __ldcg(args.order + place);
    }
  }

  __device__ __forceinline__ void run(Walk& walk) {
    const int steps = args.in_features / kGroupedLine, tiles = walk.num_tiles();
    const int first_tile = blockIdx.x;
    if (group == 1 && first_tile < tiles) {
      asm volatile("bar.sync %0, %1;" ::"n"(kLeadBarrier), "n"(2 * kWarpgroupThreads) : "memory");
    }
    for (int tile = first_tile; tile < tiles; tile += gridDim.x) {
      const GroupedItem item = walk.find(tile);
      if (group * kWarpgroupRows >= item.rows) {
        pass(steps);
        continue;
      }
      int y_row[2];
      find_rows(item, y_row);
      compute(steps, group == 0 && tile == first_tile);
      if (!T::kGated || args.activation == Activation::kSiluMul) {
        store<Activation::kSiluMul>(y_row, item.column);
      } else {
        store<Activation::kGeluTanhMul>(y_row, item.column);
      }
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kGroupedThreads, 1)
    grouped_kernel(const __grid_constant__ CUtensorMap weight_map,
                   const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ GroupedArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ GroupedShared<T> shared;
  const uint32_t ring = (shared_address(memory) + kAtomBytes - 1) / kAtomBytes * kAtomBytes;
  const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
  if (threadIdx.x == 0) {
    for (int i = 0; i < T::kStages; ++i) {
      barrier_init(shared_address(&shared.full[i]), 1 + (T::kGathered ? kWarpgroupThreads : 0));
      barrier_init(shared_address(&shared.empty[i]), kComputingWarps);
    }
    barrier_init_fence();
  }
  wait_for_previous();
  make_schedule(shared.schedule, args, T::kRows);
  start_next();
  const int column_tiles = (args.out_features + T::kOutputs - 1) / T::kOutputs;
  Walk walk{shared.schedule, args.num_experts, column_tiles, T::kRows, T::kOutputs, kGroupTiles};
  // Registers move from those who fill to those who compute.
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    GroupedFiller<T> filler{args, weight_map, x_map, shared, ring};
    filler.run(walk);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    GroupedComputer<T> computer{args, shared, ring, group - 1};
    computer.run(walk);
  }
}

}  // namespace fusewright::moe
