// What the warp that fills shared memory and those that compute share: the tile, its barriers.
#pragma once

#include <cuda.h>

#include "../common/wgmma.cuh"
#include "prefill_items.cuh"

namespace fusewright::attention {

constexpr int kComputeWarps = 8;
constexpr int kLineBytes = 128;
constexpr int kHalves = 2;                         // lines that a row has
constexpr int kGroupBytes = kHalves * kAtomBytes;  // of eight tokens of K or V
constexpr int kQueryHalfBytes = kTileRows * kLineBytes;
constexpr int kQueryBytes = kHalves * kQueryHalfBytes;
constexpr int kKeysBytes = kTileKeys * kHalves * kLineBytes;
constexpr int kStages = 2;  // of q, of K and of V in shared memory
constexpr int kTileBytes = kStages * (kQueryBytes + 2 * kKeysBytes);

// kGeneral: with a window or a soft cap.
template <typename E, bool kIsGeneral>
struct PrefillTile {
  using Element = E;
  static constexpr bool kGeneral = kIsGeneral;
};

enum Part { kKeys, kValues, kQueries };

// Barriers of a block, and what comes with q.
struct alignas(16) Mailbox {
  uint64_t full[3][kStages], empty[3][kStages];
  Item item[kStages];
};

// The next stage of a part, and which time around it is.
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    stage ^= 1;
    parity ^= stage == 0;
  }
};
static_assert(kStages == 2);

}  // namespace fusewright::attention
