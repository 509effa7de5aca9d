// The tiles of the kernels that stream experts' weights, and how a warp multiplies a line of one.
#pragma once

#include "../gemm/skinny_linear.cuh"
#include "moe.h"

namespace fusewright::moe {

using gemm::kWarpSize;
constexpr unsigned kAllLanes = 0xffffffffu;

// Formats of the experts' weights; x is bfloat16.
struct Bf16 {
  using Weight = gemm::Bf16;
  static constexpr bool kRowScales = false, kBlockScales = false;
};
struct Fp8Rows {
  using Weight = gemm::Fp8;
  static constexpr bool kRowScales = true, kBlockScales = false;
};
struct Fp8Blocks {
  using Weight = gemm::Fp8;
  static constexpr bool kRowScales = false, kBlockScales = true;
};

// kRows rows of an expert's weight, 8 or 16, and up to kXRows tokens, through a ring of kStages
// stages, each of kLines lines of 128 bytes of every row. Of x a stage has the same columns. Each
// line of a stage has its warp: FP8 takes many instructions a line, and bfloat16 gains too.
template <typename Operands_, int kRows_, int kXRows_, int kLines_, int kStages_>
struct Tile {
  using Operands = Operands_;
  static constexpr int kWeightBytes = Operands::Weight::kBytes;
  static constexpr int kRows = kRows_, kXRows = kXRows_, kStages = kStages_;
  static constexpr int kLines = kLines_, kXLines = kLines * 2 / kWeightBytes;
  static constexpr int kRowBytes = kLines * gemm::kLineBytes;
  static constexpr int kXRowBytes = kXLines * gemm::kLineBytes;
  // The swizzle's pattern repeats every 1024 bytes.
  static constexpr int kStageBytes = (kRows * kRowBytes + kXRows * kXRowBytes + 1023) / 1024 * 1024;
  // A stage's scales: its rows', or for each eight rows those of its lines.
  static constexpr int kEightsScales = Operands::kRowScales     ? 8
                                       : Operands::kBlockScales ? kLines
                                                                : 0;
  static constexpr int kScales = kRows / 8 * kEightsScales;
  static constexpr int kRingBytes = kStages * (kStageBytes + 16 + 4 * kScales);
  static constexpr int kConsumers = kLines * kWarpSize, kThreads = kConsumers + kWarpSize;
  using Sums = float[kLines][kXRows][kRows + 4];  // the warps' of a tile; the pad spreads the banks
  static_assert(kRows == 8 || kRows == 16);
};

// Where the parts of a block's ring lie.
template <typename T>
struct Ring {
  uint32_t base;  // a multiple of 1024
  __device__ uint32_t weight(int stage) const { return base + stage * T::kStageBytes; }
  __device__ uint32_t x(int stage) const { return weight(stage) + T::kRows * T::kRowBytes; }
  __device__ uint32_t full(int stage) const {
    return base + T::kStages * T::kStageBytes + stage * 16;
  }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ uint32_t scale(int stage, int i) const {
    return full(T::kStages) + (stage * T::kScales + i) * 4;
  }
};

// 16 bytes of a line: where the copies' swizzle keeps chunk c of the n-th line of a matrix.
__device__ __forceinline__ uint4 load_chunk(uint32_t matrix, int line, int chunk) {
  return gemm::load_shared_16(matrix + line * gemm::kLineBytes + ((chunk ^ (line % 8)) * 16));
}

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

// One line of a stage, all rows times all tokens, added to sums, a set for each half of the line.
// As gemm::multiply_line has it, a lane reads 16 bytes of a row and deals its words to fragments;
// of FP8 they meet 32 of x.
template <typename T>
__device__ __forceinline__ void multiply_line(const Ring<T>& ring, int stage, int line,
                                              float (&sums)[2][4]) {
  const int lane = threadIdx.x % kWarpSize, row = lane / 4, column = row % T::kXRows;
  const uint32_t weight = ring.weight(stage), x = ring.x(stage);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int chunk = lane % 4 + 4 * half;
    const uint4 low = load_chunk(weight, row * T::kLines + line, chunk);
    const uint4 high =
        T::kRows == 16 ? load_chunk(weight, (row + 8) * T::kLines + line, chunk) : uint4{};
    if constexpr (T::kWeightBytes == 2) {
      const uint4 b = load_chunk(x, column * T::kXLines + line, chunk);
      mma<__nv_bfloat16>(sums[half], low.x, high.x, low.y, high.y, b.x, b.y);
      mma<__nv_bfloat16>(sums[half], low.z, high.z, low.w, high.w, b.z, b.w);
    } else {
      const int x_line = column * T::kXLines + 2 * line + half;
      const uint4 first = load_chunk(x, x_line, lane % 4 * 2);
      const uint4 second = load_chunk(x, x_line, lane % 4 * 2 + 1);
      const uint32_t a[] = {low.x, low.y, low.z, low.w}, c[] = {high.x, high.y, high.z, high.w};
      const uint32_t b[] = {first.x,  first.y,  first.z,  first.w,
                            second.x, second.y, second.z, second.w};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint32_t c0 = 0, c1 = 0;
        if constexpr (T::kRows == 16) {
          c0 = bf16x2_of_e4m3<0>(c[word]);
          c1 = bf16x2_of_e4m3<1>(c[word]);
        }
        mma<__nv_bfloat16>(sums[half], bf16x2_of_e4m3<0>(a[word]), c0, bf16x2_of_e4m3<1>(a[word]),
                           c1, b[2 * word], b[2 * word + 1]);
      }
    }
  }
}

