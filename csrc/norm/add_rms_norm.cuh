// Fused residual add and RMSNorm (Zhang and Sennrich, 2019), one row a block.
//
//   residual_out = round(x + residual)
//   y            = round(round(residual_out * rsqrt(mean(residual_out^2) + eps)) * weight)
//
// with every round() to T and everything between in float, so that rows equal the unfused sequence.
// Limit: memory. A call moves (4 * num_tokens + 1) * hidden * sizeof(T) bytes: x and residual in,
// y and residual_out out, the weight once from HBM and then from L2. A row stays in registers
// between the sum of squares and the scaling, so nothing is read twice.
//
// Free of any framework: pointers, strides and a stream.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace fusewright::norm {

constexpr int kMaxHidden = 16384;
constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;

// The widest block a row of kMaxHidden elements asks for; tighter than 1024, it spares registers.
template <int kVec, int kPacksPerThread>
constexpr int kMaxThreads = kPacksPerThread <= 2 ? 512 : kMaxHidden / (kVec * kPacksPerThread);

template <typename T>
struct AddRmsNormArgs {
  const T* x;         // [num_tokens, hidden], rows x_row_stride apart
  const T* residual;  // [num_tokens, hidden], rows residual_row_stride apart
  const T* weight;    // [hidden]
  T* y;               // [num_tokens, hidden], contiguous
  T* residual_out;    // [num_tokens, hidden], contiguous
  int64_t num_tokens;
  int hidden;
  int64_t x_row_stride;  // elements
  int64_t residual_row_stride;
  float eps;
};

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// What one thread moves in one access: 16 bytes, or one element where alignment forbids more.
template <typename T, int kVec>
struct alignas(sizeof(T) * kVec) Pack {
  T v[kVec];
};

// Sum over the block, returned to every thread. One barrier: each warp reduces the warp sums again.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float warp_sums[kMaxWarps];
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  const int num_warps = blockDim.x / kWarpSize;
  if (num_warps == 1) return value;
  const int lane = threadIdx.x % kWarpSize;
  if (lane == 0) warp_sums[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  value = lane < num_warps ? warp_sums[lane] : 0.0f;
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

template <typename T, int kVec, int kPacksPerThread>
__global__ void __launch_bounds__((kMaxThreads<kVec, kPacksPerThread>))
    add_rms_norm_kernel(AddRmsNormArgs<T> args) {
  using P = Pack<T, kVec>;
  const int num_packs = args.hidden / kVec;
  const int64_t row = blockIdx.x;
  const P* x = reinterpret_cast<const P*>(args.x + row * args.x_row_stride);
  const P* residual = reinterpret_cast<const P*>(args.residual + row * args.residual_row_stride);
  const P* weight = reinterpret_cast<const P*>(args.weight);
  P* y = reinterpret_cast<P*>(args.y + row * args.hidden);
  P* residual_out = reinterpret_cast<P*>(args.residual_out + row * args.hidden);

  // All loads first, the weight's included: they fly together and hide the reduction's latency.
  P sum[kPacksPerThread], addend[kPacksPerThread], scale[kPacksPerThread];
#pragma unroll
  for (int i = 0; i < kPacksPerThread; ++i) {
    const int pack = threadIdx.x + i * blockDim.x;
    if (pack >= num_packs) continue;
    sum[i] = x[pack];
    addend[i] = residual[pack];
    scale[i] = weight[pack];
  }

  float sum_of_squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPacksPerThread; ++i) {
    const int pack = threadIdx.x + i * blockDim.x;
    if (pack >= num_packs) continue;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      sum[i].v[j] = from_float<T>(to_float(sum[i].v[j]) + to_float(addend[i].v[j]));
      const float rounded = to_float(sum[i].v[j]);
      sum_of_squares += rounded * rounded;
    }
    residual_out[pack] = sum[i];
  }

  const float inv_rms = rsqrtf(block_sum(sum_of_squares) / args.hidden + args.eps);
#pragma unroll
  for (int i = 0; i < kPacksPerThread; ++i) {
    const int pack = threadIdx.x + i * blockDim.x;
    if (pack >= num_packs) continue;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const T normed = from_float<T>(to_float(sum[i].v[j]) * inv_rms);
      sum[i].v[j] = from_float<T>(to_float(normed) * to_float(scale[i].v[j]));
    }
    y[pack] = sum[i];
  }
}

template <typename T, int kVec, int kPacksPerThread>
cudaError_t launch(const AddRmsNormArgs<T>& args, cudaStream_t stream) {
  const int num_packs = args.hidden / kVec;
  const int lanes = (num_packs + kPacksPerThread - 1) / kPacksPerThread;
  const int num_threads = (lanes + kWarpSize - 1) / kWarpSize * kWarpSize;
  const auto num_blocks = static_cast<unsigned>(args.num_tokens);
  add_rms_norm_kernel<T, kVec, kPacksPerThread><<<num_blocks, num_threads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <typename T>
bool allows_16_byte_accesses(const AddRmsNormArgs<T>& args) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  constexpr int kVec = 16 / sizeof(T);
  return args.hidden % kVec == 0 && args.x_row_stride % kVec == 0 &&
         args.residual_row_stride % kVec == 0 && aligned(args.x) && aligned(args.residual) &&
         aligned(args.weight) && aligned(args.y) && aligned(args.residual_out);
}

// Requires 1 <= hidden <= kMaxHidden, 1 <= num_tokens < 2^31 and a last dimension without gaps.
template <typename T>
cudaError_t launch_add_rms_norm(const AddRmsNormArgs<T>& args, cudaStream_t stream) {
  if (!allows_16_byte_accesses(args)) return launch<T, 1, 16>(args, stream);
  constexpr int kVec = 16 / sizeof(T);
  // Blocks of 512 threads or fewer where the row allows: four rows then share a multiprocessor.
  const int num_packs = args.hidden / kVec;
  if (num_packs <= 512) return launch<T, kVec, 1>(args, stream);
  if (num_packs <= 1024) return launch<T, kVec, 2>(args, stream);
  return launch<T, kVec, 4>(args, stream);
}

}  // namespace fusewright::norm
