// The tile of a grouped GEMM and the ring of stages through which its operands go.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "../common/wgmma.cuh"
#include "../gemm/async_copy.cuh"
#include "grouped_schedule.cuh"

namespace fusewright::moe {

constexpr int kGroupedThreads = 3 * kWarpgroupThreads;
constexpr int kComputingWarps = 8;
constexpr int kLineBytes = 128;     // of in_features a step
constexpr int kWarpgroupRows = 64;  // of an MMA
constexpr int kLeadBarrier = 1;     // named barrier
constexpr int kLead = 2;            // steps by which the first computing warpgroup is ahead
constexpr int kGroupTiles = 16;     // row tiles of an expert walked before the next column tile
constexpr int kScratchRows = 16;    // of a warp's outputs, a line each

// The tile of a block: rows of slots, which the two warpgroups share, by rows of the weight.
// kGathered: x has rows to gather, else places. kGated: outputs are of gate and up. kWide: for many
// rows an expert, of which a wide tile reads fewer bytes from L2. Bfloat16 has no other.
template <Scales kScalesOf, bool kIsGathered, bool kIsGated, bool kWide>
struct GroupedTile {
  static constexpr Scales kScales = kScalesOf;
  static constexpr bool kGathered = kIsGathered, kGated = kIsGated;
  static constexpr bool kFp8 = kScales != Scales::kNone;
  static constexpr int kRows = 2 * kWarpgroupRows;
  static constexpr int kWeightRows = kWide ? 256 : 128, kStages = kWide ? 4 : 6;
  // Of a thread that fills and of one that computes. Wide tiles of FP8 have 128 sums and 64 of a
  // step.
  static constexpr int kFillRegisters = kWide && kFp8 ? 56 : 72;
  static constexpr int kComputeRegisters = kWide && kFp8 ? 224 : 216;
  static constexpr int kBoxRows = kWeightRows / 2;  // of a weight's copy
  static constexpr int kOutputs = kGated ? kWeightRows / 2 : kWeightRows;
  static constexpr int kElementBytes = kFp8 ? 1 : 2;
  static constexpr int kLine = kLineBytes / kElementBytes;
  static constexpr int kXBytes = kRows * kLineBytes, kWeightBytes = kWeightRows * kLineBytes;
  static constexpr int kStageBytes = kXBytes + kWeightBytes;
  static constexpr int kScratchBytes = kScratchRows * kLineBytes;  // of a warp
  static constexpr int kSharedBytes =
      kStages * kStageBytes + kComputingWarps * kScratchBytes + kAtomBytes;
  // Whether all threads that fill the ring copy, not only the one that describes copies.
  static constexpr bool kAllCopy = kGathered || kFp8;
};

// Scales of FP8 for a step of blocks, or for the last step of a tile: of the tile's rows, and of
// its rows of the weight. In blocks, gates and ups share one each, or the first and the last rows.
template <typename T>
struct StepScales {
  float x[T::kRows], weight[T::kScales == Scales::kBlocks ? 2 : T::kWeightRows];
};

template <typename T>
struct GroupedShared {
  uint64_t full[T::kStages], empty[T::kStages];
  Schedule schedule;
  StepScales<T> scales[T::kFp8 ? T::kStages : 1];
};

template <int kStages>
struct RingCursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace fusewright::moe
