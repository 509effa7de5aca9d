// How a skinny GEMM is cut: what a block works on, and the rule which tile serves which shape.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <bit>
#include <cstdint>
#include <type_traits>

#include "packed_numbers.cuh"
#include "skinny.h"

namespace fusewright::gemm {

constexpr int kWarpSize = 32;
constexpr int kThreads = (kConsumerWarps + 1) * kWarpSize;

// A format says the types of weight and x, their bytes an element, and what has scales. kScaled:
// the weight has one a row, or one for all, which multiplies sums; kBlockScales: it has one a
// block, which multiplies the products of a line. kXScaled: x has scales of the same kind. kPacked:
// the weight has numbers of four bits, two a byte, and scales of groups (skinny_packed.cuh).
struct Bytes {
  static constexpr bool kPacked = false;
};
struct Bf16 : Bytes {
  using Operand = __nv_bfloat16;
  static constexpr int kBytes = 2, kXBytes = 2;
  static constexpr bool kScaled = false, kXScaled = false, kBlockScales = false;
};
struct Fp8 : Bytes {
  using Operand = __nv_fp8_e4m3;
  static constexpr int kBytes = 1, kXBytes = 1;
  static constexpr bool kScaled = true, kXScaled = true, kBlockScales = false;
};
struct Fp8Blocks : Bytes {
  using Operand = __nv_fp8_e4m3;
  static constexpr int kBytes = 1, kXBytes = 1;
  static constexpr bool kScaled = false, kXScaled = true, kBlockScales = true;
  static_assert(kBytes * kScaleBlock == kLineBytes, "a line has one scale");
};
// A weight of FP8 by an x of bfloat16, to which the weight is converted, exactly.
struct Fp8ByBf16 : Bytes {
  using Operand = __nv_bfloat16;
  static constexpr int kBytes = 1, kXBytes = 2;
  static constexpr bool kScaled = true, kXScaled = false, kBlockScales = false;
};
struct Fp8BlocksByBf16 : Bytes {
  using Operand = __nv_bfloat16;
  static constexpr int kBytes = 1, kXBytes = 2;
  static constexpr bool kScaled = false, kXScaled = false, kBlockScales = true;
};
// Four bits a number by an x of bfloat16. A scale is for kColumns columns or more, and is
// multiplied with sums or with numbers. A number's scale has the factor, which keeps it within the
// range of bfloat16, and sums have its inverse.
template <typename Numbers_, ScaleType kScale_, int kColumns_, bool kScaled_>
struct Packed {
  using Numbers = Numbers_;
  static constexpr ScaleType kScale = kScale_;
  // Of a scale in the table; 0: rows alone have scales, which multiply finished sums.
  static constexpr int kScaleBytes = kScale == ScaleType::kFloat  ? 0
                                     : kScale == ScaleType::kHalf ? 2
                                                                  : 1;
  static constexpr int kXBytes = 2, kColumns = kColumns_;
  static constexpr bool kScaled = kScaled_, kXScaled = false, kBlockScales = false;
  static constexpr bool kPacked = true, kFloats = std::is_same_v<Numbers, FloatNibbles>;
  static constexpr bool kScalesSums = kColumns >= 128;
  static constexpr bool kZeros = kScale == ScaleType::kHalf && kScalesSums;  // may be there
  static constexpr float kNumberFactor = kFloats ? 0x1p94f : 1.0f;  // of numbers times 2^-126
  static constexpr float kSumFactor = kFloats ? 0x1p32f : 1.0f;
};
using Int4 = Packed<UnsignedNibbles, ScaleType::kHalf, 128, false>;
using Int4Channel = Packed<UnsignedNibbles, ScaleType::kFloat, 128, true>;
using Int4SmallGroups = Packed<UnsignedNibbles, ScaleType::kHalf, 32, false>;
using MxFp4 = Packed<FloatNibbles, ScaleType::kE8M0, 32, false>;
using NvFp4 = Packed<FloatNibbles, ScaleType::kE4M3, 16, true>;

constexpr int kStepColumns = 2 * kRowBytes;  // of a packed weight

// The bytes of a row.
template <typename Format>
__host__ __device__ constexpr int row_bytes_of(int in_features) {
  if constexpr (Format::kPacked)
    return in_features / 2;
  else
    return in_features * Format::kBytes;
}
// Lines of x for each line of the weight.
template <typename Format>
constexpr int lines_of_x() {
  if constexpr (Format::kPacked)
    return 4;
  else
    return Format::kXBytes / Format::kBytes;
}

// Up to kTokens tokens, a multiple of 8; stages hold kXRows of them: two, where no call has more.
template <int kTokens_, int kXRows_>
struct Batch {
  static constexpr int kTokens = kTokens_, kXRows = kXRows_;
};

// What a block works on: kRows rows of the weight, a batch, through a ring of kStages stages.
template <typename Format_, typename Batch_, int kRows_, int kStages_>
struct Tile {
  using Format = Format_;
  static constexpr int kRows = kRows_, kTokens = Batch_::kTokens, kXRows = Batch_::kXRows;
  static constexpr int kStages = kStages_, kLog2Rows = std::countr_zero(unsigned{kRows});
  static constexpr int kTilesM = kRows / 16, kTilesN = kTokens / 8;
  // x has the columns of the weight's lines, in as many lines, or twice or four times as many.
  static constexpr int kXLines = kConsumerWarps * lines_of_x<Format>();
  static constexpr int kXRowBytes = kXLines * kLineBytes;
  static constexpr int kStageBytes = kRows * kRowBytes + kXRows * kXRowBytes;
  // A step's scales: the weight's, [kConsumerWarps], and x's, [kConsumerWarps][num_tokens].
  static constexpr int kScaleBytes =
      Format::kBlockScales ? 16 * (1 + (Format::kXScaled ? kXRows : 0)) : 0;
  // The warps' sums, [kConsumerWarps][kXRows][kSumPitch] floats over the stages once these are
  // read; the pad spreads the banks.  After them each token's norm's scale
  // and mean.
  static constexpr int kSumPitch = kRows + 4;
  static constexpr int kWarpSums = kXRows * kSumPitch;
  static constexpr int kSumBytes = kConsumerWarps * kWarpSums * 4;
  static constexpr int kSharedBytes = kStages * (kStageBytes + 16 + kScaleBytes);
  static constexpr int kBlocksPerMultiprocessor = 228 * 1024 / (kSharedBytes + 1024);
  static_assert(kBlocksPerMultiprocessor <= 8);
  static_assert(kStageBytes % 1024 == 0, "the swizzle's pattern repeats every 1024 bytes");
  static_assert(kSumBytes + 8 * kMaxNormedTokens <= kStages * kStageBytes);
};

// A block adds up segments [first, first + num_steps) of K of a tile's rows.  Its outputs begin at
// first_output; gated, half of its rows are gates and half the ups of the same outputs.
struct Share {
  int rank, first_output, first, num_steps;
};

// The rings of a batch.  Deep, medium: a multiprocessor's memory for two or three blocks, for a
// weight that one round of these covers.  Shallow: room for the next kernel's blocks beside, where
// blocks are short and several.  Tall: for a weight that a round of two taller blocks covers. Many:
// for many rounds.
template <typename F, typename B, int kDeep, int kMedium, int kShallow, int kTall, int kManyRows,
          int kManyStages>
struct RingsOf {
  using Deep = Tile<F, B, 16, kDeep>;
  using Medium = Tile<F, B, 16, kMedium>;
  using Shallow = Tile<F, B, 16, kShallow>;
  using Tall = Tile<F, B, 64, kTall>;
  using Many = Tile<F, B, kManyRows, kManyStages>;
};
template <typename F>
constexpr bool kWide = lines_of_x<F>() > 1;  // x takes twice the bytes of as much of a row
template <typename F, typename Batch>
struct Rings;
template <typename F>
struct Rings<F, Batch<8, 2>>
    : RingsOf<F, Batch<8, 2>, kWide<F> ? 11 : 12, kWide<F> ? 7 : 8, 6, 3, 16, 4> {};
template <typename F>
struct Rings<F, Batch<8, 8>>
    : RingsOf<F, Batch<8, 8>, kWide<F> ? 6 : 9, kWide<F> ? 4 : 6, 4, kWide<F> ? 2 : 3, 16, 4> {};
template <typename F>
struct Rings<F, Batch<16, 16>> : RingsOf<F, Batch<16, 16>, 6, 4, 4, 2, 32, 4> {};
template <typename F>
struct Rings<F, Batch<32, 32>>
    : RingsOf<F, Batch<32, 32>, 4, 3, 3, 2, F::kBytes == 2 ? 64 : 32, F::kBytes == 2 ? 2 : 3> {};

enum class Ring { kDeep, kMedium, kShallow, kTall, kMany };

// Which ring, and how many blocks, a cluster, share a tile along K.
struct TilePlan {
  Ring ring;
  int splits;
};

constexpr int kMaxSplits = 8;

// Splits that bring `tiles` blocks close to `slots`, each with eight steps or more: what a cluster
// costs, a block with fewer does not gain.
constexpr int splits_for(int tiles, int slots, int steps) {
  int splits = 1;
  while (splits < kMaxSplits && 2 * splits * tiles <= slots && steps >= 16 * splits) splits *= 2;
  return splits;
}

// The rule: rows of the weight and steps of 512 bytes along K to a plan (measured in
// docs/decisions/one-kernel-for-few-rows.md).  Blocks of few steps, two or three a multiprocessor,
// are over before a deep ring pays.  Else one round of blocks, of the ring whose slots it fills
// better, if it fills them or nothing else could; else one of tall blocks, if it fills theirs; else
// many rounds.
template <typename R>
constexpr TilePlan plan_tile(int rows, int steps) {
  constexpr int kFewSteps = 8;
  constexpr float kFull = 0.7f;
  const int tiles = (rows + 15) / 16;
  const auto slots = [](int blocks) { return kMultiprocessors * blocks; };
  constexpr int kShallow = R::Shallow::kBlocksPerMultiprocessor;
  if (steps <= kFewSteps && tiles > kMultiprocessors * 3 / 2 && tiles <= slots(kShallow)) {
    return {Ring::kShallow, 1};
  }
  const auto fill = [&](int blocks, int splits) {
    return tiles > slots(blocks) ? 0.0f : static_cast<float>(tiles * splits) / slots(blocks);
  };
  constexpr int kDeep = R::Deep::kBlocksPerMultiprocessor;
  constexpr int kMedium = R::Medium::kBlocksPerMultiprocessor;
  const int deep_splits = splits_for(tiles, slots(kDeep), steps);
  const int medium_splits = splits_for(tiles, slots(kMedium), steps);
  const float deep = fill(kDeep, deep_splits), medium = fill(kMedium, medium_splits);
  const bool few_rows = rows <= R::Many::kRows * kMultiprocessors;
  if (deep >= medium && (deep >= kFull || (few_rows && deep > 0))) {
    return {Ring::kDeep, deep_splits};
  }
  if (medium >= kFull || (few_rows && medium > 0)) return {Ring::kMedium, medium_splits};
  const int tall_tiles = (rows + R::Tall::kRows - 1) / R::Tall::kRows;
  const int tall_slots = slots(R::Tall::kBlocksPerMultiprocessor);
  if (tall_tiles <= tall_slots && tall_tiles >= kFull * tall_slots) return {Ring::kTall, 1};
  return {Ring::kMany, 1};
}

}  // namespace fusewright::gemm
