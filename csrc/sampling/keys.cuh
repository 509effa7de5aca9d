// Logits as unsigned keys of the same order, and the noise that is added to them.
//
// A key is as wide as the element: 16 bits tell all bfloat16 or half values apart, so a search by
// digits of 8 bits takes two rounds there and four for float. NaN has the key of -inf (it never
// wins), -0 that of 0, and +inf stands for the largest finite float, as in ops/_sampling.py.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace fusewright::sampling {

constexpr float kFloatMax = 3.4028234663852886e38f;

template <typename RawT, uint32_t kInfinityBits>
struct Keys {
  using Raw = RawT;
  static constexpr int kBits = 8 * sizeof(Raw);
  static constexpr uint32_t kZero = 1u << (kBits - 1);        // of the value 0
  static constexpr uint32_t kLowest = kZero - kInfinityBits;  // of -inf; keys below are no value's

  __device__ static uint32_t key_of(uint32_t raw) {
    uint32_t magnitude = raw & (kZero - 1);
    const bool nan = magnitude > kInfinityBits;
    if (nan) magnitude = kInfinityBits;
    if (nan || (raw & kZero)) return kZero - magnitude;
    // The largest finite float is one value with +inf; 16-bit formats do not have it.
    if (kBits == 32 && magnitude == kInfinityBits) --magnitude;
    return kZero + magnitude;
  }

  __device__ static uint32_t raw_of(uint32_t key) {
    return key < kZero ? kZero | (kZero - key) : key - kZero;
  }
};

struct BFloat16 : Keys<uint16_t, 0x7F80> {
  __device__ static float value_of(uint32_t key) {
    return fminf(__uint_as_float(raw_of(key) << 16), kFloatMax);
  }
  __device__ static uint32_t least_key(float at_least) {
    return key_of(__bfloat16_as_ushort(__float2bfloat16_ru(at_least)));
  }
};

struct Half : Keys<uint16_t, 0x7C00> {
  __device__ static float value_of(uint32_t key) {
    return fminf(__half2float(__ushort_as_half(static_cast<uint16_t>(raw_of(key)))), kFloatMax);
  }
  __device__ static uint32_t least_key(float at_least) {
    return key_of(__half_as_ushort(__float2half_ru(at_least)));
  }
};

struct Float : Keys<uint32_t, 0x7F800000> {
  __device__ static float value_of(uint32_t key) {
    return fminf(__uint_as_float(raw_of(key)), kFloatMax);
  }
  __device__ static uint32_t least_key(float at_least) { return key_of(__float_as_uint(at_least)); }
};

// A bijective 32-bit mixer with low bias (C. Wellons, "lowbias32", 2018).
__device__ __forceinline__ uint32_t mix(uint32_t h) {
  h ^= h >> 16;
  h *= 0x7FEB352Du;
  h ^= h >> 15;
  h *= 0x846CA68Bu;
  return h ^ (h >> 16);
}

// The noise of a row: standard Gumbel, a pure function of (seed, position, index), by the integer
// operations of ops/_sampling.py.
struct Noise {
  static constexpr float kLeast = -2.9f;  // no noise is below

  uint32_t key0, key1;

  __device__ Noise(int64_t seed, int position) {
    const uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
    const uint32_t place = static_cast<uint32_t>(position);
    key0 = mix(mix(mix(low ^ 0x9E3779B9u) ^ high) ^ place);
    key1 = mix(mix(mix(high ^ 0x85EBCA6Bu) + low) ^ ~place);
  }

  __device__ uint32_t bits(uint32_t index) const { return mix(mix(index ^ key0) + key1); }

  // Of the bits, uniform, and smallest where the noise is largest.
  __device__ static float of_bits(uint32_t h) {
    const float w =
        fminf(__fmul_rn(__fadd_rn(static_cast<float>(h), 0.5f), 0x1p-32f), 1 - 0x1p-24f);
    float e;
    if (w < 1.0f / 64.0f) {
      e = __fadd_rn(1.0f / 3.0f, __fmul_rn(w, 0.25f));
      e = __fadd_rn(0.5f, __fmul_rn(w, e));
      e = __fadd_rn(1.0f, __fmul_rn(w, e));
      e = __fmul_rn(w, e);
    } else {
      e = -logf(1.0f - w);
    }
    return -logf(e);
  }

  // No less than of_bits, in a third of its instructions: -log(w), with w cut to 23 bits.
  __device__ static float bound_of_bits(uint32_t h) {
    const float w = __uint_as_float(h >> 9 | 0x3F800000u) - 1.0f;  // 0 gives infinity
    return __log2f(w) * -0.69314718f + 1e-3f;
  }
};

}  // namespace fusewright::sampling
