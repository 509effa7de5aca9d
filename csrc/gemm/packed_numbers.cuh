// Numbers of four bits become bfloat16 in registers, two at a time, without conversion
// instructions.
//
// A word holds eight neighbours of a row, the first lowest. Masks reach fields four apart at once,
// so that its pairs are of columns (i, i + 4), i from 0 to 3; the pairs of x are put so too.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace fusewright::gemm {

// (a & mask) | bits in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}

__device__ __forceinline__ uint32_t times_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t minus_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t twice_bf16(float v) {
  const __nv_bfloat162 pair = __float2bfloat162_rn(v);
  return reinterpret_cast<const uint32_t&>(pair);
}

// A field in the low bits of the mantissa of 128 counts 1.
constexpr uint32_t kNibbles = 0x000f000fu, kMagic = 0x43004300u, kMagicAndEight = 0x43084308u;
constexpr float kMagicOffset = 128.0f;

// The four pairs of a word of unsigned integers, plus kMagicOffset: 7 instructions.
struct UnsignedNibbles {
  __device__ __forceinline__ static void pairs(uint32_t w, uint32_t (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = and_or(w >> (4 * i), kNibbles, kMagic);
  }
};

constexpr uint32_t kSignedFloat = 0x81c081c0u;

// The bytes of v that the digits of kBytes name; with 8 added, its sign eight times.
template <int kBytes>
__device__ __forceinline__ uint32_t permute(uint32_t v) {
  uint32_t d;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(d) : "r"(v), "n"(kBytes));
  return d;
}

// The four pairs of a word of E2M1 times 2^-126: a sign, two bits of exponent and one of mantissa
// in their places of a bfloat16. 13 instructions, of which 8 are of the slower unit.
struct FloatNibbles {
  __device__ __forceinline__ static void pairs(uint32_t w, uint32_t (&out)[4]) {
    const uint32_t low = w << 4;
    // A byte whose upper half is the number, and its sign eight times above.
    out[0] = (permute<0xa280>(low) << 2) & kSignedFloat;
    out[1] = (permute<0xa280>(w) << 2) & kSignedFloat;
    out[2] = (permute<0xb391>(low) << 2) & kSignedFloat;
    out[3] = (permute<0xb391>(w) << 2) & kSignedFloat;
  }
};

// The pairs of x that belong to those of a word, of eight neighbours of a row of x.
__device__ __forceinline__ void pairs_of_x(const uint4& x, uint32_t (&out)[4]) {
  out[0] = __byte_perm(x.x, x.z, 0x5410);
  out[1] = __byte_perm(x.x, x.z, 0x7632);
  out[2] = __byte_perm(x.y, x.w, 0x5410);
  out[3] = __byte_perm(x.y, x.w, 0x7632);
}

}  // namespace fusewright::gemm
