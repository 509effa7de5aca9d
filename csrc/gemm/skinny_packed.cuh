// The streaming GEMM by weights of four bits: scales of groups, and a warp's line of a stage.
//
// A line of the weight has 256 columns, a half of it 128, of which each lane of a quad has 16
// bytes of a row, 32 columns: no shuffle, and groups of 32 are a lane's own. What a number's group
// has is multiplied with the sums where a group covers a half line, as a half line's sums are then
// those of one group; smaller groups' scales are rounded to bfloat16 and multiplied with the
// numbers.
#pragma once

#include "../common/mma.cuh"
#include "async_copy.cuh"
#include "packed_numbers.cuh"
#include "skinny.h"
#include "skinny_tile.cuh"

namespace fusewright::gemm {

// Waits for the first threads of a block.
template <int kCount>
__device__ __forceinline__ void sync_threads() {
  asm volatile("bar.sync 1, %0;" ::"n"(kCount) : "memory");
}

// The scales of a block's rows as they are stored, in shared memory: [row][pitch] bytes, from some
// column on, and behind them likewise the zero points.
template <typename Format, int kRows, int kWarps>
struct ScaleTable {
  uint32_t base;
  int first, words, pitch, log2_columns;
  bool zeros;

  // An odd number of words spreads the banks.
  __host__ __device__ static int pitch_of(int words) { return 4 * (words | 1); }
  __host__ __device__ static int words_in(const GroupScales& group, int columns) {
    return (columns >> group.log2_columns) * Format::kScaleBytes / 4;
  }
  __host__ static int bytes(const GroupScales& group, int columns) {
    if (!Format::kScaleBytes) return 0;
    return kRows * pitch_of(words_in(group, columns)) * (group.zero ? 2 : 1);
  }

  __device__ ScaleTable(const void* memory, const GroupScales& group, int first_column, int columns)
      : base(shared_address(memory)),
        first((first_column >> group.log2_columns) * Format::kScaleBytes / 4),
        words(words_in(group, columns)),
        pitch(pitch_of(words)),
        log2_columns(group.log2_columns),
        zeros(group.zero) {}

  // The first kWarps warps begin to copy the table. The scales are constants, like the weight.
  __device__ __forceinline__ void begin(const SkinnyLinearArgs& args, int first_output) const {
    constexpr int kHalf = kRows / 2;
    const int lane = threadIdx.x % kWarpSize;
    const int row_words = args.group.count * Format::kScaleBytes / 4;
    for (int row = threadIdx.x / kWarpSize; row < kRows; row += kWarps) {
      int n = first_output + row;
      if (args.gated()) n = first_output + row % kHalf + (row < kHalf ? 0 : args.out_features);
      n = min(n, args.out_features * (args.gated() ? 2 : 1) - 1);
      const auto copy = [&](const void* from, uint32_t to) {
        const auto* of_row = static_cast<const uint32_t*>(from) + int64_t{n} * row_words;
        for (int word = lane; word < words; word += kWarpSize) {
          // Behind the last column, x is zero, and any scale that is a number serves.
          copy_async_4(to + row * pitch + word * 4, of_row + min(first + word, row_words - 1));
        }
      };
      copy(args.group.scale, base);
      if (Format::kZeros && zeros) copy(args.group.zero, base + kRows * pitch);
    }
    copy_async_commit();
  }

