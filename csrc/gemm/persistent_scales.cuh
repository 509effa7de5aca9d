// The scales of FP8 operands that a thread of the persistent GEMM applies to its sums.
#pragma once

#include "persistent_tile.cuh"

namespace fusewright::gemm {

// `x`: of the thread's two rows; `weight`: of the rows of the weight that it reads for its
// warpgroup, which `share` hands to the others.
template <typename T>
struct PersistentScales {
  static constexpr int kHeld = (T::kGroupWeightRows + kWarpgroupThreads - 1) / kWarpgroupThreads;
  float x[2], weight[kHeld];

  // `column`: the first output of the warpgroup.
  __device__ __forceinline__ PersistentScales(const SkinnyLinearArgs& args, int column, int row,
                                              int lower_row) {
    x[0] = args.x_scale[row * args.x_scale_stride];
    x[1] = args.x_scale[lower_row * args.x_scale_stride];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = threadIdx.x % kWarpgroupThreads + i * kWarpgroupThreads;
      // Rows behind the weight's last are read as its first.
      const int output = column + at % T::kGroupOutputs;
      const bool is_up = at >= T::kGroupOutputs && at < T::kGroupWeightRows;
      const int n = output < args.out_features ? output + (is_up ? args.out_features : 0) : 0;
      weight[i] = args.weight_scale[n * args.weight_scale_stride];
    }
  }

  // Writes the weight's scales to shared memory, those of warpgroup `group`.
  __device__ __forceinline__ void share(float* to, int group) const {
    const auto meet = [group] {
      if (group == 0) {
        asm volatile("bar.sync %0, %1;" ::"n"(kScaleBarrier), "n"(kWarpgroupThreads) : "memory");
      } else {
        asm volatile("bar.sync %0, %1;" ::"n"(kScaleBarrier + 1), "n"(kWarpgroupThreads)
                     : "memory");
      }
    };
    meet();  // all have read those of the tile before
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = threadIdx.x % kWarpgroupThreads + i * kWarpgroupThreads;
      if (at < T::kGroupWeightRows) to[at] = weight[i];
    }
    meet();
  }
};

}  // namespace fusewright::gemm
