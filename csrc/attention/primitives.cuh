// The instructions that decode attention is made of: copies, matrix fragments, conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../common/device.cuh"
#include "../common/mma.cuh"
#include "../common/numbers.cuh"

namespace fusewright::attention {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct Fragment {
  uint32_t x, y, z, w;
};

// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ Fragment load_matrices(uint32_t address) {
  Fragment f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.x), "=r"(f.y), "=r"(f.z), "=r"(f.w)
               : "r"(address)
               : "memory");
  return f;
}

__device__ __forceinline__ Fragment load_matrices_transposed(uint32_t address) {
  Fragment f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.x), "=r"(f.y), "=r"(f.z), "=r"(f.w)
               : "r"(address)
               : "memory");
  return f;
}

__device__ __forceinline__ uint32_t transpose(uint32_t a) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

template <typename M>
__device__ __forceinline__ void mma(float (&d)[4], const Fragment& a, uint32_t b0, uint32_t b1) {
  fusewright::mma<M>(d, a.x, a.y, a.z, a.w, b0, b1);
}

// The two e4m3 numbers in the low half of v, exactly, as two of fp16.
__device__ __forceinline__ uint32_t half2_of_e4m3(uint32_t v) {
  uint32_t d;
  asm("{\n\t"
      ".reg .b16 low, high;\n\t"
      "mov.b32 {low, high}, %1;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n\t"
      "}"
      : "=r"(d)
      : "r"(v));
  return d;
}

// A head's sink, its logit that has no value, in units of log2. `wide`: they are float32, else of
// q's type, and read as bits: CUDA's __ldg of a bfloat16 or half is not volatile, and nvcc takes it
// out of loops, ahead of the condition that there are sinks.
template <typename Q>
__device__ __forceinline__ float sink_of(const void* sinks, bool wide, int head) {
  if (wide) return __ldg(static_cast<const float*>(sinks) + head) * kLog2E;
  const unsigned short bits = __ldg(static_cast<const unsigned short*>(sinks) + head);
  Q sink;
  memcpy(&sink, &bits, sizeof sink);
  return static_cast<float>(sink) * kLog2E;
}

// The absolute error, 2e-7, is what counts in a logit.
__device__ __forceinline__ float tanh_of(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(x * 2.885390082f));
}

__device__ __forceinline__ void store_rounded(__nv_bfloat16* to, float v) {
  *to = __float2bfloat16_rn(v);
}
__device__ __forceinline__ void store_rounded(__half* to, float v) { *to = __float2half_rn(v); }
__device__ __forceinline__ void store_rounded(__nv_fp8_e4m3* to, float v) {
  to->__x = __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
}

// A barrier in shared memory that is over when `bytes` have been stored by store_to_rank; by one
// thread, before the blocks of the cluster meet.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n\t"
      "fence.mbarrier_init.release.cluster;\n\t"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}

// To this block's shared address, but in the block of that rank of the cluster, and 16 bytes off
// its barrier.
__device__ __forceinline__ void store_to_rank(uint32_t address, uint32_t barrier, int rank,
                                              float4 v) {
  asm volatile(
      "{\n\t"
      ".reg .b32 to, counted;\n\t"
      "mapa.shared::cluster.u32 to, %0, %2;\n\t"
      "mapa.shared::cluster.u32 counted, %1, %2;\n\t"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, "
      "[counted];\n\t"
      "}" ::"r"(address),
      "r"(barrier), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint2 v) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ uint2 load_shared_pair(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

}  // namespace fusewright::attention
