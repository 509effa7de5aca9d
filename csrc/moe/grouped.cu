// Launches of the grouped GEMM: tensor maps, shared memory, the grid.
#include "grouped.cuh"

#include <algorithm>

#include "../common/prepare.h"
#include "../gemm/skinny_launch.cuh"

namespace fusewright::moe {
namespace {

// Boxes of 64 columns of a [groups, rows, columns] tensor; outside a group are zeros.
cudaError_t describe_groups(CUtensorMap* map, const void* data, int64_t groups, int64_t rows,
                            int64_t columns, int64_t row_stride, int box_rows, bool wide) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(groups)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_stride) * 2,
                                static_cast<cuuint64_t>(rows * row_stride) * 2};
  const cuuint32_t box[] = {kGroupedLine, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             wide ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename T>
cudaError_t run(const GroupedArgs& args, const GroupedPlan& plan, bool programmatic,
                cudaStream_t stream) {
  CUtensorMap weight_map, x_map;
  cudaError_t error = describe_groups(
      &weight_map, args.weight, args.num_experts, int64_t{args.out_features} * (T::kGated ? 2 : 1),
      args.in_features, args.in_features, T::kBoxRows, plan.wide_reads);
  if (error != cudaSuccess) return error;
  error = describe_groups(&x_map, args.x, 1, args.x_rows, args.in_features, args.x_row_stride,
                          kWarpgroupRows, plan.wide_reads);
  if (error != cudaSuccess) return error;
  error = allow_shared_memory<grouped_kernel<T>>(T::kSharedBytes);
  if (error != cudaSuccess) return error;
  GroupedPlan checked = plan;
  checked.lead = std::clamp(plan.lead, 0, T::kStages - 1);
  checked.group_tiles = std::max(plan.group_tiles, 1);
  const int64_t row_tiles =
      std::min<int64_t>(args.num_slots, args.num_slots / T::kRows + args.num_experts);
  const int64_t tiles = row_tiles * ((args.out_features + T::kOutputs - 1) / T::kOutputs);
  const int blocks = static_cast<int>(std::min<int64_t>(tiles, gemm::kMultiprocessors));
  const gemm::LaunchConfig config(blocks, kGroupedThreads, T::kSharedBytes, 1, programmatic,
                                  stream);
  return cudaLaunchKernelEx(&config.config, grouped_kernel<T>, weight_map, x_map, args, checked);
}

template <int kRows, int kWeightRows, int kStages>
cudaError_t run_tiling(const GroupedArgs& args, const GroupedPlan& plan, bool programmatic,
                       cudaStream_t stream) {
  const auto with = [&]<bool kGathered, bool kGated>() {
    using T = GroupedTile<kRows, kWeightRows, kStages, kGathered, kGated>;
    return run<T>(args, plan, programmatic, stream);
  };
  if (args.gated) {
    return args.x_sorted ? with.template operator()<false, true>()
                         : with.template operator()<true, true>();
  }
  return args.x_sorted ? with.template operator()<false, false>()
                       : with.template operator()<true, false>();
}

}  // namespace

cudaError_t launch_grouped(const GroupedArgs& args, const GroupedPlan& plan, bool programmatic,
                           cudaStream_t stream) {
  switch (plan.tiling) {
    case GroupedTiling::k128x256:
      return run_tiling<128, 256, 4>(args, plan, programmatic, stream);
    case GroupedTiling::k128x128:
      return run_tiling<128, 128, 6>(args, plan, programmatic, stream);
    default:
      return run_tiling<64, 256, 5>(args, plan, programmatic, stream);
  }
}

}  // namespace fusewright::moe
