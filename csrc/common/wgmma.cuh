// Matrix multiplication of a warpgroup (sm_90a): four consecutive warps, operands described in
// shared memory in the layout that copies with a 128-byte swizzle leave, or A in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace fusewright {

constexpr int kWarpgroupThreads = 128;
// Eight rows of 128 bytes: what the swizzle permutes within.
constexpr int kAtomBytes = 1024;

// Tells the compiler that a number is the same in all lanes. What follows from it is then computed
// once a warp, above all where the MMAs' operands lie.
__device__ __forceinline__ int uniform(int x) { return __reduce_max_sync(0xffffffffu, x); }

// The descriptor of a matrix in shared memory, which counts in units of 16 bytes. `kStride` is the
// distance in bytes from atom to atom down the rows, of which an atom has eight. `leading` is that
// along a row, where only a transposed operand has several atoms. `offset` is a place in the
// matrix, in bytes.
__device__ __forceinline__ uint32_t low_word(uint32_t address, int leading) {
  return static_cast<uint32_t>(leading >> 4) << 16 | address >> 4;
}

template <int kStride>
__device__ __forceinline__ uint64_t operand(uint32_t low_word, int offset) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{kStride >> 4} << 32 | (low_word + (offset >> 4));
}

// Needed before MMAs read registers that were written since the last ones.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most that many groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of registers across the wait for who writes them.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// clang-format off
#define FW_8(d, i)                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FW_32(d, i) FW_8(d, i), FW_8(d, i + 8), FW_8(d, i + 16), FW_8(d, i + 24)
#define FW_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FW_NAMES_16 FW_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FW_NAMES_32                                                                           \
  FW_NAMES_16 ", "                                                                            \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FW_NAMES_64                                                                           \
  FW_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
  "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define FW_NAMES_128                                                                          \
  FW_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, " \
  "%79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "     \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "    \
  "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "      \
  "%125, %126, %127"

// d = a b^T, + d unless `fresh`; a: 64 rows, b: 128 rows, of 16 elements each.
#define FW_FROM_SHARED(TYPE)                                                                  \
  asm volatile(                                                                               \
      "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %66, 0;\n\t"                                  \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                            \
      " {" FW_NAMES_64 "}, %64, %65, add, 1, 1, 0, 0;\n\t}"                                   \
      : FW_32(d, 0), FW_32(d, 32) : "l"(a), "l"(b), "r"(fresh ? 0 : 1))

// d += a b; a: 64 rows of 16 in registers, b: 16 rows of 128.
#define FW_FROM_REGISTERS(TYPE)                                                           \
  asm volatile(                                                                               \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                            \
      " {" FW_NAMES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                            \
      : FW_32(d, 0), FW_32(d, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
// clang-format on

template <typename M>
__device__ __forceinline__ void multiply(float (&d)[64], uint64_t a, uint64_t b, bool fresh);

template <>
__device__ __forceinline__ void multiply<__nv_bfloat16>(float (&d)[64], uint64_t a, uint64_t b,
                                                        bool fresh) {
  FW_FROM_SHARED("bf16");
}

template <>
__device__ __forceinline__ void multiply<__half>(float (&d)[64], uint64_t a, uint64_t b,
                                                 bool fresh) {
  FW_FROM_SHARED("f16");
}

// FP8 elements have one byte, so an instruction multiplies 32 of a row instead of 16.
template <>
__device__ __forceinline__ void multiply<__nv_fp8_e4m3>(float (&d)[64], uint64_t a, uint64_t b,
                                                        bool fresh) {
  asm volatile(
      "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %66, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"
      " {" FW_NAMES_64 "}, %64, %65, add, 1, 1;\n\t}"
      : FW_32(d, 0), FW_32(d, 32)
      : "l"(a), "l"(b), "r"(fresh ? 0 : 1));
}

// The same with 16, 32, 64 or 256 rows of b.
#define FW_BF16(ROWS, NAMES, A, B, ADD, ...)                                                \
  asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, " ADD                              \
               ", 0;\n\twgmma.mma_async.sync.aligned.m64n" ROWS "k16.f32.bf16.bf16 {" NAMES \
               "}, " A ", " B ", add, 1, 1, 0, 0;\n\t}"                                     \
               : __VA_ARGS__                                                                \
               : "l"(a), "l"(b), "r"(fresh ? 0 : 1))

__device__ __forceinline__ void multiply(float (&d)[8], uint64_t a, uint64_t b, bool fresh) {
  FW_BF16("16", FW_NAMES_8, "%8", "%9", "%10", FW_8(d, 0));
}

__device__ __forceinline__ void multiply(float (&d)[16], uint64_t a, uint64_t b, bool fresh) {
  FW_BF16("32", FW_NAMES_16, "%16", "%17", "%18", FW_8(d, 0), FW_8(d, 8));
}

__device__ __forceinline__ void multiply(float (&d)[32], uint64_t a, uint64_t b, bool fresh) {
  FW_BF16("64", FW_NAMES_32, "%32", "%33", "%34", FW_32(d, 0));
}

__device__ __forceinline__ void multiply(float (&d)[128], uint64_t a, uint64_t b, bool fresh) {
  FW_BF16("256", FW_NAMES_128, "%128", "%129", "%130", FW_32(d, 0), FW_32(d, 32), FW_32(d, 64),
          FW_32(d, 96));
}

// The same with a's 64 rows of 16 in registers.
#define FW_BF16_RS(ROWS, NAMES, A, B, ADD, ...)                                             \
  asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, " ADD                              \
               ", 0;\n\twgmma.mma_async.sync.aligned.m64n" ROWS "k16.f32.bf16.bf16 {" NAMES \
               "}, {" A "}, " B ", add, 1, 1, 0;\n\t}"                                      \
               : __VA_ARGS__                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(fresh ? 0 : 1))

