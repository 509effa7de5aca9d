// Logits as unsigned keys of the same order, and the noise that is added to them.
//
// A key is as wide as the element. NaN has the keys above kHighest and, with its sign set, those
// below kLowest. What ops/sampling/noise.py takes as equal may have two keys: 0 and -0, and of
// float +inf and the largest finite one; a threshold is the lower of both.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace fusewright::sampling {

constexpr float kFloatMax = 3.4028234663852886e38f;

// In place of a token id, as in ops/sampling/noise.py.
constexpr int kNotANumber = -1;
constexpr int kNothingLeft = -2;

template <typename RawT, uint32_t kInfinity>
struct Keys {
  using Raw = RawT;
  static constexpr int kBits = 8 * sizeof(Raw);
  static constexpr uint32_t kSign = 1u << (kBits - 1);
  static constexpr uint32_t kHighest = kSign + kInfinity;     // of +inf
  static constexpr uint32_t kLowest = kSign - 1 - kInfinity;  // of -inf

  // The keys of all elements in a word.
  __device__ static uint32_t keys_of(uint32_t word) {
    if constexpr (kBits == 32) return word ^ (static_cast<int32_t>(word) >> 31 | kSign);
    const uint32_t negative = (word >> 15 & 0x00010001u) * 0xFFFFu;
    return word ^ (negative | 0x80008000u);
  }

  __device__ static uint32_t max_of(uint32_t a, uint32_t b) {
    return kBits == 32 ? max(a, b) : __vmaxu2(a, b);
  }

  __device__ static uint32_t min_of(uint32_t a, uint32_t b) {
    return kBits == 32 ? min(a, b) : __vminu2(a, b);
  }

  // The least key of the same value.
  __device__ static uint32_t least_equal(uint32_t key) {
    return key - (key == kSign || (kBits == 32 && key == kHighest));
  }

  __device__ static uint32_t key_of(Raw raw) {
    return least_equal(keys_of(raw) & static_cast<Raw>(~Raw{0}));
  }

  __device__ static Raw raw_of(uint32_t key) {
    return static_cast<Raw>(key & kSign ? key ^ kSign : ~key);
  }
};

struct BFloat16 : Keys<uint16_t, 0x7F80> {
  __device__ static float value_of(uint32_t key) {
    return fminf(__uint_as_float(uint32_t{raw_of(key)} << 16), kFloatMax);
  }
  __device__ static uint32_t least_key(float at_least) {
    return key_of(__bfloat16_as_ushort(__float2bfloat16_ru(at_least)));
  }
};

struct Half : Keys<uint16_t, 0x7C00> {
  __device__ static float value_of(uint32_t key) {
    return fminf(__half2float(__ushort_as_half(raw_of(key))), kFloatMax);
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
// operations of ops/sampling/noise.py.
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

  // Of the bits, uniform, and smallest where the noise is largest. Operation for operation what
  // the Triton kernel is compiled to: a row draws the same by either.
  __device__ static float of_bits(uint32_t h) {
    const float w = fminf((static_cast<float>(h) + 0.5f) * 0x1p-32f, 1 - 0x1p-24f);
    float e;
    if (w < 1.0f / 64.0f) {
      e = w * __fmaf_rn(w, __fmaf_rn(w, __fmaf_rn(w, 0.25f, 1.0f / 3.0f), 0.5f), 1.0f);
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
