// Launches of the GEMMs by weights of four bits: which kernel, its tile and how many blocks share
// it.
#include <algorithm>

#include "packed_linear.cuh"
#include "skinny_launch.cuh"

namespace fusewright::gemm {
namespace {

// Tiles of 16 rows, with all their blocks at once, for a weight of which a multiprocessor has up to
// four; else taller ones, which read x less often (measured in docs/lab/linear.md).
template <typename Format, int kXRows>
cudaError_t stream_rows(const SkinnyLinearArgs& args, bool programmatic, cudaStream_t stream) {
  using B = Batch<8, kXRows>;
  using Low = Tile<Format, B, 16, kXRows == 2 ? 4 : 3>;
  using Tall = Tile<Format, B, kXRows == 2 ? 32 : 64, 2>;
  const int rows = args.out_features * (args.gated() ? 2 : 1);
  const int steps = (args.in_features + kStepColumns - 1) / kStepColumns;
  const int low_tiles = (rows + Low::kRows - 1) / Low::kRows;
  if (low_tiles > 4 * kMultiprocessors) {
    return launch<Tall>(args, OneRank{}, 1, programmatic, stream);
  }
  const int splits = low_tiles < kMultiprocessors && steps >= 8 ? 2 : 1;
  return launch<Low>(args, OneRank{}, splits, programmatic, stream);
}

// Blocks that share the weight best, for each that a multiprocessor holds (docs/lab/linear.md).
constexpr int kBlocksInRound = 100;

// The formats that more rows than the streaming kernel's are multiplied by.
template <typename Format>
constexpr bool kForMany = std::is_same_v<Format, Int4> || std::is_same_v<Format, MxFp4>;

template <typename Format, bool kZeros, int kTokens, int kStages, int kXStages>
cudaError_t multiply_rows(const SkinnyLinearArgs& args, bool programmatic, cudaStream_t stream) {
  using T = PackedTile<Format, kZeros, kTokens, kStages, kXStages>;
  const int halves = args.gated() ? 2 : 1, outputs = kPackedRows / halves;
  const int tiles = (args.out_features + outputs - 1) / outputs;
  const int lines = args.in_features / kPackedLineColumns;
  const auto bytes_of = [&](int splits) {
    const int most_lines = (lines + splits - 1) / splits;
    return T::kBytes + T::Table::bytes(args.group, most_lines * kPackedLineColumns);
  };
  // About one round of blocks, or the fewest whose scales have room.
  const int most_splits = std::min(lines, kMostPackedSplits);
  int splits = std::clamp(T::kBlocks * kBlocksInRound / tiles, 1, most_splits);
  while (splits < most_splits && bytes_of(splits) > kMostPackedBytes) ++splits;
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
  const LaunchConfig config(tiles * splits, kPackedThreads, bytes_of(splits), splits, programmatic,
                            stream);
  return cudaLaunchKernelEx(&config.config, kKernel, weight_map, x_map, args, splits);
}

template <typename Format, bool kZeros>
cudaError_t launch_rows(const SkinnyLinearArgs& args, bool programmatic, cudaStream_t stream) {
  const int tokens = args.num_tokens;
  if (tokens <= 16) return multiply_rows<Format, kZeros, 16, 4, 8>(args, programmatic, stream);
  if (tokens <= 64) return multiply_rows<Format, kZeros, 64, 3, 5>(args, programmatic, stream);
  if (tokens <= 128) return multiply_rows<Format, kZeros, 128, 4, 6>(args, programmatic, stream);
  return multiply_rows<Format, kZeros, 256, 3, 4>(args, programmatic, stream);
}

template <typename Format>
cudaError_t launch_format(const SkinnyLinearArgs& args, bool programmatic, cudaStream_t stream) {
  // Tiles for two tokens leave room for more blocks a multiprocessor. Where scales multiply sums,
  // that gains nothing, and a layer that starts beside the one before is spread less evenly.
  if constexpr (!Format::kScalesSums) {
    if (args.num_tokens <= 2) return stream_rows<Format, 2>(args, programmatic, stream);
  }
  if (args.num_tokens <= kMaxWideTokens) return stream_rows<Format, 8>(args, programmatic, stream);
  const bool plain = args.epilogue != Epilogue::kAdd && !args.squares && !args.out_scale;
  if constexpr (kForMany<Format>) {
    if (args.num_tokens <= kMaxPackedTokens && plain) {
      if constexpr (Format::kZeros) {
        if (args.group.zero) return launch_rows<Format, true>(args, programmatic, stream);
      }
      return launch_rows<Format, false>(args, programmatic, stream);
    }
  }
  return cudaErrorInvalidValue;
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
