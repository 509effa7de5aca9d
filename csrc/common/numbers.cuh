// Conversions between formats of numbers, and approximations of the special function unit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fusewright {

constexpr float kLog2E = 1.4426950408889634f;

// Rounds two floats to 16-bit numbers in a word, the first in its lower half.
template <typename M>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(v);
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(v);
}

__device__ __forceinline__ float2 unpack_bfloat16(uint32_t v) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(v));
}

// Computes 2^x. Results below the normal numbers are 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The result is off by one unit of the last place at most. Quotients are rounded to two bytes or to
// one, which is far more.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace fusewright
