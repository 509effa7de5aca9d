// A warpgroup's matrix multiplication of 64 rows by as many as a tile of many rows has: the widths
// that common/wgmma.cuh lacks, of bfloat16 and of FP8. sm_90a.
#pragma once

#include "../common/wgmma.cuh"

namespace fusewright::gemm {

// clang-format off
#define FW_8(d, i)                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FW_16(d, i) FW_8(d, i), FW_8(d, i + 8)
#define FW_32(d, i) FW_16(d, i), FW_16(d, i + 16)
#define FW_48(d, i) FW_32(d, i), FW_16(d, i + 32)
#define FW_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FW_NAMES_16 FW_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FW_NAMES_32                                                                           \
  FW_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FW_NAMES_48                                                                           \
  FW_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FW_NAMES_56 FW_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FW_NAMES_96                                                                           \
  FW_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, "   \
  "%71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, "  \
  "%89, %90, %91, %92, %93, %94, %95"
#define FW_NAMES_112                                                                          \
  FW_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, "    \
  "%109, %110, %111"

// d = a b^T, + d unless `fresh`; a: 64 rows, b: twice as many as d has numbers, of 32 bytes each.
#define FW_MULTIPLY(FUNCTION, KIND, MAJORS, COUNT, ROWS, NAMES, A, B, ADD, ...)               \
  __device__ __forceinline__ void FUNCTION(float (&d)[COUNT], uint64_t a, uint64_t b,         \
                                           bool fresh) {                                      \
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, " ADD                              \
                 ", 0;\n\twgmma.mma_async.sync.aligned.m64n" ROWS KIND " {" NAMES "}, " A     \
                 ", " B ", add, 1, 1" MAJORS ";\n\t}"                                         \
                 : __VA_ARGS__                                                                \
                 : "l"(a), "l"(b), "r"(fresh ? 0 : 1));                                       \
  }
#define FW_BF16(...) FW_MULTIPLY(multiply_wide, "k16.f32.bf16.bf16", ", 0, 0", __VA_ARGS__)
#define FW_FP8(...) FW_MULTIPLY(multiply_fp8, "k32.f32.e4m3.e4m3", "", __VA_ARGS__)
// clang-format on

FW_BF16(48, "96", FW_NAMES_48, "%48", "%49", "%50", FW_48(d, 0))
FW_BF16(56, "112", FW_NAMES_56, "%56", "%57", "%58", FW_48(d, 0), FW_8(d, 48))
FW_BF16(96, "192", FW_NAMES_96, "%96", "%97", "%98", FW_48(d, 0), FW_48(d, 48))
FW_BF16(112, "224", FW_NAMES_112, "%112", "%113", "%114", FW_48(d, 0), FW_48(d, 48), FW_16(d, 96))

FW_FP8(8, "16", FW_NAMES_8, "%8", "%9", "%10", FW_8(d, 0))
FW_FP8(16, "32", FW_NAMES_16, "%16", "%17", "%18", FW_16(d, 0))
FW_FP8(32, "64", FW_NAMES_32, "%32", "%33", "%34", FW_32(d, 0))
FW_FP8(48, "96", FW_NAMES_48, "%48", "%49", "%50", FW_48(d, 0))
FW_FP8(56, "112", FW_NAMES_56, "%56", "%57", "%58", FW_48(d, 0), FW_8(d, 48))

__device__ __forceinline__ void multiply_wide(float (&d)[32], uint64_t a, uint64_t b, bool fresh) {
  multiply(d, a, b, fresh);
}

__device__ __forceinline__ void multiply_wide(float (&d)[64], uint64_t a, uint64_t b, bool fresh) {
  multiply<__nv_bfloat16>(d, a, b, fresh);
}

__device__ __forceinline__ void multiply_wide(float (&d)[128], uint64_t a, uint64_t b, bool fresh) {
  multiply(d, a, b, fresh);
}

__device__ __forceinline__ void multiply_fp8(float (&d)[64], uint64_t a, uint64_t b, bool fresh) {
  multiply<__nv_fp8_e4m3>(d, a, b, fresh);
}

#undef FW_FP8
#undef FW_BF16
#undef FW_MULTIPLY
#undef FW_NAMES_112
#undef FW_NAMES_96
#undef FW_NAMES_56
#undef FW_NAMES_48
#undef FW_NAMES_32
#undef FW_NAMES_16
#undef FW_NAMES_8
#undef FW_48
#undef FW_32
#undef FW_16
#undef FW_8

}  // namespace fusewright::gemm
