// The sum over ranks, fused with what follows it: residual add, RMSNorm, quantization to FP8. A
// block takes whole rows, pushes all of its own, then sums what has come, row by row. Sums are in
// float32 and in the order of the ranks, so that all ranks have the same bits, whatever came first.
//
// With one shot a row goes to all ranks, and each of them sums it: one trip, kWorld - 1 rows sent
// for each row. With two it goes to its owner alone, who sums it and sends the sum to the others:
// two trips, and on average 2 (kWorld - 1) / kWorld rows sent. Both give the same bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../common/device.cuh"
#include "../common/numbers.cuh"
#include "push.cuh"

namespace fusewright::collective {

constexpr int kMaxThreads = 1024;
constexpr int kWarpSize = 32;
constexpr int kRowsAhead = 4;

__device__ __forceinline__ float2 unpack(unsigned pair, __nv_bfloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

__device__ __forceinline__ float2 unpack(unsigned pair, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// The eight elements of a packet.
struct Values {
  float2 pair[4];

  template <typename T>
  __device__ static Values of(uint4 packet) {
    return {unpack(packet.x, T{}), unpack(packet.y, T{}), unpack(packet.z, T{}),
            unpack(packet.w, T{})};
  }

  template <typename T>
  __device__ uint4 packet(T) const {
    return {pack<T>(pair[0].x, pair[0].y), pack<T>(pair[1].x, pair[1].y),
            pack<T>(pair[2].x, pair[2].y), pack<T>(pair[3].x, pair[3].y)};
  }

  __device__ void add(const Values& other) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pair[i].x += other.pair[i].x;
      pair[i].y += other.pair[i].y;
    }
  }

  __device__ void multiply(float by) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pair[i].x *= by;
      pair[i].y *= by;
    }
  }

  __device__ void multiply(const Values& other) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pair[i].x *= other.pair[i].x;
      pair[i].y *= other.pair[i].y;
    }
  }

  // Rounds every element to T and back.
  template <typename T>
  __device__ void round(T t) {
    *this = of<T>(packet(t));
  }

  __device__ float sum_of_squares() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += pair[i].x * pair[i].x + pair[i].y * pair[i].y;
    return sum;
  }

  // The bits of the largest magnitude: as integers magnitudes have the same order, and a NaN is
  // above all.
  __device__ unsigned largest_bits() const {
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      largest = max(largest, __float_as_uint(pair[i].x) & 0x7fffffffu);
      largest = max(largest, __float_as_uint(pair[i].y) & 0x7fffffffu);
    }
    return largest;
  }

  __device__ uint2 fp8() const {
    unsigned half[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      half[i] = __nv_cvt_float2_to_fp8x2(pair[i], __NV_SATFINITE, __NV_E4M3);
    }
    return {half[0] | half[1] << 16, half[2] | half[3] << 16};
  }
};

// Reduces over the threads of a block, in an order that the number of threads alone determines.
// `shared` must not be that of the reduction before.
template <typename V, typename Reduce>
__device__ V reduce_block(V value, V (&shared)[kWarpSize], const Reduce& reduce) {
#pragma unroll
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
    value = reduce(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  }
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  value = lane < warps ? shared[lane] : V{};
#pragma unroll
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
    value = reduce(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  }
  return value;
}

__device__ __forceinline__ float scale_of(unsigned largest_bits) {
  constexpr float kLeast = 5.421010862427522e-20f;  // 2^-64: the scale of zeros has an inverse
  const float largest = __uint_as_float(largest_bits);
  return (largest < kLeast ? kLeast : largest) * (1.0f / 448.0f);
}

