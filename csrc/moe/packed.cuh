// A linear layer of the chosen experts by weights of four bits, for few rows an expert.
//
// Limit: the bytes of the weights, each of which is read once where an expert has no more rows than
// a warp multiplies at once; next to that, the integer units, which make numbers of bits.
//
// A warp computes 16 rows of a weight for all rows of x, along all columns or a part of them. It
// copies weights into a ring of its own in shared memory, of which each lane reads what it has
// copied itself: no warp waits for another. A step is 64 bytes of each row, 128 columns, of which a
// lane of a quad has 16 bytes: groups of 32 are a lane's own. Numbers are made in registers, with
// their scale, and are the tall operand of MMAs; eight rows of x are the other. The block keeps the
// rows of x of its tiles' experts in shared memory, their columns put in the order of the numbers.
#pragma once

#include "../gemm/skinny_packed.cuh"
#include "../gemm/skinny_write.cuh"
#include "gate.cuh"
#include "packed.h"
#include "plan.cuh"

namespace fusewright::moe {

constexpr int kStepColumns = 128, kStepBytes = kStepColumns / 2;
constexpr int kPackedRows = 16;                        // of a tile
constexpr int kStageBytes = kPackedRows * kStepBytes;  // of a warp's ring
constexpr int kXStepBytes = kStepColumns * 2;
constexpr int kXPad = 64;  // spreads the banks: rows of x a half line apart
constexpr int kLanes = gemm::kWarpSize;
constexpr unsigned kEveryLane = 0xffffffffu;

template <typename Format_, int kEights_, int kStages_>
struct PackedTile {
  using Format = Format_;
  static constexpr int kEights = kEights_, kMostRows = 8 * kEights_;
  static constexpr int kWarps = 16, kStages = kStages_;
  static constexpr int kThreads = kWarps * kLanes;
};

// A block knows the entries of a call, each an expert and some of its slots, in order.
struct Entries {
  int count;
  int expert[kMaxPackedEntries];
  int begin[kMaxPackedEntries + 1];  // in the order of slots
  float norm_scale[kMaxTokens];      // of the norm before, a token
};

// A block's shared memory beside the dynamic part, with the bytes that the driver takes.
constexpr int kFixedBytes = sizeof(Entries) + sizeof(Plan) + 1024;

// Where the parts of a block's dynamic memory lie: rows of x, then of each warp its ring, two
// buffers of a tile's scales, and its sums.
struct PackedLayout {
  int steps, pitch, capacity, scale_bytes, warp_bytes;

  __host__ __device__ PackedLayout(const PackedArgs& args, int scale_size, int stages, int capacity)
      : steps((args.in_features + kStepColumns - 1) / kStepColumns),
        pitch(steps * kXStepBytes + kXPad),
        capacity(capacity),
        scale_bytes(kPackedRows * args.groups * scale_size),
        // A lane copies up to stages - 1 steps ahead: one tile, of at least `stages` steps.
        warp_bytes(stages * kStageBytes + 2 * scale_bytes + kLanes * 16) {}

  __host__ __device__ int bytes(int warps) const { return capacity * pitch + warps * warp_bytes; }
};

// By one warp: entries of sorted slots.
__device__ __forceinline__ void find_entries(Entries& entries, const PackedArgs& args, int rows) {
  const int lane = threadIdx.x % kLanes;
  int count = 0;
  for (int first = 0; first < args.num_experts; first += kLanes) {
    const int expert = first + lane;
    const bool real = expert < args.num_experts;
    const int begin = real ? __ldcg(args.offsets + expert) : 0;
    const int end = real ? __ldcg(args.offsets + expert + 1) : 0;
    const int own = (end - begin + rows - 1) / rows;
    int upto = own;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const int other = __shfl_up_sync(kEveryLane, upto, step);
      if (lane >= step) upto += other;
    }
    for (int i = 0; i < own; ++i) {
      entries.expert[count + upto - own + i] = expert;
      entries.begin[count + upto - own + i] = begin + i * rows;
    }
    count += __shfl_sync(kEveryLane, upto, kLanes - 1);
  }
  if (lane == 0) {
    entries.count = count;
    entries.begin[count] = __ldcg(args.offsets + args.num_experts);
  }
}

