// Launches of the persistent GEMM: tensor maps, shared memory, tiles, the grid.
#pragma once

#include <algorithm>

#include "persistent_linear.cuh"
#include "skinny_launch.cuh"

namespace fusewright::gemm {

// Describes boxes of box_rows rows by one line of a [rows, columns] matrix. Outside of the matrix a
// box is zero.
template <typename T>
cudaError_t describe_rows(CUtensorMap* map, const void* data, int64_t rows, int64_t columns,
                          int64_t row_stride, int box_rows) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_stride) * (kLineBytes / T::kLine)};
  const cuuint32_t box[] = {T::kLine, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const auto type = T::kFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(map, type, 2, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename T>
cudaError_t run_persistent(const SkinnyLinearArgs& args, bool programmatic, cudaStream_t stream) {
  CUtensorMap weight_map, x_map;
  cudaError_t error = describe_rows<T>(&weight_map, args.weight, int64_t{2} * args.out_features,
                                       args.in_features, args.weight_row_stride, T::kBoxRows);
  if (error != cudaSuccess) return error;
  error = describe_rows<T>(&x_map, args.x, args.num_tokens, args.in_features, args.x_row_stride,
                           T::kRows);
  if (error != cudaSuccess) return error;
  constexpr auto kKernel = persistent_linear_kernel<T>;
  error = allow_shared_memory<kKernel>(T::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int row_tiles = (args.num_tokens + T::kRows - 1) / T::kRows;
  const int64_t tiles = int64_t{row_tiles} * ((args.out_features + T::kOutputs - 1) / T::kOutputs);
  const int blocks = static_cast<int>(std::min<int64_t>(tiles, kMultiprocessors));
  const LaunchConfig config(blocks, kPersistentThreads, T::kSharedBytes, 1, programmatic, stream);
  // A weight that is read once is the first to be given up.
  const uint64_t policy = row_tiles == 1 ? kEvictFirst : kEvictNormal;
  return cudaLaunchKernelEx(&config.config, kKernel, weight_map, x_map, args, policy);
}

// Chooses how many rows of the weight a tile has: those with the least time by a model of one
// block, rounds of tiles, each as long as the slowest of multiplying, reading L2 and reading
// memory. A line of FP8 takes as long as one of bfloat16.
inline int plan_width(const SkinnyLinearArgs& args, int line) {
  constexpr int kL2Bytes = 45, kMemoryBytes = 19;  // a clock and multiprocessor
  constexpr int kTileClocks = 700;
  const int rows = args.num_tokens <= kMmaRows ? kMmaRows : 2 * kMmaRows;
  const int row_tiles = (args.num_tokens + rows - 1) / rows;
  const int steps = args.in_features / line;
  int best = 0;
  int64_t least = 0;
  for (const int width : {256, 224, 192, 128}) {
    const int column_tiles = (2 * args.out_features + width - 1) / width;
    const int multiply = width * rows / 32, from_l2 = (width + rows) * kLineBytes / kL2Bytes;
    const int from_memory = width * kLineBytes / kMemoryBytes / row_tiles;
    const int64_t rounds =
        (int64_t{row_tiles} * column_tiles + kMultiprocessors - 1) / kMultiprocessors;
    const int64_t step = std::max({multiply, from_l2, from_memory});
    const int64_t clocks = rounds * (steps * step + kTileClocks);
    if (best > 0 && clocks >= least) continue;
    best = width;
    least = clocks;
  }
  return best;
}

template <Operands kOperands, int kWeightRows>
cudaError_t run_width(const SkinnyLinearArgs& args, bool programmatic, cudaStream_t stream) {
  using Few = PersistentTile<kOperands, kMmaRows, kWeightRows>;
  using Many = PersistentTile<kOperands, 2 * kMmaRows, kWeightRows>;
  return args.num_tokens <= kMmaRows ? run_persistent<Few>(args, programmatic, stream)
                                     : run_persistent<Many>(args, programmatic, stream);
}

template <Operands kOperands>
cudaError_t run_persistent_widths(const SkinnyLinearArgs& args, bool programmatic,
                                  cudaStream_t stream) {
  constexpr int kLine = PersistentTile<kOperands, kMmaRows, 128>::kLine;
  switch (plan_width(args, kLine)) {
    case 128:
      return run_width<kOperands, 128>(args, programmatic, stream);
    case 192:
      return run_width<kOperands, 192>(args, programmatic, stream);
    case 224:
      return run_width<kOperands, 224>(args, programmatic, stream);
    default:
      return run_width<kOperands, 256>(args, programmatic, stream);
  }
}

}  // namespace fusewright::gemm