// Stores the norm of one row, of which this thread has kPackets packets. A plain norm has neither
// an offset nor FP8 values, so the kernel need not ask for them.
template <typename T, int kPackets, bool kPlain = false>
__device__ void store_norm(const SumArgs& a, int row, int turn, Values (&v)[kPackets],
                           const uint4 (&weight)[kPackets]) {
  const bool has_offset = !kPlain && a.has_offset;
  const Quantize quantize = kPlain ? Quantize::kNone : a.quantize;
  __shared__ float sums[2][kWarpSize];
  __shared__ unsigned magnitudes[2][kWarpSize];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPackets; ++i) squares += v[i].sum_of_squares();
  squares = reduce_block(squares, sums[turn], [](float p, float q) { return p + q; });
  const float scale = rsqrtf(squares / static_cast<float>(a.row_packets * kPacketElements) + a.eps);
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    Values w = Values::of<T>(weight[i]);
    v[i].multiply(scale);
    if (has_offset) {
      const float2 offset = {a.weight_offset, a.weight_offset};
      w.add({offset, offset, offset, offset});
    } else {
      v[i].round(T{});
    }
    v[i].multiply(w);
    v[i].round(T{});
    largest = max(largest, v[i].largest_bits());
  }
  float inverse = 1.0f;
  if (quantize == Quantize::kStatic) inverse = __frcp_rn(*a.scale);
  if (quantize == Quantize::kToken) {
    largest =
        reduce_block(largest, magnitudes[turn], [](unsigned p, unsigned q) { return max(p, q); });
    const float found = scale_of(largest);
    if (threadIdx.x == 0) a.scales[row] = found;
    inverse = __frcp_rn(found);
  }
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const int packet = threadIdx.x + i * blockDim.x;
    if (quantize == Quantize::kGroup) {
      constexpr int kThreads = kScaleGroup / kPacketElements;
      unsigned group = v[i].largest_bits();
#pragma unroll
      for (int lanes = kThreads / 2; lanes > 0; lanes /= 2) {
        group = max(group, __shfl_xor_sync(0xffffffffu, group, lanes));
      }
      const float found = scale_of(group);
      if (packet % kThreads == 0 && packet < a.row_packets) {
        a.scales[static_cast<int64_t>(packet / kThreads) * a.rows + row] = found;
      }
      inverse = __frcp_rn(found);
    }
    if (packet >= a.row_packets) continue;
    const int64_t at = static_cast<int64_t>(row) * a.row_packets + packet;
    if (quantize == Quantize::kNone) {
      static_cast<uint4*>(a.y)[at] = v[i].packet(T{});
    } else {
      v[i].multiply(inverse);
      static_cast<uint2*>(a.y)[at] = v[i].fp8();
    }
  }
}

// The norm's weight, of which this thread has kPackets packets.
template <int kPackets>
__device__ __forceinline__ void load_weight(const SumArgs& a, uint4 (&weight)[kPackets]) {
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const int packet = threadIdx.x + i * blockDim.x;
    weight[i] = packet < a.row_packets ? static_cast<const uint4*>(a.weight)[packet] : uint4{};
  }
}

// The sum of what the ranks have in one packet, rounded.
template <typename T, int kWorld>
__device__ __forceinline__ Values sum_of(const uint4 (&found)[kWorld]) {
  Values v = Values::of<T>(found[0]);
#pragma unroll
  for (int source = 1; source < kWorld; ++source) v.add(Values::of<T>(found[source]));
  v.round(T{});
  return v;
}

template <typename T, int kWorld, int kPackets, bool kNorm, bool kTwoShots>
__global__ void __launch_bounds__(kMaxThreads) sum_kernel(const __grid_constant__ SumArgs a) {
  uint4 weight[kPackets];
  if constexpr (kNorm) load_weight(a, weight);
  start_next();
  wait_for_previous();
  const Exchange<kWorld> exchange(a.peers, epoch_of(a.peers));
  const auto x_at = [&](int row, int packet) {
    const T* const x = static_cast<const T*>(a.x) + row * a.x_row_stride;
    return sendable(reinterpret_cast<const uint4*>(x)[packet]);
  };
  const auto is_there = [&](int64_t first, int packet) {
    return packet < a.row_packets && first + packet < a.num_packets;
  };
  // The ranks take turns in a block's rows as well as in those of neighbouring blocks.
  const auto owner_of = [&](int row) {
    return kTwoShots ? static_cast<int>((row + row / gridDim.x) % kWorld) : a.peers.rank;
  };
  const auto push = [&](int row) {
    const int64_t first = static_cast<int64_t>(row) * a.row_packets;
    const int owner = owner_of(row);
    if (kTwoShots && owner == a.peers.rank) return;
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const int packet = threadIdx.x + i * blockDim.x;
      if (!is_there(first, packet)) continue;
      if constexpr (kTwoShots) {
        exchange.push_to(owner, first + packet, x_at(row, packet));
      } else {
        exchange.push(first + packet, x_at(row, packet));
      }
    }
  };
  // So many rows are on their way before the first is waited for: enough for the wire, and few
  // enough that they are summed while the cache still holds them.
  const int ahead = kRowsAhead * gridDim.x;
  for (int row = blockIdx.x; row < min(ahead, a.rows); row += gridDim.x) push(row);
  exchange.count_block();
  int turn = 0;
  for (int row = blockIdx.x; row < a.rows; row += gridDim.x) {
    if (row + ahead < a.rows) push(row + ahead);
    const int64_t first = static_cast<int64_t>(row) * a.row_packets;
    const int owner = owner_of(row);
    Values v[kPackets] = {};
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const int packet = threadIdx.x + i * blockDim.x;
      if (!is_there(first, packet)) continue;
      uint4 added = {};
      if (kNorm && a.residual) added = static_cast<const uint4*>(a.residual)[first + packet];
      if (kTwoShots && owner != a.peers.rank) {
        v[i] = Values::of<T>(exchange.pull_from(owner, first + packet));
      } else {
        uint4 found[kWorld];
        exchange.pull(first + packet, x_at(row, packet), found);
        v[i] = sum_of<T>(found);
        if constexpr (kTwoShots) {
          const uint4 sum = sendable(v[i].packet(T{}));
          exchange.push(first + packet, sum);
          v[i] = Values::of<T>(sum);
        }
      }
      if (kNorm && a.residual) {
        v[i].add(Values::of<T>(added));
        v[i].round(T{});
      }
      static_cast<uint4*>(a.total)[first + packet] = v[i].packet(T{});
    }
    if constexpr (kNorm) store_norm<T, kPackets>(a, row, turn, v, weight);
    turn ^= 1;
  }
}

