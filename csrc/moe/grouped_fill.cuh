// The warpgroup of a grouped GEMM that fills the ring: weights and sorted rows by the copy engine,
// rows that have to be gathered and scales by copies of each thread.
#pragma once

#include "grouped_tile.cuh"

namespace fusewright::moe {

template <typename T>
struct GroupedFiller {
  const GroupedArgs& args;
  const CUtensorMap &weight_map, &x_map;
  GroupedShared<T>& shared;
  uint32_t ring;
  RingCursor<T::kStages> at;
  // This thread copies 16 bytes of every sixteenth row. Those rows begin here, in units of 16
  // bytes.
  uint32_t begins[T::kRows / 16];
  const float* x_scale;       // of this thread's row
  const float* weight_scale;  // of this thread's block, of the first two threads

  // Returns the row of x for a row of the tile. Rows behind the last are read as the last.
  __device__ __forceinline__ int x_row(const GroupedItem& item, int row) const {
    const int place = item.first + min(row, item.rows - 1);
    return T::kGathered ? __ldcg(args.order + place) / args.slots_a_row : place;
  }

  __device__ __forceinline__ void find(const GroupedItem& item) {
    if constexpr (T::kGathered) {
      const uint32_t sixteens = static_cast<uint32_t>(args.x_row_stride * T::kElementBytes / 16);
#pragma unroll
      for (int i = 0; i < T::kRows / 16; ++i) {
        begins[i] = x_row(item, static_cast<int>(threadIdx.x) / 8 + 16 * i) * sixteens;
      }
    }
    if constexpr (T::kFp8) x_scale = args.x_scale + x_row(item, threadIdx.x) * args.x_scale_row;
    if constexpr (T::kScales == Scales::kBlocks) {
      weight_scale = scale_of(item, threadIdx.x % 2 * T::kBoxRows);
    }
  }

  // Returns where the scale of a row of the tile's weight lies, or the scales of the row's blocks.
  // Rows behind the last are read as the last.
  __device__ __forceinline__ const float* scale_of(const GroupedItem& item, int row) const {
    int rows = args.out_features;
    int at = min(item.column + (T::kGated ? row % T::kBoxRows : row), rows - 1);
    if constexpr (T::kGated) {
      at += row / T::kBoxRows * rows;
      rows *= 2;
    }
    if constexpr (T::kScales == Scales::kRows) {
      return args.weight_scale + int64_t{item.expert} * rows + at;
    }
    return args.weight_scale + (int64_t{item.expert} * (rows / kScaleBlock) + at / kScaleBlock) *
                                   (args.in_features / kScaleBlock);
  }

  __device__ __forceinline__ void gather(const GroupedItem& item, uint32_t to, int step) const {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    to += row * kLineBytes + ((chunk ^ row % 8) << 4);
    const char* from = static_cast<const char*>(args.x) + step * kLineBytes + chunk * 16;
#pragma unroll
    for (int i = 0; i < T::kRows / 16; ++i) {
      if (16 * i < item.rows) {
        copy_async_16(to + 16 * i * kLineBytes, from + uint64_t{begins[i]} * 16, true);
      }
    }
  }

  __device__ __forceinline__ void copy_scales(const GroupedItem& item, StepScales<T>& to,
                                              int step) const {
    if constexpr (T::kScales == Scales::kBlocks) {
      copy_async_4(shared_address(&to.x[threadIdx.x]), x_scale + step * args.x_scale_group);
      if (threadIdx.x < 2) {
        copy_async_4(shared_address(&to.weight[threadIdx.x]), weight_scale + step);
      }
    } else if (step == args.in_features / T::kLine - 1) {
      copy_async_4(shared_address(&to.x[threadIdx.x]), x_scale);
#pragma unroll
      for (int row = threadIdx.x; row < T::kWeightRows; row += kWarpgroupThreads) {
        copy_async_4(shared_address(&to.weight[row]), scale_of(item, row));
      }
    }
  }

  // Copies the weight's rows, gates before ups, and rows of x that need no gathering. One thread
  // calls it.
  __device__ __forceinline__ void copy(const GroupedItem& item, uint32_t to, uint32_t full,
                                       int step) const {
    const int x_boxes = T::kGathered ? 0 : (item.rows + kWarpgroupRows - 1) / kWarpgroupRows;
    const int weight_bytes = T::kPacked ? 0 : T::kWeightBytes;
    barrier_expect_bytes(full, weight_bytes + x_boxes * kWarpgroupRows * kLineBytes);
    const int k = step * T::kLine;
    for (int box = 0; box < x_boxes; ++box) {
      const int row = box * kWarpgroupRows;
      gemm::copy_box(to + row * kLineBytes, x_map, k, item.first + row, 0, full,
                     gemm::kEvictNormal);
    }
    if constexpr (T::kPacked) return;
    to += T::kXBytes;
    const int apart = T::kGated ? args.out_features : T::kBoxRows;  // rows from box to box
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      gemm::copy_box(to + box * T::kBoxRows * kLineBytes, weight_map, k, item.column + box * apart,
                     item.expert, full, gemm::kEvictNormal);
    }
  }

  __device__ __forceinline__ void run(Walk& walk) {
    if (!T::kAllCopy && threadIdx.x >= 32) return;
    const int steps = args.in_features / T::kLine, tiles = walk.num_tiles();
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const GroupedItem item = walk.find(tile);
      find(item);
      for (int step = 0; step < steps; ++step) {
        const uint32_t full = shared_address(&shared.full[at.stage]);
        const uint32_t to = ring + at.stage * T::kStageBytes;
        barrier_wait(shared_address(&shared.empty[at.stage]), at.parity ^ 1);
        if (threadIdx.x == 0) copy(item, to, full, step);
        if constexpr (T::kAllCopy) {
          if constexpr (T::kGathered) gather(item, to, step);
          if constexpr (T::kFp8) copy_scales(item, shared.scales[at.stage], step);
          copy_async_arrive(full);
        }
        at.advance();
      }
    }
    copy_async_commit();
    copy_async_wait<0>();
  }
};

}  // namespace fusewright::moe
