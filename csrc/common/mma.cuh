// The matrix multiplication of a warp (sm_80 and later), for each type of its operands.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace fusewright {

#define FW_MMA(NAME)                                                                              \
  asm("mma.sync.aligned." NAME " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                            \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))

// d += a b. `a` has 16 rows and `b` 8 columns; K is 16 elements of two bytes, or 32 of one.
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    FW_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  } else if constexpr (std::is_same_v<T, __half>) {
    FW_MMA("m16n8k16.row.col.f32.f16.f16.f32");
  } else {
    static_assert(std::is_same_v<T, __nv_fp8_e4m3>);
    FW_MMA("m16n8k32.row.col.f32.e4m3.e4m3.f32");
  }
}

#undef FW_MMA

// Two FP8 numbers (e4m3), of bytes 0 and 1 of v or of bytes 2 and 3, exactly, as two of bfloat16:
// their bits as a bfloat16's are 2^-120 of them.
template <int kHigh>
__device__ __forceinline__ uint32_t bf16x2_of_e4m3(uint32_t v) {
  uint32_t extended, d;  // each byte, and its sign eight times above
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(extended) : "r"(v), "n"(kHigh ? 0xb3a2 : 0x9180));
  const uint32_t bits = (extended << 4) & 0x87f087f0u;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(bits), "r"(0x7b807b80u));  // 2^120
  return d;
}

}  // namespace fusewright