// The kernel of a decode step, which gives the same bits: a block has one row and a thread one
// packet of it, by one shot, with a residual and a plain norm. When its peers' packets arrive, a
// thread has all else that it needs in registers.
template <typename T, int kWorld>
__global__ void __launch_bounds__(kMaxThreads) sum_row_kernel(const __grid_constant__ SumArgs a) {
  const uint4 weight[1] = {static_cast<const uint4*>(a.weight)[threadIdx.x]};
  start_next();
  wait_for_previous();
  const Exchange<kWorld> exchange(a.peers, epoch_of(a.peers));
  const int row = blockIdx.x;
  const int64_t at = static_cast<int64_t>(row) * a.row_packets + threadIdx.x;
  const T* const x = static_cast<const T*>(a.x) + row * a.x_row_stride;
  const uint4 own = sendable(reinterpret_cast<const uint4*>(x)[threadIdx.x]);
  exchange.push(at, own);
  const uint4 added = static_cast<const uint4*>(a.residual)[at];
  exchange.count_block();
  uint4 found[kWorld];
  exchange.pull(at, own, found);
  Values v[1] = {sum_of<T>(found)};
  v[0].add(Values::of<T>(added));
  v[0].round(T{});
  static_cast<uint4*>(a.total)[at] = v[0].packet(T{});
  store_norm<T, 1, true>(a, row, 0, v, weight);
}

// Sums parts that lie side by side in this rank's memory, then adds and normalizes likewise.
template <typename T, int kWorld, int kPackets>
__global__ void __launch_bounds__(kMaxThreads) sum_parts_kernel(const __grid_constant__ SumArgs a) {
  uint4 weight[kPackets];
  load_weight(a, weight);
  start_next();
  wait_for_previous();
  const uint4* const parts = static_cast<const uint4*>(a.x);
  const int64_t stride = a.x_row_stride / kPacketElements;
  int turn = 0;
  for (int row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t first = static_cast<int64_t>(row) * a.row_packets;
    Values v[kPackets] = {};
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const int packet = threadIdx.x + i * blockDim.x;
      if (packet >= a.row_packets) continue;
      const int64_t at = first + packet;
      uint4 found[kWorld];
#pragma unroll
      for (int source = 0; source < kWorld; ++source) {
        found[source] = sendable(parts[source * stride + at]);
      }
      const uint4 added = static_cast<const uint4*>(a.residual)[at];
      v[i] = sum_of<T>(found);
      v[i].add(Values::of<T>(added));
      v[i].round(T{});
      const uint4 total = v[i].packet(T{});
      static_cast<uint4*>(a.total)[at] = total;
      static_cast<uint4*>(a.total_copy)[at] = total;
    }
    store_norm<T, kPackets>(a, row, turn, v, weight);
    turn ^= 1;
  }
}

}  // namespace fusewright::collective
