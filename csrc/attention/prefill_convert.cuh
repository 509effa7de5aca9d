// The warps of a prefill block that widen an FP8 cache to fp16.
#pragma once

#include "prefill_tile.cuh"

namespace fusewright::attention {

// Eight e4m3 numbers, exactly, as eight of fp16.
__device__ __forceinline__ uint4 halves_of_e4m3(uint32_t low, uint32_t high) {
  return {half2_of_e4m3(low), half2_of_e4m3(low >> 16), half2_of_e4m3(high),
          half2_of_e4m3(high >> 16)};
}

// Takes tiles [token][head_dim] of bytes and leaves them as the copy engine leaves those of 16-bit
// elements: groups of eight tokens, of lines of 128 bytes, whose chunks of 16 bytes are swizzled.
//
// A step of a warp is 512 bytes, 16 a lane. Eight lanes read 64 bytes each of two neighbouring
// tokens, which lie in different banks, and store to all columns of chunks: those of an even token
// and of an odd one differ in parity.
template <typename T>
struct Converter {
  static constexpr int kStepTokens = 512 / T::kHeadDim;
  static constexpr int kGroupSteps = 8 / kStepTokens;
  static constexpr int kSteps = T::kTileKeys / kStepTokens;
  static constexpr int kAtOnce = T::kGroups == 3 ? 2 : 4;  // by registers

  uint32_t memory;
  Mailbox<T>* box;
  int warp;
  Cursor<T::kQueryStages> query_at;
  Cursor<2 * T::kStages> to;
  Cursor<T::kRawStages> from;

  // K or V of a tile.
  __device__ __forceinline__ void convert() {
    const int lane = threadIdx.x % kWarpSize, quad = lane % 4, odd = lane / 4 % 2;
    const int unit = lane / 8, token = unit / T::kLines * 2 + odd;
    const int line = T::kLines == 1 ? 0 : (unit % T::kLines) ^ odd;
    const uint32_t source = memory + T::kRawAt + from.stage * T::kRawBytes + token * T::kHeadDim +
                            line * 64 + quad * 16;
    const uint32_t target = memory + T::kRingsAt + to.stage * T::kKeysBytes + line * kAtomBytes +
                            token * kLineBytes + ((quad * 2) ^ token) * 16;
    barrier_wait(shared_address(box->raw_full + from.stage), from.parity);
    barrier_wait(shared_address(box->empty + to.stage), to.parity ^ 1);
#pragma unroll 1
    for (int first = warp; first < kSteps; first += T::kConverters * kAtOnce) {
      uint4 raw[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int step = first + i * T::kConverters;
        if (step < kSteps) raw[i] = load_words(source + step * 512);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int step = first + i * T::kConverters, part = step % kGroupSteps * kStepTokens;
        if (step < kSteps) {
          // `token` and `part` have no bit in common.
          const uint32_t at = (target + step / kGroupSteps * T::kGroupBytes + part * kLineBytes) ^
                              static_cast<uint32_t>(part * 16);
          store_words(at, halves_of_e4m3(raw[i].x, raw[i].y));
          store_words(at ^ 16, halves_of_e4m3(raw[i].z, raw[i].w));
        }
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier_arrive_warp(shared_address(box->full + to.stage));
    barrier_arrive_warp(shared_address(box->raw_empty + from.stage));
    to.advance();
    from.advance();
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      barrier_wait(shared_address(box->query_full + query_at.stage), query_at.parity);
      const Item& item = box->item[query_at.stage];
      const int tiles = item.end - item.begin;
      barrier_arrive_warp(shared_address(box->query_empty + query_at.stage));
      query_at.advance();
      if (tiles == 0) break;
#pragma unroll 1
      for (int i = 0; i < 2 * tiles; ++i) convert();
    }
  }
};

}  // namespace fusewright::attention
