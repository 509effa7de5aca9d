// The tile of a grouped GEMM and the ring of stages through which its operands go.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <type_traits>

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

// A block computes a tile of kRows slots, which its two computing warpgroups share, by kWeightRows
// rows of the weight. With kGathered, rows of x are gathered by slot; otherwise they are in the
// order of places. With kGated, outputs combine gate and up. A wide tile reads fewer bytes from L2,
// which pays when experts have many rows. Bfloat16 has wide tiles only.
//
// Numbers: of a weight of four bits, which is made bfloat16 while a stage is filled; else void.
template <Scales kScalesOf, bool kIsGathered, bool kIsGated, bool kWide, typename Numbers_ = void>
struct GroupedTile {
  using Numbers = Numbers_;
  static constexpr bool kPacked = !std::is_void_v<Numbers>;
  static constexpr Scales kScales = kScalesOf;
  static constexpr bool kGathered = kIsGathered, kGated = kIsGated;
  static constexpr bool kFp8 = kScales != Scales::kNone;
  static constexpr int kRows = 2 * kWarpgroupRows;
  static constexpr int kWeightRows = kWide ? 256 : 128, kStages = kWide ? 4 : 6;
  // A thread that fills gives registers to those that compute. In a wide tile of FP8 these hold 128
  // sums, and 64 products of the current step.
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
  // With kAllCopy, all threads of the filling warpgroup copy; otherwise one thread issues all
  // copies.
  static constexpr bool kAllCopy = kGathered || kFp8 || kPacked;
  // Arrivals at a stage's full barrier: of the copy engine's bytes, and of each thread's copies and
  // stores.
  static constexpr int kArrivals = 1 + kWarpgroupThreads * (kAllCopy + kPacked);
};

// The FP8 scales that travel with a stage. Scales of blocks come with every step: one for each row
// of x, and one for each half of the tile's weight rows (gates and ups, if gated). Scales of rows
// come with the last step of a tile.
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
