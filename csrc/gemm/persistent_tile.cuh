// The tile of the persistent GEMM, the ring of stages through which its operands go, and the order
// in which blocks take tiles.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "async_copy.cuh"
#include "persistent.h"
#include "wide_mma.cuh"

namespace fusewright::gemm {

constexpr int kPersistentThreads = 3 * kWarpgroupThreads;
constexpr int kComputingWarps = 8;
constexpr int kMmaRows = 64;
constexpr int kLeadBarrier = 1;  // named barriers: of all who compute, and of a warpgroup
constexpr int kScaleBarrier = 2;
constexpr int kLead = 2;          // steps by which the first computing warpgroup is ahead
constexpr int kGroupTiles = 16;   // row tiles that are walked before the next column tile
constexpr int kScratchRows = 16;  // of a warp's outputs, a line each
constexpr int kRingBytes = 208 * 1024;

// A block computes a tile of kRows rows of x by kWeightRows rows of the weight. Its two computing
// warpgroups share the rows of x or, if there are 64, those of the weight. A warpgroup's rows of
// the weight are gates, then as many ups. A step is a line of 128 bytes of each row.
template <Operands kOperandsOf, int kTileRows, int kTileWeightRows>
struct PersistentTile {
  static constexpr Operands kOperands = kOperandsOf;
  static constexpr bool kFp8 = kOperands != Operands::kBf16;
  static constexpr int kLine = kFp8 ? kLineBytes : kLineBytes / 2;  // in_features a step
  static constexpr int kRows = kTileRows, kWeightRows = kTileWeightRows;
  static constexpr bool kShareRows = kRows == 2 * kMmaRows;
  static constexpr int kGroupWeightRows = kShareRows ? kWeightRows : kWeightRows / 2;
  static constexpr int kOutputs = kWeightRows / 2, kGroupOutputs = kGroupWeightRows / 2;
  static constexpr int kSums = kGroupWeightRows / 2;  // of a thread
  static constexpr int kPart = kWeightRows / 4;       // of them, added up at once if of FP8
  static constexpr int kBoxes = kShareRows ? 2 : 4;
  static constexpr int kBoxRows = kWeightRows / kBoxes;
  static constexpr int kXBytes = kRows * kLineBytes, kWeightBytes = kWeightRows * kLineBytes;
  static constexpr int kStageBytes = kXBytes + kWeightBytes;
  static constexpr int kStages = kRingBytes / kStageBytes;
  static constexpr int kScratchBytes = kScratchRows * kLineBytes;  // of a warp
  static constexpr int kSharedBytes =
      kStages * kStageBytes + kComputingWarps * kScratchBytes + kAtomBytes;
  // Of few rows a thread has half the sums. Registers are then left for blocks of the kernel ahead,
  // beside which this one's copies start. More threads than there are mean fewer registers each.
  static constexpr int kMostThreads = kShareRows ? kPersistentThreads : 4 * kWarpgroupThreads;
  static constexpr int kFillRegisters = 40, kComputeRegisters = kShareRows ? 232 : 168;
  static_assert(kBoxRows % 8 == 0);
};

template <typename T>
struct PersistentShared {
  uint64_t full[T::kStages], empty[T::kStages];
  float weight_scales[2][T::kFp8 ? T::kGroupWeightRows : 1];
};

template <int kStages>
struct PersistentCursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The first row of x and the first output of a tile.
struct PersistentItem {
  int row, column;
};

// Tiles in groups of row tiles, of which all walk down a column tile before the next: so the blocks
// that run at once read few rows of x and few of the weight.
template <typename T>
struct PersistentWalk {
  int row_tiles, column_tiles, steps;

  __device__ PersistentWalk(const SkinnyLinearArgs& args)
      : row_tiles((args.num_tokens + T::kRows - 1) / T::kRows),
        column_tiles((args.out_features + T::kOutputs - 1) / T::kOutputs),
        steps(args.in_features / T::kLine) {}

  __device__ __forceinline__ int num_tiles() const { return row_tiles * column_tiles; }
  __device__ __forceinline__ int first() const { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ int stride() const { return static_cast<int>(gridDim.x); }

  __device__ __forceinline__ PersistentItem find(int tile) const {
    const int group = tile / (kGroupTiles * column_tiles) * kGroupTiles;
    const int of_group = min(row_tiles - group, kGroupTiles);
    const int rest = tile - group * column_tiles;
    const int row_tile = group + rest % of_group;
    return {row_tile * T::kRows, rest / of_group * T::kOutputs};
  }
};

}  // namespace fusewright::gemm