__device__ __forceinline__ void multiply(float (&d)[8], const uint32_t* a, uint64_t b, bool fresh) {
  FW_BF16_RS("16", FW_NAMES_8, "%8, %9, %10, %11", "%12", "%13", FW_8(d, 0));
}

__device__ __forceinline__ void multiply(float (&d)[32], const uint32_t* a, uint64_t b,
                                         bool fresh) {
  FW_BF16_RS("64", FW_NAMES_32, "%32, %33, %34, %35", "%36", "%37", FW_32(d, 0));
}

__device__ __forceinline__ void multiply(float (&d)[64], const uint32_t* a, uint64_t b,
                                         bool fresh) {
  FW_BF16_RS("128", FW_NAMES_64, "%64, %65, %66, %67", "%68", "%69", FW_32(d, 0), FW_32(d, 32));
}

__device__ __forceinline__ void multiply(float (&d)[128], const uint32_t* a, uint64_t b,
                                         bool fresh) {
  FW_BF16_RS("256", FW_NAMES_128, "%128, %129, %130, %131", "%132", "%133", FW_32(d, 0),
             FW_32(d, 32), FW_32(d, 64), FW_32(d, 96));
}

template <typename M>
__device__ __forceinline__ void multiply_add(float (&d)[64], const uint32_t* a, uint64_t b);

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&d)[64], const uint32_t* a,
                                                            uint64_t b) {
  FW_FROM_REGISTERS("bf16");
}

template <>
__device__ __forceinline__ void multiply_add<__half>(float (&d)[64], const uint32_t* a,
                                                     uint64_t b) {
  FW_FROM_REGISTERS("f16");
}

// The same for 64 rows of b; and for 64 or 256 columns of b.
#define FW_FROM_SHARED_64(TYPE)                                                    \
  asm volatile(                                                                    \
      "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %34, 0;\n\t"                       \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" FW_NAMES_32 \
      "}, %32, %33, add, 1, 1, 0, 0;\n\t}"                                         \
      : FW_32(d, 0)                                                                \
      : "l"(a), "l"(b), "r"(fresh ? 0 : 1))
#define FW_FROM_REGISTERS_64(TYPE)                                                          \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" FW_NAMES_32 \
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"                                  \
               : FW_32(d, 0)                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define FW_FROM_REGISTERS_256(TYPE)                                                           \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" FW_NAMES_128 \
               "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"                               \
               : FW_32(d, 0), FW_32(d, 32), FW_32(d, 64), FW_32(d, 96)                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <typename M>
__device__ __forceinline__ void multiply(float (&d)[32], uint64_t a, uint64_t b, bool fresh) {
  if constexpr (std::is_same_v<M, __half>) {
    FW_FROM_SHARED_64("f16");
  } else {
    FW_FROM_SHARED_64("bf16");
  }
}

template <typename M>
__device__ __forceinline__ void multiply_add(float (&d)[32], const uint32_t* a, uint64_t b) {
  if constexpr (std::is_same_v<M, __half>) {
    FW_FROM_REGISTERS_64("f16");
  } else {
    FW_FROM_REGISTERS_64("bf16");
  }
}

template <typename M>
__device__ __forceinline__ void multiply_add(float (&d)[128], const uint32_t* a, uint64_t b) {
  if constexpr (std::is_same_v<M, __half>) {
    FW_FROM_REGISTERS_256("f16");
  } else {
    FW_FROM_REGISTERS_256("bf16");
  }
}

#undef FW_FROM_SHARED_64
#undef FW_FROM_REGISTERS_64
#undef FW_FROM_REGISTERS_256

// Stores four 8 x 8 matrices of 16-bit elements to shared memory. Lane i gives the address of row
// i % 8 of matrix i / 8. A word holds two neighbouring elements, as an MMA leaves them.
__device__ __forceinline__ void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Transposes four words over the four threads of a quad. As an MMA leaves them, each thread has two
// neighbouring elements of every eight; then it has eight of every thirty-two.
__device__ __forceinline__ void transpose_quad(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d,
                                               int quad) {
  const bool odd = quad & 1, upper = quad & 2;
  uint32_t s = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1);
  (odd ? a : b) = s;
  s = __shfl_xor_sync(0xffffffffu, odd ? c : d, 1);
  (odd ? c : d) = s;
  s = __shfl_xor_sync(0xffffffffu, upper ? a : c, 2);
  (upper ? a : c) = s;
  s = __shfl_xor_sync(0xffffffffu, upper ? b : d, 2);
  (upper ? b : d) = s;
}

#undef FW_BF16_RS
#undef FW_BF16
#undef FW_FROM_SHARED
#undef FW_FROM_REGISTERS
#undef FW_NAMES_128
#undef FW_NAMES_64
#undef FW_NAMES_32
#undef FW_NAMES_16
#undef FW_NAMES_8
#undef FW_32
#undef FW_8

}  // namespace fusewright