// A block adds up one segment at a time: the tile's rows of one chosen expert. The first eight
// begin at row `low` of all experts' rows; the others, if it has 16, begin at row `high`.
struct Segment {
  int chosen, low, high;
};

// Which stage of the ring comes next, and the parity of its phase.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance(int num_stages) {
    if (++stage == num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Arrives once `used` is known, which follows from all that was read of the stage. The instruction
// after the loads alone may reach the barrier before their data is read, and copies of zeros,
// outside a matrix, come fast enough to be read in its place (seen on an H200). `never` is 0.
__device__ __forceinline__ void arrive_after(uint32_t barrier, uint32_t used, uint32_t never) {
  barrier_arrive(barrier + (used & never));
}

// One consumer warp: its line of a segment's stages, scaled.
template <typename T>
__device__ __forceinline__ void add_segment(const Ring<T>& ring, RingPlace& place, int num_steps,
                                            float (&sums)[4]) {
  const int warp = threadIdx.x / kWarpSize, row = threadIdx.x % kWarpSize / 4;
  float halves[2][4] = {};
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    const int stage = place.stage;
    barrier_wait(ring.full(stage), place.parity);
    multiply_line<T>(ring, stage, warp, halves);
    uint32_t used = __float_as_uint(halves[0][0]) | __float_as_uint(halves[1][0]);
    if (T::Operands::kBlockScales || step == num_steps - 1) {
      float low = 1.0f, high = 1.0f;
      if constexpr (T::kScales > 0) {
        const int first = T::Operands::kRowScales ? row : warp;
        low = gemm::load_shared_float(ring.scale(stage, first));
        if (T::kRows == 16) {
          high = gemm::load_shared_float(ring.scale(stage, first + T::kEightsScales));
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[i] += (halves[0][i] + halves[1][i]) * (i < 2 ? low : high);
        halves[0][i] = halves[1][i] = 0.0f;
      }
      used |= __float_as_uint(sums[0]) | __float_as_uint(sums[2]);
    }
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) {
      arrive_after(ring.empty(stage), used, static_cast<uint32_t>(num_steps) >> 24);
    }
    place.advance(T::kStages);
  }
}

template <typename T>
__device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(T::kConsumers) : "memory");
}

template <typename T>
__device__ __forceinline__ void store_sums(typename T::Sums& to, const float (&sums)[4]) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int column = lane % 4 * 2, row = lane / 4;
  if (column >= T::kXRows) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if ((i % 2 == 0 || T::kXRows > 1) && (i < 2 || T::kRows == 16)) {
      to[warp][column + i % 2][row + i / 2 * 8] = sums[i];
    }
  }
}

// A row's sum over the warps, in order.
template <typename T>
__device__ __forceinline__ float add_warps(const typename T::Sums& sums, int column, int row) {
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < T::kLines; ++warp) total += sums[warp][column][row];
  return total;
}

}  // namespace fusewright::moe
