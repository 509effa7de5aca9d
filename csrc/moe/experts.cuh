// The chosen experts of a few tokens: gate_up with its activation, and down with the weighted sum.
//
// Limit: memory. Each chosen expert's weight is read once, for all its tokens, and no other's is.
// Weights stream as gemm/skinny_linear.cuh has it: tensor copies into rings of shared memory, MMAs
// of 16 rows by 8 tokens. Only rows of x that an expert needs are copied beside its weight.
//
// - gate_up: eight gates and the ups of the same outputs are a tile. Blocks, as many as run at
//   once, divide all chosen experts' tiles and fetch across their ends. Which experts those are is
//   known only when the router is done, so nothing is read before.
// - down: a block has the same eight rows of all chosen experts, and adds up each token's outputs
//   in registers, experts in ascending order, each times its weight. What the experts' weights are
//   multiplied with comes late, but the choice has long been there (ids_ready): the ring is filled
//   with weights before the wait.
//
// Each output's sum has one order, whatever other tokens there are.
#pragma once

#include "plan.cuh"
#include "tile.cuh"

namespace fusewright::moe {

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

template <typename T>
__device__ __forceinline__ void init_ring(const Ring<T>& ring, const CUtensorMap& weight_map,
                                          const CUtensorMap& x_map) {
  if (threadIdx.x == 0) {
    prefetch_map(weight_map);
    prefetch_map(x_map);
    for (int stage = 0; stage < T::kStages; ++stage) {
      barrier_init(ring.full(stage), T::kScales > 0 ? 1 + kWarpSize : 1);
      barrier_init(ring.empty(stage), T::kLines);
    }
    barrier_init_fence();
  }
}

// Four bytes, or zero without reading.
__device__ __forceinline__ void copy_float(uint32_t to, const float* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}

// One warp copies the scales of a step of a segment. The stage's full barrier waits for them.
template <typename T>
__device__ __forceinline__ void copy_scales(const Ring<T>& ring, int stage, const ExpertsArgs& args,
                                            const Segment& segment, int step) {
  if constexpr (T::kScales > 0) {
    constexpr int kMatrices = T::kRows / kTileRows;
    const int groups = args.in_features / gemm::kScaleBlock;
    for (int lane = threadIdx.x % kWarpSize; lane < T::kScales; lane += kWarpSize) {
      const int matrix = segment.expert * kMatrices + lane / T::kEightsScales;
      const int row = matrix * args.out_features + segment.row, i = lane % T::kEightsScales;
      bool valid = true;
      int64_t at = row + i;
      if constexpr (T::Operands::kBlockScales) {
        const int group = step * T::kLines + i;
        valid = group < groups;
        at = static_cast<int64_t>(row / gemm::kScaleBlock) * groups + group;
      }
      copy_float(ring.scale(stage, lane), args.weight_scale + (valid ? at : 0), valid);
    }
    copy_async_arrive(ring.full(stage));
  }
}

// One thread copies the weights of a step of a segment. Rows of x come into the same stage.
template <typename T>
__device__ __forceinline__ void copy_weight(const Ring<T>& ring, int stage, const CUtensorMap& map,
                                            const Segment& segment, int step, int num_x_rows) {
  const uint32_t full = ring.full(stage);
  barrier_expect_bytes(full, T::kRows * T::kRowBytes + num_x_rows * T::kXRowBytes);
  gemm::copy_box(ring.weight(stage), map, 0, step * T::kLines, segment.row,
                 segment.expert * (T::kRows / kTileRows), full, gemm::kEvictFirst);
}

template <typename T>
__device__ __forceinline__ void copy_x_row(const Ring<T>& ring, int stage, const CUtensorMap& map,
                                           int step, int row, int column) {
  gemm::copy_box(ring.x(stage) + column * T::kXRowBytes, map, 0, step * T::kXLines, row,
                 ring.full(stage), gemm::kEvictNormal);
}

// The parity of a stage's `empty` to wait for is that of the round before.
template <typename T>
__device__ __forceinline__ void wait_until_empty(const Ring<T>& ring, const RingPlace& place,
                                                 int fill) {
  if (fill >= T::kStages) barrier_wait(ring.empty(place.stage), place.parity ^ 1);
}

template <typename T>
__device__ __forceinline__ int steps_of(const ExpertsArgs& args) {
  return (args.in_features * T::kWeightBytes + T::kRowBytes - 1) / T::kRowBytes;
}

}  // namespace fusewright::moe
