// How a kernel of the grouped GEMM is launched: tensor maps, shared memory, the grid.
#pragma once

#include <algorithm>

#include "../common/prepare.h"
#include "../gemm/skinny_launch.cuh"
#include "grouped.cuh"

namespace fusewright::moe {

// Describes boxes of box_rows rows by one line of columns in a [groups, rows, columns] tensor. A
// box has zeros where it lies outside its group.
template <typename T>
cudaError_t describe_groups(CUtensorMap* map, const void* data, int64_t groups, int64_t rows,
                            int64_t columns, int64_t row_stride, int box_rows) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(groups)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_stride) * T::kElementBytes,
                                static_cast<cuuint64_t>(rows * row_stride) * T::kElementBytes};
  const cuuint32_t box[] = {T::kLine, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  const auto type = T::kFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(map, type, 3, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename T>
cudaError_t run_grouped(const GroupedArgs& args, bool programmatic, cudaStream_t stream) {
  CUtensorMap weight_map = {}, x_map;
  cudaError_t error = cudaSuccess;
  if constexpr (!T::kPacked) {
    error = describe_groups<T>(&weight_map, args.weight, args.num_experts,
                               int64_t{args.out_features} * (T::kGated ? 2 : 1), args.in_features,
                               args.in_features, T::kBoxRows);
    if (error != cudaSuccess) return error;
  }
  error = describe_groups<T>(&x_map, args.x, 1, args.x_rows, args.in_features, args.x_row_stride,
                             kWarpgroupRows);
  if (error != cudaSuccess) return error;
  error = allow_shared_memory<grouped_kernel<T>>(T::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int64_t row_tiles =
      std::min<int64_t>(args.num_slots, args.num_slots / T::kRows + args.num_experts);
  const int64_t tiles = row_tiles * ((args.out_features + T::kOutputs - 1) / T::kOutputs);
  const int blocks = static_cast<int>(std::min<int64_t>(tiles, gemm::kMultiprocessors));
  const gemm::LaunchConfig config(blocks, kGroupedThreads, T::kSharedBytes, 1, programmatic,
                                  stream);
  return cudaLaunchKernelEx(&config.config, grouped_kernel<T>, weight_map, x_map, args);
}

}  // namespace fusewright::moe