// A tile: 16 rows of an entry's expert. With gates, eight gates and the ups of the same outputs.
struct PackedPlace {
  int entry, expert, output;  // output: the first

  __device__ PackedPlace(const Entries& entries, int tile, int stripes, int outputs)
      : entry(tile / stripes), expert(entries.expert[entry]), output(tile % stripes * outputs) {}
};

// Which rows of the weight a tile has: row i of the upper half is `low` + i * step, of the lower
// half `high` + i * step.
struct PackedRowsOf {
  int low, high, step;

  __device__ PackedRowsOf(const PackedArgs& args, int output) {
    if (!args.gated) {
      low = output, high = output + 8, step = 1;
    } else if (args.gate.interleaved) {
      low = 2 * output, high = low + 1, step = 2;
    } else {
      low = output, high = args.out_features + output, step = 1;
    }
  }
};

__device__ __forceinline__ void copy_streamed_16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

// Copies a warp's share of the steps of its tiles, ahead of their use.
template <typename T>
struct PackedCopier {
  const PackedArgs& args;
  const Entries& entries;
  const PackedLayout& layout;
  uint32_t ring;  // the warp's
  int tile, last, stride, first_step, last_step, stripes;
  int step = 0, stage = 0, buffer = 0;
  const uint8_t *low = nullptr, *high = nullptr;

  __device__ void begin_tile() {
    const int lane = threadIdx.x % kLanes;
    const int outputs = args.gated ? 8 : 16;
    const PackedPlace place(entries, tile, stripes, outputs);
    const PackedRowsOf rows(args, place.output);
    const int all = args.gated ? 2 * args.out_features : args.out_features;
    const int64_t first = static_cast<int64_t>(place.expert) * all;
    const int row_bytes = args.in_features / 2;
    const int at = lane / 4 * rows.step;
    low = args.weight + (first + rows.low + at) * row_bytes + lane % 4 * 16;
    high = args.weight + (first + rows.high + at) * row_bytes + lane % 4 * 16;
    // The scales of eight rows lie side by side; those of pairs are sixteen neighbours.
    const int eight = layout.scale_bytes / 2;
    const uint32_t to = ring + T::kStages * kStageBytes + buffer * layout.scale_bytes;
    const auto* from = static_cast<const uint8_t*>(args.scale);
    const int64_t row_scales = eight / 8;
    const uint8_t* upper = from + (first + rows.low) * row_scales;
    const uint8_t* lower = rows.step == 2 ? upper + eight : from + (first + rows.high) * row_scales;
    for (int i = lane * 16; i < layout.scale_bytes; i += kLanes * 16) {
      copy_async_16(to + i, i < eight ? upper + i : lower + i - eight, true);
    }
  }

  __device__ void next() {
    if (tile < last) {
      if (step == first_step) begin_tile();
      const bool valid = step * 4 + static_cast<int>(threadIdx.x % 4) < args.in_features / 32;
      const uint32_t to = ring + stage * kStageBytes + threadIdx.x % kLanes * 16;
      copy_streamed_16(to, low + (valid ? step * kStepBytes : 0), valid);
      copy_streamed_16(to + kStageBytes / 2, high + (valid ? step * kStepBytes : 0), valid);
      stage = stage + 1 == T::kStages ? 0 : stage + 1;
      if (++step == last_step) {
        step = first_step;
        tile += stride;
        buffer ^= 1;
      }
    }
    copy_async_commit();
  }
};