  // `column` counts from the table's first.
  __device__ __forceinline__ uint32_t place(int row, int column) const {
    return base + row * pitch + (column >> log2_columns) * Format::kScaleBytes;
  }
  __device__ __forceinline__ uint32_t zero_place(uint32_t place) const {
    return place + kRows * pitch;
  }
};

__device__ __forceinline__ float load_shared_half(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
  return __half2float(__ushort_as_half(v));
}

__device__ __forceinline__ uint32_t load_shared_byte(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

// A scale as two of bfloat16, times the format's factor.
template <typename Format>
__device__ __forceinline__ uint32_t number_scale(uint32_t place) {
  if constexpr (Format::kScale == ScaleType::kE8M0) {
    // 2^94, which is a number's factor, is added to the exponent; the largest stand for no number.
    const uint32_t exponent = load_shared_byte(place);
    return exponent == 255 ? 0x7fc07fc0u : min(exponent + 94, 255u) * 0x00800080u;
  } else if constexpr (Format::kScale == ScaleType::kE4M3) {
    __nv_fp8_e4m3 v;
    v.__x = static_cast<uint8_t>(load_shared_byte(place));
    return twice_bf16(static_cast<float>(v) * Format::kNumberFactor);
  } else {
    return twice_bf16(load_shared_half(place));
  }
}

// One warp's line of one stage, all rows times all tokens, scaled and added to sums. `column` is
// the line's first, from the block's first on. Two chains of MMAs alternate, so that none waits for
// the one before.
template <typename T>
struct PackedSums {
  using Format = typename T::Format;
  using Numbers = typename Format::Numbers;
  using Table = ScaleTable<Format, T::kRows, kConsumerWarps>;
  float sums[2][T::kTilesM][4] = {};

  __device__ __forceinline__ void multiply(uint32_t weights, uint32_t xs, const Table& table,
                                           int column, int thread) {
    const int lane = thread % kWarpSize, line = thread / kWarpSize;
    const int row = lane / 4, t = lane % 4;
    const int chunk = t ^ ((line + kConsumerWarps * row) % 8);
    const uint32_t weight = weights + row * kRowBytes + line * kLineBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 a[T::kTilesM][2], x[4];
      // x is in lines of 64 columns, [line][kXRows], of which a lane's columns are half of one.
      const int x_place = (line * 4 + half * 2 + t / 2) * T::kXRows + row % T::kXRows;
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int x_chunk = (t % 2 * 4 + word) ^ (x_place % 8);
        x[word] = load_shared_16(xs + x_place * kLineBytes + x_chunk * 16);
      }
#pragma unroll
      for (int i = 0; i < T::kTilesM; ++i) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const uint32_t of_row = weight + (16 * i + 8 * k) * kRowBytes;
          a[i][k] = load_shared_16(of_row + (chunk * 16 ^ half * 64));
        }
      }
      if constexpr (Format::kScalesSums) {
        add_scaled(a, x, table, column + half * 128, row);
      } else {
        add_numbers(a, x, table, column + half * 128 + t * 32, row);
      }
    }
  }

  __device__ __forceinline__ static uint32_t word_of(const uint4& v, int word) {
    return word == 0 ? v.x : word == 1 ? v.y : word == 2 ? v.z : v.w;
  }

  // Numbers lack their group's offset and scale.
  __device__ __forceinline__ void add_scaled(const uint4 (&a)[T::kTilesM][2], const uint4 (&x)[4],
                                             const Table& table, int column, int row) {
    constexpr uint32_t kOnes = 0x3f803f80u;
    float part[2][T::kTilesM][4] = {}, x_sums[2][4] = {};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t b[4];
      pairs_of_x(x[word], b);
      mma<__nv_bfloat16>(x_sums[0], kOnes, kOnes, kOnes, kOnes, b[0], b[1]);
      mma<__nv_bfloat16>(x_sums[1], kOnes, kOnes, kOnes, kOnes, b[2], b[3]);
#pragma unroll
      for (int i = 0; i < T::kTilesM; ++i) {
        uint32_t low[4], high[4];
        Numbers::pairs(word_of(a[i][0], word), low);
        Numbers::pairs(word_of(a[i][1], word), high);
        mma<__nv_bfloat16>(part[0][i], low[0], high[0], low[1], high[1], b[0], b[1]);
        mma<__nv_bfloat16>(part[1][i], low[2], high[2], low[3], high[3], b[2], b[3]);
      }
    }
    const float x_sum[] = {x_sums[0][0] + x_sums[1][0], x_sums[0][1] + x_sums[1][1]};
#pragma unroll
    for (int i = 0; i < T::kTilesM; ++i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float scale = 1.0f, offset = kMagicOffset + 8.0f;
        if constexpr (Format::kScaleBytes) {
          const uint32_t place = table.place(16 * i + 8 * k + row, column);
          scale = load_shared_half(place);
          if (table.zeros) {
            offset = kMagicOffset + load_shared_half(table.zero_place(place));
          }
        }
#pragma unroll
        for (int at = 2 * k; at < 2 * k + 2; ++at) {
          const float sum = part[0][i][at] + part[1][i][at];
          sums[0][i][at] += scale * (sum - offset * x_sum[at % 2]);
        }
      }
    }
  }

  // Numbers get their scale at once. `column` is the lane's first.
  __device__ __forceinline__ void add_numbers(const uint4 (&a)[T::kTilesM][2], const uint4 (&x)[4],
                                              const Table& table, int column, int row) {
    uint32_t scale[T::kTilesM][2];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t b[4];
      pairs_of_x(x[word], b);
#pragma unroll
      for (int i = 0; i < T::kTilesM; ++i) {
        uint32_t numbers[2][4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (word == 0 || (word == 2 && Format::kColumns == 16)) {
            const uint32_t place = table.place(16 * i + 8 * k + row, column + word * 8);
            scale[i][k] = number_scale<Format>(place);
          }
          Numbers::pairs(word_of(a[i][k], word), numbers[k]);
#pragma unroll
          for (uint32_t& pair : numbers[k]) {
            if constexpr (!Format::kFloats) pair = minus_bf16x2(pair, kMagicAndEight);
            pair = times_bf16x2(pair, scale[i][k]);
          }
        }
        const auto& [low, high] = numbers;
        mma<__nv_bfloat16>(sums[0][i], low[0], high[0], low[1], high[1], b[0], b[1]);
        mma<__nv_bfloat16>(sums[1][i], low[2], high[2], low[3], high[3], b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void finish(float (&to)[T::kTilesM][T::kTilesN][4]) const {
    static_assert(T::kTilesN == 1);
#pragma unroll
    for (int i = 0; i < T::kTilesM; ++i) {
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        to[i][0][at] = (sums[0][i][at] + sums[1][i][at]) * Format::kSumFactor;
      }
    }
  }
};

}  // namespace fusewright::gemm
