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
  static constexpr int kRingBytes = (kStages * (kStageBytes + 16 + 4 * kScales) + 15) / 16 * 16;
  static constexpr int kXChunks = 2 / kWeightBytes;  // 16 bytes of weight meet so many of x
  static constexpr int kConsumers = kLines * kWarpSize;
  // Behind the warps that multiply: one copies weights and x, and if there are scales, one these.
  static constexpr int kCopyWarp = kLines, kScaleWarp = kLines + 1;
  static constexpr int kCopyWarps = kScales > 0 ? 2 : 1;
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

// Where the copies' swizzle keeps 16 bytes, chunk c of the n-th line of a matrix.
__device__ __forceinline__ uint32_t chunk_offset(int line, int chunk) {
  return line * gemm::kLineBytes + ((chunk ^ (line % 8)) * 16);
}

// Returns v itself, which ptxas then does not compute again: it does not do a shuffle twice.
__device__ __forceinline__ uint32_t keep(uint32_t v) {
  return __shfl_sync(kAllLanes, v, threadIdx.x % kWarpSize);
}

// Where in a stage a lane finds its parts of its warp's line: of the tile's first eight rows, of x,
// and the number of the scale. Kept in registers, as computing them again takes a third of a step.
template <typename T>
struct LinePlace {
  static constexpr bool kWide = T::kXChunks > 1;  // x takes two lines for one of the weight
  uint32_t low, x[kWide ? 4 : 1], scale = 0;

  // Whole warps call it.
  __device__ static LinePlace of() {
    const int lane = threadIdx.x % kWarpSize, row = lane / 4, column = row % T::kXRows;
    const int line = threadIdx.x / kWarpSize;
    LinePlace found;
    found.low = keep(chunk_offset(row * T::kLines + line, lane % 4));
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int x_line = column * T::kXLines + 2 * line + i / 2;
        found.x[i] = keep(chunk_offset(x_line, lane % 4 * 2 + i % 2));
      }
    } else {
      found.x[0] = keep(chunk_offset(column * T::kXLines + line, lane % 4));
    }
    if (T::kScales > 0) found.scale = keep(T::Operands::kRowScales ? row : line);
    return found;
  }

  // The second half of a line lies four chunks on, whatever the swizzle.
  __device__ uint32_t low_of(int half) const { return low ^ (half * 64); }
  __device__ uint32_t x_of(int half, int j) const {
    return kWide ? x[2 * half + j] : x[0] ^ (half * 64);
  }
};

// A warp multiplies one line of a step, in two halves. As gemm::multiply_line has it, a lane reads
// 16 bytes of a row and deals its words to fragments; of FP8 they meet 32 of x.
template <typename T>
struct Line {
  uint4 low[2], high[2];  // of the tile's first eight rows, and of the others
  uint4 x[2][T::kXChunks];
  float low_scale, high_scale;

  // Every load comes before the first use, so the warp waits for memory once.
  __device__ static Line load(const Ring<T>& ring, int stage, const LinePlace<T>& place) {
    const uint32_t weight = ring.weight(stage), x = ring.x(stage);
    Line found = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t low = weight + place.low_of(half);
      found.low[half] = gemm::load_shared_16(low);
      if (T::kRows == 16) found.high[half] = gemm::load_shared_16(low + 8 * T::kRowBytes);
#pragma unroll
      for (int j = 0; j < T::kXChunks; ++j) {
        found.x[half][j] = gemm::load_shared_16(x + place.x_of(half, j));
      }
    }
    if constexpr (T::kScales > 0) {
      const uint32_t scale = ring.scale(stage, 0) + 4 * place.scale;
      found.low_scale = gemm::load_shared_float(scale);
      if (T::kRows == 16) {
        found.high_scale = gemm::load_shared_float(scale + 4 * T::kEightsScales);
      }
    }
    return found;
  }

  // The result is known once every load has returned.
  __device__ uint32_t used() const {
    uint32_t bits = __float_as_uint(low_scale) | __float_as_uint(high_scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bits |= low[half].x | high[half].x;
#pragma unroll
      for (int j = 0; j < T::kXChunks; ++j) bits |= x[half][j].x;
    }
    return bits;
  }

  // Adds the products of all rows and all tokens to sums, a set for each half.
  __device__ void multiply(float (&sums)[2][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t a[] = {low[half].x, low[half].y, low[half].z, low[half].w};
      const uint32_t c[] = {high[half].x, high[half].y, high[half].z, high[half].w};
      if constexpr (T::kWeightBytes == 2) {
        const uint4& b = x[half][0];
        mma<__nv_bfloat16>(sums[half], a[0], c[0], a[1], c[1], b.x, b.y);
        mma<__nv_bfloat16>(sums[half], a[2], c[2], a[3], c[3], b.z, b.w);
      } else {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const uint4& b = x[half][word / 2];
          uint32_t c0 = 0, c1 = 0;
          if constexpr (T::kRows == 16) {
            c0 = bf16x2_of_e4m3<0>(c[word]);
            c1 = bf16x2_of_e4m3<1>(c[word]);
          }
          mma<__nv_bfloat16>(sums[half], bf16x2_of_e4m3<0>(a[word]), c0, bf16x2_of_e4m3<1>(a[word]),
                             c1, word % 2 ? b.z : b.x, word % 2 ? b.w : b.y);
        }
      }
    }
  }
};

// A block adds up one segment at a time: the tile's rows of one chosen expert, which begin at `row`
// of its outputs. A tile of 16 rows has the gates and the ups of eight.
struct Segment {
  int chosen, expert, row;
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
__device__ __forceinline__ void add_segment(const Ring<T>& ring, RingPlace& place,
                                            const LinePlace<T>& line_place, int num_steps,
                                            float (&sums)[4]) {
  float halves[2][4] = {};
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    const int stage = place.stage;
    barrier_wait(ring.full(stage), place.parity);
    place.advance(T::kStages);
    const Line<T> line = Line<T>::load(ring, stage, line_place);
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) {
      arrive_after(ring.empty(stage), line.used(), static_cast<uint32_t>(num_steps) >> 24);
    }
    line.multiply(halves);
    if (!T::Operands::kBlockScales && step < num_steps - 1) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = halves[0][i] + halves[1][i];
      sums[i] += T::kScales > 0 ? sum * (i < 2 ? line.low_scale : line.high_scale) : sum;
      halves[0][i] = halves[1][i] = 0.0f;
    }
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