// Copies rows of x, those of the slots at `begin` to `end` - 1 of the order, by all threads.
template <typename T>
__device__ __forceinline__ void stage_rows(const PackedArgs& args, const PackedLayout& layout,
                                           uint32_t x, const int* order, int begin, int end) {
  const int units = layout.steps * (kStepColumns / 8), real = args.in_features / 8;
  const int all = (end - begin) * units;
  for (int i = threadIdx.x; i < all; i += T::kThreads) {
    const int row = i / units, unit = i % units;
    uint32_t pairs[4] = {};
    if (unit < real) {
      const int64_t at = order[begin + row] / args.slots_a_row;
      const auto* from = reinterpret_cast<const uint4*>(args.x + at * args.x_row_stride) + unit;
      gemm::pairs_of_x(*from, pairs);
    }
    // A lane's 32 columns of a step are four units, each beside those of the quad's other lanes.
    const uint32_t to =
        x + row * layout.pitch + unit / 16 * kXStepBytes + unit % 4 * 64 + unit / 4 % 4 * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[0]), "r"(pairs[1]),
                 "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
  }
}

// The sums of a tile in a warp: 16 rows by eights of rows of x, in two chains of MMAs.
template <typename T>
struct PackedTileSums {
  using Format = typename T::Format;
  float sums[T::kEights][2][4] = {};

  // A step, of which `weights` has this lane's bytes; `scales` are those of its rows' groups.
  __device__ __forceinline__ void add(uint32_t weights, const uint32_t (&scales)[2],
                                      const uint32_t (&x)[T::kEights]) {
    const uint4 low = gemm::load_shared_16(weights);
    const uint4 high = gemm::load_shared_16(weights + kStageBytes / 2);
    const uint32_t words[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t numbers[2][4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        Format::Numbers::pairs(words[k][word], numbers[k]);
#pragma unroll
        for (uint32_t& pair : numbers[k]) {
          if constexpr (!Format::kFloats) pair = gemm::minus_bf16x2(pair, gemm::kMagicAndEight);
          pair = gemm::times_bf16x2(pair, scales[k]);
        }
      }
      const auto& [a, c] = numbers;
#pragma unroll
      for (int i = 0; i < T::kEights; ++i) {
        const uint4 b = gemm::load_shared_16(x[i] + word * 64);
        mma<__nv_bfloat16>(sums[i][0], a[0], c[0], a[1], c[1], b.x, b.y);
        mma<__nv_bfloat16>(sums[i][1], a[2], c[2], a[3], c[3], b.z, b.w);
      }
    }
  }

  __device__ __forceinline__ void finish(float (&to)[T::kEights][4]) const {
#pragma unroll
    for (int i = 0; i < T::kEights; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) to[i][j] = (sums[i][0][j] + sums[i][1][j]) * Format::kSumFactor;
    }
  }
};

// The warps that share a tile add up: the first of them has the sums then. A group has a barrier.
template <typename T>
__device__ __forceinline__ void add_parts(float (&sums)[T::kEights][4], uint32_t own, int splits,
                                          int part, int group, int warp_bytes) {
  const int threads = splits * kLanes;
  const auto sync = [&] {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
  };
  const uint32_t at = threadIdx.x % kLanes * 16;
#pragma unroll
  for (int i = 0; i < T::kEights; ++i) {
    if (part) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(own + at), "f"(sums[i][0]),
                   "f"(sums[i][1]), "f"(sums[i][2]), "f"(sums[i][3])
                   : "memory");
    }
    sync();
    for (int other = 1; !part && other < splits; ++other) {
      const uint4 v = gemm::load_shared_16(own + other * warp_bytes + at);
      sums[i][0] += __uint_as_float(v.x), sums[i][1] += __uint_as_float(v.y);
      sums[i][2] += __uint_as_float(v.z), sums[i][3] += __uint_as_float(v.w);
    }
    sync();
  }
}

