// Every emulated source is compiled behind this: CUDA's words for a kernel, as C++ for the emulated
// machine. Inline PTX is not here: derive.py has a call for each instruction.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "machine.h"
#include "shared.h"
#include "warp.h"

#undef __forceinline__
#define __forceinline__ inline
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __global__
#define __global__
#undef __grid_constant__
#define __grid_constant__

#define cudaLaunchKernelEx emulator::launch

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

#define threadIdx (uint3{static_cast<unsigned>(emulator::machine.thread->index), 0, 0})
#define blockIdx (emulator::machine.block().index)

// ---- a warp

inline void __syncwarp(unsigned mask = ~0u) { emulator::sync_warp(mask); }

#define FW_SHUFFLE(NAME, FROM)                                 \
  template <typename Value>                                    \
  inline Value NAME(unsigned mask, Value value, int operand) { \
    const int lane = emulator::machine.thread->lane();         \
    return emulator::exchange(#NAME, mask, value, FROM);       \
  }
FW_SHUFFLE(__shfl_sync, operand % emulator::kWarpLanes)
FW_SHUFFLE(__shfl_xor_sync, lane ^ operand)
FW_SHUFFLE(__shfl_up_sync, lane - operand)
FW_SHUFFLE(__shfl_down_sync, lane + operand)
#undef FW_SHUFFLE

inline unsigned __ballot_sync(unsigned mask, bool vote) {
  const emulator::Words votes = emulator::meet("__ballot_sync", mask, {uint32_t{vote}});
  unsigned result = 0;
  for (int lane = 0; lane < emulator::kWarpLanes; ++lane) {
    if (mask >> lane & 1) result |= votes[lane][0] << lane;
  }
  return result;
}

inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }

template <typename Value, typename Combine>
inline Value emulator_reduce(const char* name, unsigned mask, Value value, const Combine& combine) {
  static_assert(sizeof(Value) == 4);
  const emulator::Words words = emulator::meet(name, mask, {static_cast<uint32_t>(value)});
  Value result = value;
  for (int lane = 0; lane < emulator::kWarpLanes; ++lane) {
    const bool other = lane != emulator::machine.thread->lane();
    if (other && (mask >> lane & 1)) result = combine(result, static_cast<Value>(words[lane][0]));
  }
  return result;
}

template <typename Value>  // int or unsigned
inline Value __reduce_max_sync(unsigned mask, Value value) {
  return emulator_reduce("__reduce_max_sync", mask, value,
                         [](Value a, Value b) { return a < b ? b : a; });
}

template <typename Value>
inline Value __reduce_add_sync(unsigned mask, Value value) {
  return emulator_reduce("__reduce_add_sync", mask, value, [](Value a, Value b) { return a + b; });
}

// ---- a block, and memory that blocks share

inline void __syncthreads() { emulator::sync_named(0, emulator::machine.block_threads); }

inline bool __syncthreads_or(bool vote) {
  return emulator::sync_named(0, emulator::machine.block_threads, vote);
}

// Stores that go to L2 are seen by other blocks after a fence, and not before.
template <typename Value>
inline void __stcg(Value* to, std::type_identity_t<Value> value) {
  if (emulator::settings.timing == emulator::Timing::kEarly) {
    *to = value;
  } else {
    emulator::machine.thread->stores.push_back([=] { *to = value; });
  }
}

inline void __threadfence() { emulator::machine.thread->flush_stores(); }

template <typename Value>
inline Value __ldcg(const Value* from) {
  return *from;
}

// CUDA's own for these is an asm that is not volatile: nvcc takes it out of the condition that it
// stands behind, so it may read where there is nothing.
template <typename Value>
constexpr bool kReadAhead = std::is_same_v<Value, __nv_bfloat16> || std::is_same_v<Value, __half>;

template <typename Value>
inline Value __ldg(const Value* from) {
  static_assert(!kReadAhead<Value>, "read its bits");
  return *from;
}

FW_INLINED unsigned atomicInc(unsigned* at, unsigned most) {
  return emulator::atomically(at, [&] {
    const unsigned before = *at;
    return std::exchange(*at, before >= most ? 0 : before + 1);
  });
}

template <typename Value>
FW_INLINED Value atomicAdd(Value* at, std::type_identity_t<Value> addend) {
  return emulator::atomically(at, [&] { return std::exchange(*at, *at + addend); });
}

#define cudaGridDependencySynchronize emulator::wait_for_previous

inline size_t __cvta_generic_to_shared(const void* pointer) { return emulator::offset_of(pointer); }

// ---- numbers

inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __ffs(unsigned bits) { return bits ? std::countr_zero(bits) + 1 : 0; }
inline int __clz(unsigned bits) { return std::countl_zero(bits); }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selectors) {
  return emulator::permute_bytes(low, high, selectors & 0x7777);
}
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __vcmpeq2(unsigned a, unsigned b) {
  const unsigned differ = a ^ b;
  return (differ & 0xffffu ? 0 : 0xffffu) | (differ >> 16 ? 0 : 0xffff0000u);
}
template <typename Choose>
inline unsigned emulator_each_half(unsigned a, unsigned b, const Choose& choose) {
  return choose(a & 0xffffu, b & 0xffffu) | choose(a >> 16, b >> 16) << 16;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return emulator_each_half(a, b, [](unsigned x, unsigned y) { return x < y ? y : x; });
}
inline unsigned __vminu2(unsigned a, unsigned b) {
  return emulator_each_half(a, b, [](unsigned x, unsigned y) { return x < y ? x : y; });
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
// Downwards, of numbers whose sum a double holds.
inline float __fadd_rd(float a, float b) {
  const double sum = static_cast<double>(a) + b;
  const float nearest = static_cast<float>(sum);
  return nearest > sum ? std::nextafter(nearest, -INFINITY) : nearest;
}
inline float emulator_rsqrt(float value) { return 1.0f / std::sqrt(value); }
#define rsqrtf emulator_rsqrt
inline float emulator_log2(float value) { return std::log2(value); }
#define __log2f emulator_log2

#define FW_MIN_MAX(LEFT, RIGHT, RESULT)                                 \
  inline RESULT min(LEFT a, RIGHT b) { return std::min<RESULT>(a, b); } \
  inline RESULT max(LEFT a, RIGHT b) { return std::max<RESULT>(a, b); }
FW_MIN_MAX(int, int, int)
FW_MIN_MAX(unsigned, unsigned, unsigned)
FW_MIN_MAX(unsigned, int, unsigned)
FW_MIN_MAX(int64_t, int64_t, int64_t)
FW_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
FW_MIN_MAX(float, float, float)
#undef FW_MIN_MAX
