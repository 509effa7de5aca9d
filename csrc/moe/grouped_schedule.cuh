// Which tiles of a grouped GEMM there are, and which of them a block takes.
#pragma once

#include "../common/device.cuh"
#include "grouped.h"

namespace fusewright::moe {

// Where the slots and the row tiles of each expert begin. It lies in shared memory.
struct Schedule {
  int offsets[kMaxGroupedExperts + 1];
  int tiles_before[kMaxGroupedExperts + 1];
};

// All threads of a block call it; the block has more than one warp.
__device__ __forceinline__ void make_schedule(Schedule& schedule, const GroupedArgs& args,
                                              int tile_rows) {
  constexpr unsigned kAll = 0xffffffffu;
  const int experts = args.num_experts, lane = threadIdx.x % 32;
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
    schedule.offsets[e] = __ldcg(args.offsets + e);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int before = 0;
    for (int from = 0; from < experts; from += 32) {
      const int e = from + lane;
      int sum = 0;
      if (e < experts) {
        sum = (schedule.offsets[e + 1] - schedule.offsets[e] + tile_rows - 1) / tile_rows;
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kAll, sum, step);
        if (lane >= step) sum += other;
      }
      if (e < experts) schedule.tiles_before[e + 1] = before + sum;
      before += __shfl_sync(kAll, sum, 31);
    }
    if (lane == 0) schedule.tiles_before[0] = 0;
  }
  __syncthreads();
}

// A tile: `rows` places from `first` on, and the outputs from `column` on.
struct GroupedItem {
  int expert, first, rows, column;
};

// Finds a block's tiles, which ascend; called by whole warps.
struct Walk {
  const Schedule& schedule;
  int num_experts, column_tiles, tile_rows, tile_outputs, group_tiles;
  int expert = 0;

  __device__ __forceinline__ int num_tiles() const {
    return schedule.tiles_before[num_experts] * column_tiles;
  }

  // Tiles of an expert in groups of row tiles, of which all walk down a column tile before the
  // next: so the blocks that run at once read few rows of x and few of the weight.
  __device__ __forceinline__ GroupedItem find(int tile) {
    constexpr unsigned kAll = 0xffffffffu;
    for (;;) {
      const int e = expert + static_cast<int>(threadIdx.x % 32);
      const bool behind = e < num_experts && schedule.tiles_before[e + 1] * column_tiles <= tile;
      const int passed = __popc(__ballot_sync(kAll, behind));
      expert += passed;
      if (passed < 32) break;
    }
    const int before = schedule.tiles_before[expert];
    const int row_tiles = schedule.tiles_before[expert + 1] - before;
    const int within = tile - before * column_tiles;
    const int group = within / (group_tiles * column_tiles) * group_tiles;
    const int of_group = min(row_tiles - group, group_tiles);
    const int rest = within - group * column_tiles;
    const int row_tile = group + rest % of_group;
    const int begin = schedule.offsets[expert] + row_tile * tile_rows;
    return {expert, begin, min(schedule.offsets[expert + 1] - begin, tile_rows),
            rest / of_group * tile_outputs};
  }
};

}  // namespace fusewright::moe