template <typename T>
__device__ __forceinline__ void write_packed(const PackedArgs& args, const Entries& entries,
                                             const PackedPlace& place, const int* order,
                                             const float (&bias)[2],
                                             const float (&sums)[T::kEights][4]) {
  const int lane = threadIdx.x % kLanes;
  const int begin = entries.begin[place.entry], count = entries.begin[place.entry + 1] - begin;
#pragma unroll
  for (int i = 0; i < T::kEights; ++i) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int column = i * 8 + lane % 4 * 2 + odd;
      if (column >= count) continue;
      const int slot = order[begin + column];
      const float norm = args.squares ? entries.norm_scale[slot / args.top_k] : 1.0f;
      const float low = sums[i][odd] * norm + bias[0], high = sums[i][2 + odd] * norm + bias[1];
      __nv_bfloat16* y =
          args.y + static_cast<int64_t>(slot) * args.out_features + place.output + lane / 4;
      if (args.gated) {
        constexpr auto kElement = gemm::Element::kBFloat16;
        const float gate = gemm::rounded(low, kElement), up = gemm::rounded(high, kElement);
        *y = __float2bfloat16_rn(gated_product(args.gate, gate, up));
      } else {
        y[0] = __float2bfloat16_rn(low);
        y[8] = __float2bfloat16_rn(high);
      }
    }
  }
}

// The scale of a group of a row, as two of bfloat16; zero behind the last column, where integers of
// zero bits are not zero.
template <typename T>
__device__ __forceinline__ uint32_t scale_of(uint32_t row, int group, bool valid) {
  const uint32_t scale =
      gemm::number_scale<typename T::Format>(row + group * T::Format::kScaleBytes);
  return valid ? scale : 0;
}

