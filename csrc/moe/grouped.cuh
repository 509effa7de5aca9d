// A linear layer with a weight for each expert, for many tokens: y[slot] = x[row of slot] @
// weight[expert of slot]^T, in bfloat16 or FP8 with float sums, rounded once to bfloat16; or the
// gated activation of such sums. Slots are sorted by expert, and how many an expert has is data of
// the device.
//
// Limit: matrix multiplication, or the bytes of the weights where experts have few slots. What it
// takes to stay near that:
// - A block a multiprocessor takes tile after tile. A warpgroup fills a ring of shared-memory
//   stages of 128 bytes of in_features, as far ahead as it goes; two compute.
// - Weights come by the copy engine, the expert being a coordinate: rows beyond an expert's are
//   zeros, not the next expert's. Rows of x that have to be gathered come by copies of 16 bytes, to
//   where a swizzled copy would have left them; rows in the order of slots by the copy engine.
// - Gate and up of an output are columns of one MMA, so they meet in one thread's registers.
// - One of the warpgroups is ahead by a few steps: while one rounds and stores, the other computes.
//   A warpgroup without rows of its expert leaves its share out.
// - Sums of FP8 are added up outside the tensor cores after each step, by one warpgroup while the
//   other multiplies. Scales come with the stages.
//
// An element's sum has one order whatever the other rows are. Free of any framework.
#pragma once

#include "grouped_compute.cuh"
#include "grouped_fill.cuh"
#include "grouped_packed.cuh"

namespace fusewright::moe {

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
      barrier_init(shared_address(&shared.full[i]), T::kArrivals);
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
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(T::kFillRegisters));
    if constexpr (T::kPacked) {
      PackedFiller<T>(GroupedFiller<T>{args, weight_map, x_map, shared, ring}).run(walk);
    } else {
      GroupedFiller<T>{args, weight_map, x_map, shared, ring}.run(walk);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(T::kComputeRegisters));
    const int warp = threadIdx.x / 32 - kWarpgroupThreads / 32;
    const uint32_t scratch = ring + T::kStages * T::kStageBytes + warp * T::kScratchBytes;
    GroupedComputer<T> computer{args, shared, ring, scratch, group - 1};
    computer.run(walk);
  }
}

}  // namespace fusewright::moe
