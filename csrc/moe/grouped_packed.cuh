// How a grouped GEMM fills its ring with a weight of four bits: numbers are made bfloat16, with
// their scales, in the registers of the threads that fill, and stored where a swizzled copy would
// have left them. A thread has two rows of the tile's weight, and reads those of the next step as
// it stores those of this one.
#pragma once

#include "../gemm/packed_numbers.cuh"
#include "grouped_fill.cuh"

namespace fusewright::moe {

// Eight neighbours of a row in bfloat16, of a word of numbers with this scale.
template <typename Numbers>
__device__ __forceinline__ uint4 neighbours_of(uint32_t w, uint32_t scale) {
  uint32_t pairs[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<Numbers, gemm::FloatNibbles>) {
      // A byte whose upper half is a number, and its sign eight times above; twice.
      const uint32_t selector = 0xc480u + i * 0x1111u;
      uint32_t d;
      asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(w << 4), "r"(w), "r"(selector));
      pairs[i] = gemm::times_bf16x2((d << 2) & gemm::kSignedFloat, scale);
    } else {
      // The byte, and twelve bits above it the byte again.
      const uint32_t twice = __byte_perm(w, 0, 0x4440u + i) * 0x1001u;
      const uint32_t d = gemm::and_or(twice, gemm::kNibbles, gemm::kMagic);
      pairs[i] = gemm::times_bf16x2(gemm::minus_bf16x2(d, gemm::kMagicAndEight), scale);
    }
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// Sums are multiplied with this factor, by which numbers of floats are too small.
template <typename Numbers>
constexpr float kSumFactorOf = std::is_same_v<Numbers, gemm::FloatNibbles> ? 0x1p32f : 1.0f;

template <typename T>
struct PackedFiller {
  using Numbers = typename T::Numbers;
  static constexpr bool kFloats = std::is_same_v<Numbers, gemm::FloatNibbles>;
  static constexpr int kStepBytes = 32, kOwnRows = T::kWeightRows / kWarpgroupThreads;
  GroupedFiller<T> filler;
  const uint8_t *weight[kOwnRows], *scale[kOwnRows];
  uint4 words[kOwnRows][2];
  uint32_t scales[kOwnRows][2];  // as stored, of the halves of a step

  __device__ __forceinline__ explicit PackedFiller(const GroupedFiller<T>& of) : filler(of) {}

  // Points at this thread's rows of a tile's weight. Rows behind the last are read as the last.
  __device__ __forceinline__ void begin(const GroupedItem& item) {
    const GroupedArgs& args = filler.args;
    const int rows = args.out_features, all = T::kGated ? 2 * rows : rows;
    const int row_scales = args.groups * (kFloats ? 1 : 2);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const int output = item.column + static_cast<int>(threadIdx.x);
      int row = min(T::kGated ? output : output + i * kWarpgroupThreads, rows - 1);
      if constexpr (T::kGated) row = args.gate.interleaved ? 2 * row + i : row + i * rows;
      const int64_t at = static_cast<int64_t>(item.expert) * all + row;
      weight[i] = static_cast<const uint8_t*>(args.weight) + at * (args.in_features / 2);
      scale[i] = args.packed_scale + at * row_scales;
    }
  }

  __device__ __forceinline__ void load(int step, int i, int half) {
    const uint8_t* from = weight[i] + step * kStepBytes + half * 16;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[i][half].x), "=r"(words[i][half].y), "=r"(words[i][half].z),
                   "=r"(words[i][half].w)
                 : "l"(from));
    const int group = (step * 64 + half * 32) >> filler.args.log2_columns;
    if constexpr (kFloats) {
      scales[i][half] = __ldg(scale[i] + group);
    } else {
      scales[i][half] = __ldg(reinterpret_cast<const uint16_t*>(scale[i]) + group);
    }
  }

  __device__ __forceinline__ uint32_t scale_of(int i, int half) const {
    const uint32_t stored = scales[i][half];
    if constexpr (kFloats) {
      // 2^94, which is a number's factor, is added to the exponent; the largest is no number.
      return stored == 255 ? 0x7fc07fc0u : min(stored + 94, 255u) * 0x00800080u;
    } else {
      return gemm::twice_bf16(__half2float(__ushort_as_half(static_cast<uint16_t>(stored))));
    }
  }

  // Stores a step and loads `next`, of the tile to which the rows point now, unless it is negative.
  __device__ __forceinline__ void store(uint32_t to, int next) {
    const int thread = threadIdx.x;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const int row = i * kWarpgroupThreads + thread;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t of_group = scale_of(i, half);
        const uint4 v = words[i][half];
        const uint32_t four[4] = {v.x, v.y, v.z, v.w};
        if (next >= 0) load(next, i, half);
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const uint4 made = neighbours_of<Numbers>(four[word], of_group);
          const int chunk = half * 4 + word;
          asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + row * kLineBytes +
                                                                        ((chunk ^ row % 8) << 4)),
                       "r"(made.x), "r"(made.y), "r"(made.z), "r"(made.w)
                       : "memory");
        }
      }
    }
  }

  __device__ __forceinline__ void run(Walk& walk) {
    const int steps = filler.args.in_features / T::kLine, tiles = walk.num_tiles();
    RingCursor<T::kStages>& at = filler.at;
    int tile = blockIdx.x;
    if (tile >= tiles) return;
    GroupedItem item = walk.find(tile), next_item = item;
    begin(item);
#pragma unroll
    for (int i = 0; i < 2 * kOwnRows; ++i) load(0, i / 2, i % 2);
    for (; tile < tiles; tile += gridDim.x, item = next_item) {
      filler.find(item);
      for (int step = 0; step < steps; ++step) {
        const uint32_t full = shared_address(&filler.shared.full[at.stage]);
        const uint32_t to = filler.ring + at.stage * T::kStageBytes;
        barrier_wait(shared_address(&filler.shared.empty[at.stage]), at.parity ^ 1);
        if (threadIdx.x == 0) filler.copy(item, to, full, step);
        if constexpr (T::kGathered) filler.gather(item, to, step);
        copy_async_arrive(full);
        int next = step + 1;
        if (next == steps) {
          next = tile + static_cast<int>(gridDim.x) < tiles ? 0 : -1;
          if (next == 0) {
            next_item = walk.find(tile + gridDim.x);
            begin(next_item);
          }
        }
        store(to + T::kXBytes, next);
        // MMAs read through the copy engine's eyes.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_arrive(full);
        at.advance();
      }
    }
    copy_async_commit();
    copy_async_wait<0>();
  }
};

}  // namespace fusewright::moe