// A warp's tiles from `tile` to `last` - 1, of which rows of x lie in memory.
template <typename T>
__device__ __forceinline__ void multiply_tiles(const PackedArgs& args, const Entries& entries,
                                               const PackedLayout& layout, PackedCopier<T>& copier,
                                               uint32_t x, const int* order, int tile,
                                               int first_row, int splits, int part, int group) {
  const int lane = threadIdx.x % kLanes, outputs = args.gated ? 8 : 16;
  const int chunks = args.in_features / 32, all = args.out_features * (args.gated ? 2 : 1);
  const bool pairs = args.gated && args.gate.interleaved;
  const int scale_row = layout.scale_bytes / kPackedRows;
  const uint32_t scales = copier.ring + T::kStages * kStageBytes;
  const int low_scale = (pairs ? lane / 4 * 2 : lane / 4) * scale_row;
  const int high_scale = (pairs ? lane / 4 * 2 + 1 : lane / 4 + 8) * scale_row;
  int stage = 0, buffer = 0;
  for (; tile < copier.last; tile += copier.stride) {
    const PackedPlace place(entries, tile, copier.stripes, outputs);
    const int begin = entries.begin[place.entry];
    const int count = entries.begin[place.entry + 1] - begin;
    float bias[2] = {};
    if (args.bias) {
      const PackedRowsOf rows(args, place.output);
      const __nv_bfloat16* of = args.bias + static_cast<int64_t>(place.expert) * all;
      bias[0] = __bfloat162float(of[rows.low + lane / 4 * rows.step]);
      bias[1] = __bfloat162float(of[rows.high + lane / 4 * rows.step]);
    }
    uint32_t rows[T::kEights];
#pragma unroll
    for (int i = 0; i < T::kEights; ++i) {
      const int row = begin - first_row + min(i * 8 + lane / 4, count - 1);
      rows[i] = x + row * layout.pitch + lane % 4 * 16 + copier.first_step * kXStepBytes;
    }
    PackedTileSums<T> sums;
    const uint32_t of_tile = scales + buffer * layout.scale_bytes;
#pragma unroll 1
    for (int step = copier.first_step; step < copier.last_step; ++step) {
      copier.next();
      copy_async_wait<T::kStages - 1>();
      __syncwarp();  // scales are other lanes' too
      const int chunk = step * 4 + lane % 4;
      const bool valid = chunk < chunks;
      const int of_group = min(chunk, chunks - 1) * 32 >> args.log2_columns;
      const uint32_t of_rows[2] = {scale_of<T>(of_tile + low_scale, of_group, valid),
                                   scale_of<T>(of_tile + high_scale, of_group, valid)};
      sums.add(copier.ring + stage * kStageBytes + lane * 16, of_rows, rows);
      stage = stage + 1 == T::kStages ? 0 : stage + 1;
#pragma unroll
      for (uint32_t& row : rows) row += kXStepBytes;
    }
    float total[T::kEights][4];
    sums.finish(total);
    if (splits > 1) {
      const uint32_t own = scales + 2 * layout.scale_bytes;
      add_parts<T>(total, own, splits, part, group, layout.warp_bytes);
    }
    if (part == 0) write_packed<T>(args, entries, place, order, bias, total);
    buffer ^= 1;
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    packed_kernel(const __grid_constant__ PackedArgs args, int capacity, int splits) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ Entries entries;
  __shared__ Plan plan;
  const PackedLayout layout(args, T::Format::kScaleBytes, T::kStages, capacity);
  const int warp = threadIdx.x / kLanes;
  wait_for_previous();
  start_next();
  if (args.ids) {
    ExpertsArgs of_plan = {};
    of_plan.topk_ids = args.ids;
    of_plan.num_tokens = args.num_slots / args.top_k;
    of_plan.top_k = args.top_k;
    of_plan.num_experts = args.num_experts;
    make_plan(plan, of_plan);
    for (int i = threadIdx.x; i <= plan.num_chosen; i += T::kThreads) {
      if (i < plan.num_chosen) entries.expert[i] = plan.expert[i];
      entries.begin[i] = plan.begin[i];
    }
    if (threadIdx.x == 0) entries.count = plan.num_chosen;
    if (args.squares && threadIdx.x < kMaxTokens * 8) {
      const int tokens = args.num_slots / args.top_k;
      const float scale = gemm::norm_scale(threadIdx.x, args.squares, args.num_square_groups,
                                           tokens, args.in_features, args.eps);
      if (threadIdx.x % 8 == 0) entries.norm_scale[threadIdx.x / 8] = scale;
    }
  } else if (warp == 0) {
    find_entries(entries, args, T::kMostRows);
  }
  __syncthreads();
  const int* order = args.ids ? plan.pair : args.order;
  const int stripes = args.out_features / (args.gated ? 8 : 16);
  const int64_t tiles = static_cast<int64_t>(entries.count) * stripes;
  const int last = static_cast<int>(tiles * (blockIdx.x + 1) / gridDim.x);
  const uint32_t x = shared_address(memory);
  const uint32_t ring = x + capacity * layout.pitch + warp * layout.warp_bytes;
  const int group = warp / splits, part = warp % splits, groups = T::kWarps / splits;
  // As many tiles at once as have their rows of x in memory.
  for (int tile = static_cast<int>(tiles * blockIdx.x / gridDim.x); tile < last;) {
    const int first = tile / stripes, first_row = entries.begin[first];
    int behind = first + 1;
    while (behind < entries.count && behind * stripes < last &&
           entries.begin[behind + 1] - first_row <= capacity) {
      ++behind;
    }
    const int upto = min(last, behind * stripes);
    PackedCopier<T> copier{args,
                           entries,
                           layout,
                           ring,
                           tile + group,
                           upto,
                           groups,
                           part * layout.steps / splits,
                           (part + 1) * layout.steps / splits,
                           stripes};
    copier.step = copier.first_step;
    for (int i = 0; i < T::kStages - 1; ++i) copier.next();
    stage_rows<T>(args, layout, x, order, first_row, entries.begin[behind]);
    __syncthreads();
    multiply_tiles<T>(args, entries, layout, copier, x, order, tile + group, first_row, splits,
                      part, group);
    copy_async_wait<0>();
    __syncthreads();
    tile = upto;
  }
}

}  // namespace fusewright::moe
