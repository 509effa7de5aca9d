// A gated linear layer for many tokens: y[m, n] = act(gate) * up of the sums gate = sum_k x[m, k] *
// weight[n, k] + bias[n] and up, out_features rows of the weight behind it. Of bfloat16 or FP8 with
// float sums, rounded to bfloat16 before the activation and behind it.
//
// Limit: the bytes of the weight, above about 200 rows matrix multiplication. What it takes to stay
// near that:
// - A block a multiprocessor takes tile after tile. One thread fills a ring of shared-memory
//   stages, as far ahead as it goes; two warpgroups compute. The first stages of the weight are
//   copied before the kernel ahead has finished.
// - The rows of the weight of a tile are chosen so that tiles fill whole rounds of blocks.
// - Gate and up of an output are columns of one MMA, so they meet in one thread's registers.
// - One of the warpgroups is ahead by a few steps: while one rounds and stores, the other computes.
//   Those of FP8, which add up each step, alternate by themselves.
//
// An element's sum has one order whatever the other rows are. Free of any framework; sm_90a.
#pragma once

#include "persistent_compute.cuh"
#include "persistent_fill.cuh"

namespace fusewright::gemm {

template <typename T>
__global__ void __launch_bounds__(T::kMostThreads, 1)
    persistent_linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                             const __grid_constant__ CUtensorMap x_map,
                             const __grid_constant__ SkinnyLinearArgs args,
                             uint64_t weight_policy) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ PersistentShared<T> shared;
  const uint32_t ring = (shared_address(memory) + kAtomBytes - 1) / kAtomBytes * kAtomBytes;
  const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
  if (threadIdx.x == 0) {
    for (int i = 0; i < T::kStages; ++i) {
      barrier_init(shared_address(&shared.full[i]), 1);
      barrier_init(shared_address(&shared.empty[i]), kComputingWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const PersistentWalk<T> walk(args);
  // Registers move from the warpgroup that fills to those who compute.
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(T::kFillRegisters));
    if (threadIdx.x == 0) {
      PersistentFiller<T> filler{args, weight_map, x_map, shared, ring, weight_policy};
      filler.run(walk);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(T::kComputeRegisters));
    const int warp = threadIdx.x / 32 - kWarpgroupThreads / 32;
    const uint32_t scratch = ring + T::kStages * T::kStageBytes + warp * T::kScratchBytes;
    wait_for_previous();
    PersistentComputer<T> computer{args, shared, ring, scratch, group - 1};
    computer.run(walk);
  }
}

}  // namespace fusewright::gemm
