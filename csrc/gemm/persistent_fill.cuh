// The thread of the persistent GEMM that fills the ring.
#pragma once

#include "persistent_tile.cuh"

namespace fusewright::gemm {

// A box of a described matrix, from (x, y) on.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int x, int y,
                                         uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
      : "memory");
}

template <typename T>
struct PersistentFiller {
  const SkinnyLinearArgs& args;
  const CUtensorMap &weight_map, &x_map;
  PersistentShared<T>& shared;
  uint32_t ring;
  uint64_t weight_policy;
  PersistentCursor<T::kStages> at;

  // Copies the tile's rows of the weight. Rows behind the weight's last are zeros.
  __device__ __forceinline__ void copy_weight(const PersistentItem& item, int stage,
                                              int step) const {
    const uint32_t full = shared_address(&shared.full[stage]);
    barrier_expect_bytes(full, T::kStageBytes);
    const uint32_t to = ring + stage * T::kStageBytes + T::kXBytes;
#pragma unroll
    for (int box = 0; box < T::kBoxes; ++box) {
      const int row = item.column + box / 2 * T::kBoxRows + box % 2 * args.out_features;
      copy_box(to + box * T::kBoxRows * kLineBytes, weight_map, step * T::kLine, row, full,
               weight_policy);
    }
  }

  __device__ __forceinline__ void copy_x(const PersistentItem& item, int stage, int step) const {
    copy_box(ring + stage * T::kStageBytes, x_map, step * T::kLine, item.row,
             shared_address(&shared.full[stage]), kEvictNormal);
  }

  // The first stages of the weight are copied before the kernel ahead is waited for.
  __device__ __forceinline__ void run(const PersistentWalk<T>& walk) {
    const int tiles = walk.num_tiles();
    int ahead = min(walk.steps, T::kStages);
    const PersistentItem first = walk.find(walk.first());
    for (int step = 0; step < ahead; ++step) copy_weight(first, step, step);
    wait_for_previous();
    for (int tile = walk.first(); tile < tiles; tile += walk.stride()) {
      const PersistentItem item = walk.find(tile);
      for (int step = 0; step < walk.steps; ++step) {
        if (ahead > 0) {
          --ahead;
        } else {
          barrier_wait(shared_address(&shared.empty[at.stage]), at.parity ^ 1);
          copy_weight(item, at.stage, step);
        }
        copy_x(item, at.stage, step);
        at.advance();
      }
    }
    start_next();
  }
};

}  // namespace fusewright::gemm
