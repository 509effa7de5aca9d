// Launches of the streaming GEMMs: tensor maps, shared memory, the tile of a call, the grid.
#pragma once

#include "../common/prepare.h"
#include "../common/tensor_map.h"
#include "skinny_linear.cuh"

namespace fusewright::gemm {

constexpr int kMostSharedBytes = 227 * 1024;  // of a block

// A tensor of lines, whose dimensions are named from the innermost on, and the box that a copy
// takes of it. Outside the tensor a box is zero.
template <typename Format, int kDimensions>
cudaError_t describe_lines(CUtensorMap* map, const void* data,
                           const cuuint64_t (&sizes)[kDimensions],
                           const cuuint64_t (&strides)[kDimensions - 1],
                           const cuuint32_t (&box)[kDimensions]) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  cuuint32_t steps[kDimensions];
  for (cuuint32_t& step : steps) step = 1;
  const auto type =
      Format::kBytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const CUresult result =
      encode(map, type, kDimensions, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Segments of box_rows rows of a [rows, cols] matrix, seen as [rows, lines, line], so that a copy
// walks each row's box_lines lines before the next row.
template <typename Format>
cudaError_t describe_matrix(CUtensorMap* map, const void* data, int64_t rows, int64_t cols,
                            int64_t row_stride, int box_rows, int box_lines = kConsumerWarps) {
  constexpr cuuint32_t kLine = kLineBytes / Format::kBytes;
  return describe_lines<Format, 3>(
      map, data, {kLine, static_cast<cuuint64_t>(cols / kLine), static_cast<cuuint64_t>(rows)},
      {kLineBytes, static_cast<cuuint64_t>(row_stride) * Format::kBytes},
      {kLine, static_cast<cuuint32_t>(box_lines), static_cast<cuuint32_t>(box_rows)});
}

// The maps of a weight of four bits, of which a byte has two, and of its x, which a copy leaves as
// [lines, rows].
template <typename T>
cudaError_t describe_packed(CUtensorMap* weight_map, CUtensorMap* x_map,
                            const SkinnyLinearArgs& args, int halves) {
  const cudaError_t error =
      describe_matrix<Fp8>(weight_map, args.weight, int64_t{halves} * args.out_features,
                           args.in_features / 2, args.weight_row_stride, T::kRows / halves);
  if (error != cudaSuccess) return error;
  constexpr cuuint32_t kLine = kLineBytes / 2;
  return describe_lines<Bf16, 3>(x_map, args.x,
                                 {kLine, static_cast<cuuint64_t>(args.x_rows()),
                                  static_cast<cuuint64_t>(args.in_features / kLine)},
                                 {static_cast<cuuint64_t>(args.x_row_stride) * 2, kLineBytes},
                                 {kLine, T::kXRows, T::kXLines});
}

// A launch's grid and what may precede its start.
struct LaunchConfig {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2] = {};

  LaunchConfig(int blocks, int threads, int shared_bytes, int cluster, bool programmatic,
               cudaStream_t stream) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = programmatic;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = 1;
    attributes[1].val.clusterDim.z = 1;
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
  }
};

template <typename T, typename Ranks>
cudaError_t launch(const SkinnyLinearArgs& args, const Ranks& ranks, int splits, bool programmatic,
                   cudaStream_t stream) {
  CUtensorMap weight_map, x_map;
  const int halves = args.gated() ? 2 : 1;
  int shared_bytes = T::kSharedBytes + RankSums<T>::bytes(splits);
  int most_bytes = T::kSharedBytes + RankSums<T>::bytes(kMaxSplits);
  cudaError_t error;
  if constexpr (T::Format::kPacked) {
    const int steps = (args.in_features + kStepColumns - 1) / kStepColumns;
    shared_bytes +=
        PackedSums<T>::Table::bytes(args.group, (steps + splits - 1) / splits * kStepColumns);
    most_bytes = kMostSharedBytes;
    error = describe_packed<T>(&weight_map, &x_map, args, halves);
  } else {
    error = describe_matrix<typename T::Format>(
        &weight_map, args.weight, int64_t{halves} * args.out_features, args.in_features,
        args.weight_row_stride, T::kRows / halves);
    if (error != cudaSuccess) return error;
    // Only real tokens are copied; what the others' columns multiply reaches no result.
    using X = std::conditional_t<T::Format::kXBytes == 2, Bf16, Fp8>;
    error = describe_matrix<X>(&x_map, args.x, args.x_rows(), args.in_features, args.x_row_stride,
                               args.x_rows(), T::kXLines);
  }
  if (error != cudaSuccess) return error;
  constexpr auto kKernel = skinny_linear_kernel<T, Ranks>;
  error = allow_shared_memory<kKernel>(most_bytes);
  if (error != cudaSuccess) return error;
  const int outputs = T::kRows / halves;
  const int blocks = (args.out_features + outputs - 1) / outputs * splits;
  const LaunchConfig config(blocks, kThreads, shared_bytes, splits, programmatic, stream);
  return cudaLaunchKernelEx(&config.config, kKernel, weight_map, x_map, args, splits, ranks);
}

template <typename Format, typename B, typename Ranks>
cudaError_t launch_batch(const SkinnyLinearArgs& args, const Ranks& ranks, bool programmatic,
                         cudaStream_t stream) {
  using R = Rings<Format, B>;
  const int row_bytes = row_bytes_of<Format>(args.in_features);
  const TilePlan plan = plan_tile<R>(args.out_features * (args.gated() ? 2 : 1),
                                     (row_bytes + kRowBytes - 1) / kRowBytes);
  const auto with = [&](auto tile) {
    return launch<decltype(tile)>(args, ranks, plan.splits, programmatic, stream);
  };
  switch (plan.ring) {
    case Ring::kDeep:
      return with(typename R::Deep{});
    case Ring::kMedium:
      return with(typename R::Medium{});
    case Ring::kShallow:
      return with(typename R::Shallow{});
    case Ring::kTall:
      return with(typename R::Tall{});
    default:
      return with(typename R::Many{});
  }
}

// Chooses the kernel by the number of rows of x. A format or an epilogue takes at most kMost.
template <typename Format, int kMost, typename Ranks>
cudaError_t launch_tokens(const SkinnyLinearArgs& args, const Ranks& ranks, bool programmatic,
                          cudaStream_t stream) {
  const auto with = [&](auto batch) {
    return launch_batch<Format, decltype(batch)>(args, ranks, programmatic, stream);
  };
  const int rows = args.x_rows();
  if (rows <= 2) return with(Batch<8, 2>{});
  if constexpr (kMost > 2) {
    if (rows <= 8) return with(Batch<8, 8>{});
  }
  if constexpr (kMost > 8) {
    if (rows <= 16) return with(Batch<16, 16>{});
  }
  if constexpr (kMost > 16) return with(Batch<32, 32>{});
  return cudaErrorInvalidValue;
}

}  // namespace fusewright::gemm
