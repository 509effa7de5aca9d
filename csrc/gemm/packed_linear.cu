// Launches of the GEMMs by weights of four bits: which kernel, its tile and how many blocks share
// it.
#include <algorithm>

#include "packed_linear.cuh"
#include "skinny_launch.cuh"

namespace fusewright::gemm {
namespace {

// As an H200 has them, so that results follow from shapes alone.
constexpr int kSlots = 2 * kMultiprocessors;

template <typename Format, int kXRows>
cudaError_t stream_rows(const SkinnyLinearArgs& args, bool programmatic, cudaStream_t stream) {
  using T = Tile<Format, Batch<8, kXRows>, 32, 2>;
  const int rows = args.out_features * (args.gated() ? 2 : 1);
  const int steps = (args.in_features + kStepColumns - 1) / kStepColumns;
  const int tiles = (rows + T::kRows - 1) / T::kRows;
  const int splits = tiles <= kSlots && steps > 1 ? 2 : 1;
  return launch<T>(args, OneRank{}, splits, programmatic, stream);
}

template <typename Format, bool kZeros, int kTokens, int kStages, int kXStages>
cudaError_t multiply_rows(const SkinnyLinearArgs& args, bool programmatic, cudaStream_t stream) {
  using T = PackedTile<Format, kZeros, kTokens, kStages, kXStages>;
  const int halves = args.gated() ? 2 : 1, outputs = kPackedRows / halves;
  const int tiles = (args.out_features + outputs - 1) / outputs;
  const int lines = args.in_features / kPackedLineColumns;
  const int splits = std::clamp(T::kBlocks * kMultiprocessors / tiles, 1, std::min(lines, 8));
  CUtensorMap weight_map, x_map;
  cudaError_t error =
      describe_matrix<Fp8>(&weight_map, args.weight, int64_t{halves} * args.out_features,
                           args.in_features / 2, args.weight_row_stride, outputs, 1);
  if (error != cudaSuccess) return error;
  error = describe_matrix<Bf16>(&x_map, args.x, args.num_tokens, args.in_features,
                                args.x_row_stride, kTokens, 1);
  if (error != cudaSuccess) return error;
  constexpr auto kKernel = packed_linear_kernel<T>;
  error = allow_shared_memory<kKernel>(kMostPackedBytes);
  if (error != cudaSuccess) return error;
  const int most_lines = (lines + splits - 1) / splits;
  const int bytes = T::kBytes + T::Table::bytes(args.group, most_lines * kPackedLineColumns);
  const LaunchConfig config(tiles * splits, kPackedThreads, bytes, splits, programmatic, stream);
  return cudaLaunchKernelEx(&config.config, kKernel, weight_map, x_map, args, splits);
}

template <typename Format, bool kZeros>
cudaError_t launch_rows(const SkinnyLinearArgs& args, bool programmatic, cudaStream_t stream) {
  const int tokens = args.num_tokens;
  if (tokens <= 16) return multiply_rows<Format, kZeros, 16, 4, 8>(args, programmatic, stream);
  if (tokens <= 32) return multiply_rows<Format, kZeros, 32, 4, 6>(args, programmatic, stream);
  if (tokens <= 64) return multiply_rows<Format, kZeros, 64, 4, 4>(args, programmatic, stream);
  if (tokens <= 128) return multiply_rows<Format, kZeros, 128, 4, 6>(args, programmatic, stream);
  return multiply_rows<Format, kZeros, 256, 3, 4>(args, programmatic, stream);
}

template <typename Format>
cudaError_t launch_format(const SkinnyLinearArgs& args, bool programmatic, cudaStream_t stream) {
  if (args.num_tokens <= 2) return stream_rows<Format, 2>(args, programmatic, stream);
  if (args.num_tokens <= kMaxWideTokens) return stream_rows<Format, 8>(args, programmatic, stream);
  const bool plain = args.epilogue != Epilogue::kAdd && !args.squares && !args.out_scale;
  if (args.num_tokens > kMaxPackedTokens || !plain) return cudaErrorInvalidValue;
  if constexpr (Format::kZeros) {
    if (args.group.zero) return launch_rows<Format, true>(args, programmatic, stream);
  }
  return launch_rows<Format, false>(args, programmatic, stream);
}

}  // namespace

cudaError_t launch_packed_linear(const SkinnyLinearArgs& args, Operands operands, bool programmatic,
                                 cudaStream_t stream) {
  const auto with = [&](auto format) {
    return launch_format<decltype(format)>(args, programmatic, stream);
  };
  switch (operands) {
    case Operands::kInt4:
      return with(Int4{});
    case Operands::kInt4Channel:
      return with(Int4Channel{});
    case Operands::kInt4SmallGroups:
      return with(Int4SmallGroups{});
    case Operands::kMxFp4:
      return with(MxFp4{});
    case Operands::kNvFp4:
      return with(NvFp4{});
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace fusewright::gemm
