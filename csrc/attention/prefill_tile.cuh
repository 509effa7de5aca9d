// The warps that fill shared memory and those that compute share the tile and its barriers.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "../common/wgmma.cuh"
#include "prefill_items.cuh"

namespace fusewright::attention {

constexpr int kLineBytes = 128;

// E is the type of q, C that of the cache. kIsGeneral: with a window, chunks or a soft cap.
//
// Registers of a thread that computes, and shared memory in KB:
//   head_dim | rows x keys | sums, logits, weights | q, K and V, as stored in FP8
//         64 | 192 x 128   |  32 + 64 + 32         | 2 x 24, 2 x 32, 4 x  8; or 128 rows
//        128 | 128 x 128   |  64 + 64 + 32         | 2 x 32, 2 x 64, 2 x 16 and q once
//        256 | 128 x  64   | 128 + 32 + 16         | 1 x 64, 2 x 64, 2 x 16
// With a head_dim of 64 the softmax takes as long as the MMAs, so with three warpgroups two have
// their softmax while the third has its MMAs. Bounds of windows do not fit their registers.
template <typename E, typename C, int kDim, bool kIsGeneral, int kWarpgroups = 2>
struct PrefillTile {
  using Element = E;
  static constexpr bool kFp8 = sizeof(C) == 1;
  // Of what the MMAs read. It takes one instruction to widen two of e4m3 to fp16, and four to bf16.
  using Operand = std::conditional_t<kFp8, __half, E>;
  static constexpr bool kScalesQueries = !std::is_same_v<Operand, E>;
  static constexpr bool kGeneral = kIsGeneral;

  static constexpr int kHeadDim = kDim;
  static constexpr int kTileKeys = kDim == 256 ? 64 : 128;
  static_assert(kDim > 64 ? kWarpgroups == 2 : !kGeneral);
  static constexpr int kGroups = kWarpgroups;       // that compute 64 rows each
  static constexpr int kRows = 64 * kGroups;        // queries x heads
  static constexpr int kConverters = kFp8 ? 3 : 0;  // warps that widen FP8
  static constexpr int kThreads = (kGroups + 1) * kWarpgroupThreads;
  static constexpr int kComputeWarps = 4 * kGroups;
  static constexpr int kComputeRegisters = kGroups == 3 ? 160 : 232;
  static constexpr int kFillRegisters = kGroups == 3 ? 32 : 40;

  static constexpr int kStages = 2;  // of K and of V
  static constexpr int kQueryStages = kDim == 256 || (kFp8 && kDim == 128) ? 1 : 2;
  static constexpr int kRawStages = !kFp8 ? 0 : kDim == 64 ? 4 : 2;  // of K or V

  static constexpr int kLines = kDim * 2 / kLineBytes;     // that a row has
  static constexpr int kGroupBytes = kLines * kAtomBytes;  // of eight tokens of K or V
  static constexpr int kQueryLineBytes = kRows * kLineBytes;
  static constexpr int kQueryBytes = kLines * kQueryLineBytes;
  static constexpr int kKeysBytes = kTileKeys * kLines * kLineBytes;
  static constexpr int kRawBytes = kTileKeys * kDim;
  static constexpr int kRingsAt = kQueryStages * kQueryBytes;
  static constexpr int kRawAt = kRingsAt + 2 * kStages * kKeysBytes;
  static constexpr int kBytes = kRawAt + kRawStages * kRawBytes;
};

__device__ __forceinline__ uint4 load_words(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_words(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

enum Part { kKeys, kValues };

// Barriers of a block, and what comes with q. K and V alternate: stage s has its K at 2 s.
template <typename T>
struct alignas(16) Mailbox {
  uint64_t full[2 * T::kStages], empty[2 * T::kStages];
  uint64_t query_full[T::kQueryStages], query_empty[T::kQueryStages];
  uint64_t raw_full[T::kRawStages + 1], raw_empty[T::kRawStages + 1];  // none is no array
  Item item[T::kQueryStages];
  float row_scale[T::kScalesQueries ? T::kRows : 1];

  // By one thread.
  __device__ __forceinline__ void init() {
    constexpr int kFillers = T::kFp8 ? T::kConverters : 1;
    for (int i = 0; i < 2 * T::kStages; ++i) {
      barrier_init(shared_address(full + i), kFillers);
      barrier_init(shared_address(empty + i), T::kComputeWarps);
    }
    for (int i = 0; i < T::kQueryStages; ++i) {
      barrier_init(shared_address(query_full + i), 1);
      barrier_init(shared_address(query_empty + i), T::kComputeWarps + T::kConverters);
    }
    for (int i = 0; i < T::kRawStages; ++i) {
      barrier_init(shared_address(raw_full + i), 1);
      barrier_init(shared_address(raw_empty + i), T::kConverters);
    }
    barrier_init_fence();
  }
};

// The next stage of a ring, and which time around it is.
template <int kCount>
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kCount ? 0 : stage + 1;
    parity ^= stage == 0;
  }
};

}  // namespace fusewright::attention
