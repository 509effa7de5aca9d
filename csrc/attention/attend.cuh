// One warp's part of decode attention: a ring of chunks of K and V, and what is summed over them.
//
// Heads of a group are the narrow operand of the matrix instructions, tokens (then head_dim) the
// tall one: S^T = K Q^T, O^T = V^T P^T. Eight heads are a head tile; a group of 9 to 16 has two.
// A lane's column pair, 2 * (lane % 4), is its pair of heads in every MMA, so that maxima,
// sums and rescaling stay in the lane.
#pragma once

#include <type_traits>

#include "decode.h"
#include "primitives.cuh"

namespace fusewright::attention {

constexpr int kThreads = kWarps * kWarpSize;
constexpr float kNoMax = -1.0e30f;  // finite: a row without a token gives exp2(-inf - kNoMax) = 0

// kRows: the heads of several queries of one sequence are beside each other, column query * group +
// head of the group. Q then lies in shared memory, since sums of so many columns fill the
// registers.
template <typename Q_, typename Kv_, int kHeadDim_, int kHeadTiles_, bool kRows_ = false>
struct Tile {
  using Q = Q_;
  using Kv = Kv_;
  static constexpr bool kFp8 = sizeof(Kv) == 1;
  using M = std::conditional_t<kFp8, __half, Q>;  // e4m3 is exact in fp16
  static constexpr int kHeadDim = kHeadDim_, kHeadTiles = kHeadTiles_;
  static constexpr int kSteps = kHeadDim / 16;  // of head_dim, the depth of one instruction
  static constexpr int kRowBytes = kHeadDim * sizeof(Kv);
  static constexpr int kChunk = kRowBytes == 256 ? 16 : 32;  // tokens
  static constexpr int kTokenTiles = kChunk / 16;
  static constexpr int kTilesAtOnce = kRows_ ? 1 : kTokenTiles;  // registers hold no more
  static constexpr int kHalfBytes = kChunk * kRowBytes;          // K, then V
  static constexpr int kStageBytes = 2 * kHalfBytes;
  static constexpr int kFragments = kHeadTiles * kSteps;  // float4 a lane of unscaled output
  static constexpr bool kRows = kRows_;
  static constexpr int kQueryBytes = kRows ? kFragments * kWarpSize * 8 : 0;
  static constexpr int kRingBytes = 24576;  // stages, then Q
  static constexpr int kStages = (kRingBytes - kQueryBytes) / kStageBytes;
};

// The tile for several queries of a sequence, and how many of them it has at most.
constexpr int kRowTiles = 4;
template <typename T>
using RowsTile = Tile<typename T::Q, typename T::Kv, T::kHeadDim, kRowTiles, true>;

__host__ __device__ __forceinline__ int most_rows(int group) {
  const int rows = 8 * kRowTiles / group;
  return rows < kMaxRows ? rows : kMaxRows;
}

// The queries of an item: `rows` neighbouring tokens, and their heads that share a KV head.
struct Queries {
  int token, rows, head;
};

// 16-byte column of a row in shared memory: eight rows at one column meet no bank twice.
template <typename T>
__device__ __forceinline__ int swizzle(int row) {
  return T::kRowBytes >= 128 ? row & 7 : (row >> 1) & 3;
}

// First and one past the last position that the query of a sequence sees.
struct Visible {
  int begin, end;
};

__device__ __forceinline__ Visible visible(int seq_len, int window) {
  return {window > 0 ? max(seq_len - window, 0) : 0, seq_len};
}

// Returns the positions that any of the last `rows` of a sequence sees.
__device__ __forceinline__ Visible visible_of_rows(int seq_len, int window, int rows) {
  return {visible(seq_len - rows + 1, window).begin, seq_len};
}

// Chunks of one sequence, `step` chunks apart, whose blocks the warp knows: lane i holds the block
// of eight tokens, group i % kGroups of chunk i / kGroups.
template <typename T>
struct Batch {
  static constexpr int kGroups = T::kChunk / 8;
  static constexpr int kChunks = kWarpSize / kGroups;
  int block_id = 0, first = 0, step = 0, count = 0;
  Visible seen = {0, 0};
};

template <typename T>
__device__ __forceinline__ Batch<T> find_blocks(const DecodeArgs& args, int seq, int rows,
                                                int first, int step, int count) {
  using B = Batch<T>;
  Batch<T> batch;
  batch.first = first;
  batch.step = step;
  batch.count = min(count, B::kChunks);
  const int lane = threadIdx.x % kWarpSize;
  const int index = lane / B::kGroups;
  const int token = (first + index * step) * T::kChunk + lane % B::kGroups * 8;
  const int block = token >> args.log2_block_size;
  // Entries past the sequence's end are read, but not used.
  if (index < batch.count && block < args.max_blocks) {
    batch.block_id = args.block_table[seq * args.table_stride + block];
  }
  batch.seen = visible_of_rows(args.seq_lens[seq], args.window, rows);
  return batch;
}

// Copies of one KV head's rows.
template <typename T>
struct Copier {
  static constexpr int kLanesPerRow = T::kRowBytes / 16;
  static constexpr int kRows = kWarpSize / kLanesPerRow;  // of one instruction; divides 8
  const char* kv;
  int64_t half_bytes;  // K or V of a KV block
  int token_bytes, log2_block_size, row, to;

  __device__ Copier(const DecodeArgs& args, int head) {
    const int lane = threadIdx.x % kWarpSize;
    row = lane / kLanesPerRow;
    token_bytes = args.kv_heads * T::kRowBytes;
    log2_block_size = args.log2_block_size;
    half_bytes = static_cast<int64_t>(token_bytes) << log2_block_size;
    kv = static_cast<const char*>(args.kv) + head * T::kRowBytes + lane % kLanesPerRow * 16 +
         row * token_bytes;
    to = row * T::kRowBytes;
  }

  // Chunk `index` of the batch; rows that are not visible become zeros, whatever the cache holds.
  __device__ __forceinline__ void copy(uint32_t stage, const Batch<T>& batch, int index) const {
    const int lane = threadIdx.x % kWarpSize;
    const int first = (batch.first + index * batch.step) * T::kChunk;
#pragma unroll
    for (int group = 0; group < Batch<T>::kGroups; ++group) {
      const int64_t block_id =
          __shfl_sync(kAllLanes, batch.block_id, index * Batch<T>::kGroups + group);
      const int token = first + group * 8;
      const char* from =
          kv + block_id * 2 * half_bytes + (token & ((1 << log2_block_size) - 1)) * token_bytes;
#pragma unroll
      for (int i = 0; i < 8 / kRows; ++i) {
        const int at = group * 8 + i * kRows;
        const int position = token + i * kRows + row;
        const bool valid = position >= batch.seen.begin && position < batch.seen.end;
        const int column = (lane % kLanesPerRow) ^ swizzle<T>(i * kRows + row);
        const uint32_t address = stage + to + at * T::kRowBytes + column * 16;
        const char* source = valid ? from + i * kRows * token_bytes : kv;
        copy_async_16(address, source, valid);
        copy_async_16(address + T::kHalfBytes, source + (valid ? half_bytes : 0), valid);
      }
    }
  }
};

// Q^T as the narrow operand, and what turns a product with K into a logit in units of log2. A
// lane's fragments are its own, in registers or, with rows, in shared memory.
template <typename T>
struct Query {
  uint32_t fragments[T::kRows ? 1 : T::kHeadTiles][T::kSteps][2];
  float unit[T::kHeadTiles][2];
  uint32_t memory;          // with rows: where this lane's fragments lie
  int rows, group, window;  // with rows

  // `stages_end`: where a warp's ring has room for Q.
  __device__ __forceinline__ void load(const DecodeArgs& args, const Queries& queries,
                                       uint32_t stages_end) {
    const int lane = threadIdx.x % kWarpSize, column = lane % 4;
    const float k_scale = args.kv_scale ? args.kv_scale[queries.head] : 1.0f;
    const auto* q = static_cast<const typename T::Q*>(args.q) + queries.token * args.q_stride +
                    queries.head * args.group * T::kHeadDim;
    memory = stages_end + lane * 8;
    rows = queries.rows;
    group = args.group;
    window = args.window;
#pragma unroll
    for (int n = 0; n < T::kHeadTiles; ++n) {
      auto& part = fragments[T::kRows ? 0 : n];
      int member = 8 * n + lane / 4;
      bool live = member < args.group;
      const auto* row = q;
      if constexpr (T::kRows) {
        const int query = member / group;
        live = query < rows;
        member -= query * group;
        row += query * args.q_stride;
      }
      row += member * T::kHeadDim;
#pragma unroll
      for (int k = 0; k < T::kSteps; ++k) {
        uint2 pair = {0, 0};
        if (live && T::kFp8) {
          pair = *reinterpret_cast<const uint2*>(row + 16 * k + 4 * column);
        } else if (live) {
          pair.x = *reinterpret_cast<const uint32_t*>(row + 16 * k + 2 * column);
          pair.y = *reinterpret_cast<const uint32_t*>(row + 16 * k + 2 * column + 8);
        }
        part[k][0] = pair.x;
        part[k][1] = pair.y;
      }
      unit[n][0] = unit[n][1] = args.scale * kLog2E * k_scale;
      if constexpr (!std::is_same_v<typename T::Q, typename T::M>) to_half(part, unit[n]);
      if constexpr (T::kRows) {
#pragma unroll
        for (int k = 0; k < T::kSteps; ++k) {
          store_shared(memory + (n * T::kSteps + k) * kWarpSize * 8, uint2{part[k][0], part[k][1]});
        }
      }
    }
  }

  __device__ __forceinline__ uint2 part(int n, int step) const {
    if constexpr (T::kRows) {
      return load_shared_pair(memory + (n * T::kSteps + step) * kWarpSize * 8);
    } else {
      return {fragments[n][step][0], fragments[n][step][1]};
    }
  }

  // Returns the positions that all queries see, of those that any of them sees.
  __device__ __forceinline__ Visible seen_by_all(const Visible& seen) const {
    if constexpr (!T::kRows) return seen;
    return {visible(seen.end, window).begin, seen.end - rows + 1};
  }

  // Returns the positions that the query of a column sees.
  __device__ __forceinline__ Visible seen_by(int column, const Visible& seen) const {
    if constexpr (!T::kRows) return seen;
    return visible(seen.end - rows + 1 + min(column / group, rows - 1), window);
  }

  // bf16 to fp16, a head at a time scaled by a power of two into its range.
  __device__ __forceinline__ void to_half(uint32_t (&part)[T::kSteps][2], float (&units)[2]) {
    const int column = threadIdx.x % 4;
    float peak = 0.0f;
#pragma unroll
    for (int k = 0; k < T::kSteps; ++k) {
      for (int half = 0; half < 2; ++half) {
        const float2 v = unpack_bfloat16(part[k][half]);
        peak = fmaxf(peak, fmaxf(fabsf(v.x), fabsf(v.y)));
      }
    }
    peak = fmaxf(peak, __shfl_xor_sync(kAllLanes, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(kAllLanes, peak, 2));
    const int exponent = min(max(__float_as_int(peak) >> 23, 1), 253);
    const float down = __int_as_float((254 - exponent) << 23);
#pragma unroll
    for (int k = 0; k < T::kSteps; ++k) {
      for (int half = 0; half < 2; ++half) {
        const float2 v = unpack_bfloat16(part[k][half]);
        part[k][half] = pack<__half>(v.x * down, v.y * down);
      }
    }
    const float up = __int_as_float(exponent << 23);
    units[0] *= __shfl_sync(kAllLanes, up, 8 * column);
    units[1] *= __shfl_sync(kAllLanes, up, 8 * column + 4);
  }
};

// Online softmax (Milakov and Gimelshein, 2018): O^T not yet divided, maxima in units of log2, and
// sums of the lane's own tokens.
template <typename T>
struct Sums {
  float out[T::kHeadTiles][T::kSteps][4];
  float peak[T::kHeadTiles][2], total[T::kHeadTiles][2];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int n = 0; n < T::kHeadTiles; ++n) {
#pragma unroll
      for (int j = 0; j < T::kSteps; ++j) {
        for (int i = 0; i < 4; ++i) out[n][j][i] = 0.0f;
      }
      for (int i = 0; i < 2; ++i) {
        peak[n][i] = kNoMax;
        total[n][i] = 0.0f;
      }
    }
  }

  // After reset: begins with the sinks of the lane's heads, as with a token that has no value. Only
  // the warp that has an item's first chunk does so, since an item has its sinks once.
  __device__ __forceinline__ void add_sinks(const DecodeArgs& args, const Queries& queries) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int n = 0; n < T::kHeadTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // columns that are not stored have any head's
        const int column = 8 * n + lane % 4 * 2 + i;
        const int member = T::kRows ? column % args.group : min(column, args.group - 1);
        const int head = queries.head * args.group + member;
        const float sink = sink_of<typename T::Q>(args.sinks, args.wide_sinks, head);
        peak[n][i] = fmaxf(sink, kNoMax);
        total[n][i] = lane < 4 ? exp2_approx(sink - peak[n][i]) : 0.0f;
      }
    }
  }

  // This lane's part of a fragment.
  __device__ __forceinline__ float4 fragment(int n, int j) const {
    const auto& v = out[n][j];
    return {v[0], v[1], v[2], v[3]};
  }

  // Sums over the tokens of every lane.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int n = 0; n < T::kHeadTiles; ++n) {
      for (int i = 0; i < 2; ++i) {
        for (int offset = 4; offset < kWarpSize; offset *= 2) {
          total[n][i] += __shfl_xor_sync(kAllLanes, total[n][i], offset);
        }
      }
    }
  }

  // To other peaks: alpha is 2^(old - new) of the lane's two heads.
  __device__ __forceinline__ void rescale(int n, const float (&alpha)[2]) {
#pragma unroll
    for (int j = 0; j < T::kSteps; ++j) {
      for (int i = 0; i < 4; ++i) out[n][j][i] *= alpha[i % 2];
    }
    for (int i = 0; i < 2; ++i) total[n][i] *= alpha[i];
  }
};

// Where in the stage lane i's row of an ldmatrix lies: tokens i % 16, head_dim column step * 2 +
// i / 16 of 16 bytes.
template <typename T>
struct MatrixRows {
  uint32_t row, flip;
  __device__ MatrixRows() {
    const int lane = threadIdx.x % kWarpSize, token = lane % 16;
    row = token * T::kRowBytes;
    flip = ((lane / 16) ^ swizzle<T>(token)) * 16;
  }
  __device__ __forceinline__ uint32_t at(uint32_t base, int tile, int step) const {
    return base + tile * 16 * T::kRowBytes + row + ((step * 32) ^ flip);
  }
};

// S^T of some tiles of a chunk: tokens lane / 4 (+ 8) of a tile, heads 2 * (lane % 4) (+ 1).
template <typename T>
__device__ __forceinline__ void multiply_k(const MatrixRows<T>& rows, uint32_t k, const Query<T>& q,
                                           float (&s)[T::kTilesAtOnce][T::kHeadTiles][4]) {
  // A second chain: instructions wait for less. Tiles with rows have chains enough.
  constexpr int kOddTiles = T::kRows ? 1 : T::kHeadTiles;
  float odd[T::kTilesAtOnce][kOddTiles][4] = {};
#pragma unroll
  for (int m = 0; m < T::kTilesAtOnce; ++m) {
    if constexpr (T::kFp8) {
#pragma unroll
      for (int step = 0; step < T::kSteps / 2; ++step) {
        const Fragment f = load_matrices(rows.at(k, m, step));
        const Fragment a = {half2_of_e4m3(f.x), half2_of_e4m3(f.y), half2_of_e4m3(f.x >> 16),
                            half2_of_e4m3(f.y >> 16)};
        const Fragment b = {half2_of_e4m3(f.z), half2_of_e4m3(f.w), half2_of_e4m3(f.z >> 16),
                            half2_of_e4m3(f.w >> 16)};
#pragma unroll
        for (int n = 0; n < T::kHeadTiles; ++n) {
          const uint2 even_q = q.part(n, 2 * step), odd_q = q.part(n, 2 * step + 1);
          mma<typename T::M>(s[m][n], a, even_q.x, even_q.y);
          mma<typename T::M>(T::kRows ? s[m][n] : odd[m][n % kOddTiles], b, odd_q.x, odd_q.y);
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < T::kSteps; ++step) {
        const Fragment a = load_matrices(rows.at(k, m, step));
#pragma unroll
        for (int n = 0; n < T::kHeadTiles; ++n) {
          const uint2 part = q.part(n, step);
          mma<typename T::M>(step % 2 && !T::kRows ? odd[m][n % kOddTiles] : s[m][n], a, part.x,
                             part.y);
        }
      }
    }
    if constexpr (!T::kRows) {
#pragma unroll
      for (int n = 0; n < T::kHeadTiles; ++n) {
        for (int i = 0; i < 4; ++i) s[m][n][i] += odd[m][n][i];
      }
    }
  }
}

// O^T += V^T P^T for them; p are fragments of P^T.
template <typename T>
__device__ __forceinline__ void multiply_v(const MatrixRows<T>& rows, uint32_t v,
                                           const uint32_t (&p)[T::kTilesAtOnce][T::kHeadTiles][2],
                                           Sums<T>& sums) {
#pragma unroll
  for (int m = 0; m < T::kTilesAtOnce; ++m) {
    if constexpr (T::kFp8) {
#pragma unroll
      for (int step = 0; step < T::kSteps / 2; ++step) {
        const Fragment f = load_matrices_transposed(rows.at(v, m, step));
        // Bytes (d, token), (d + 1, token), (d, token + 1), (d + 1, token + 1): pair the tokens.
        const uint32_t x = __byte_perm(f.x, 0, 0x3120), y = __byte_perm(f.y, 0, 0x3120);
        const uint32_t z = __byte_perm(f.z, 0, 0x3120), w = __byte_perm(f.w, 0, 0x3120);
        const Fragment a = {half2_of_e4m3(x), half2_of_e4m3(x >> 16), half2_of_e4m3(y),
                            half2_of_e4m3(y >> 16)};
        const Fragment b = {half2_of_e4m3(z), half2_of_e4m3(z >> 16), half2_of_e4m3(w),
                            half2_of_e4m3(w >> 16)};
#pragma unroll
        for (int n = 0; n < T::kHeadTiles; ++n) {
          mma<typename T::M>(sums.out[n][2 * step], a, p[m][n][0], p[m][n][1]);
          mma<typename T::M>(sums.out[n][2 * step + 1], b, p[m][n][0], p[m][n][1]);
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < T::kSteps; ++step) {
        const Fragment f = load_matrices_transposed(rows.at(v, m, step));
        const Fragment a = {f.x, f.z, f.y, f.w};
#pragma unroll
        for (int n = 0; n < T::kHeadTiles; ++n) {
          mma<typename T::M>(sums.out[n][step], a, p[m][n][0], p[m][n][1]);
        }
      }
    }
  }
}

// Tiles at `stage`, their first token at position `first`.
template <typename T>
__device__ __forceinline__ void attend_tiles(const MatrixRows<T>& rows, uint32_t stage, int first,
                                             const Visible& seen, float soft_cap, const Query<T>& q,
                                             Sums<T>& sums) {
  float s[T::kTilesAtOnce][T::kHeadTiles][4] = {};
  multiply_k<T>(rows, stage, q, s);
  const Visible by_all = q.seen_by_all(seen);
  const bool whole = first >= by_all.begin && first + 16 * T::kTilesAtOnce <= by_all.end;
  const int token = first + threadIdx.x % kWarpSize / 4;
  uint32_t p[T::kTilesAtOnce][T::kHeadTiles][2];
#pragma unroll
  for (int n = 0; n < T::kHeadTiles; ++n) {
    float peak[2] = {sums.peak[n][0], sums.peak[n][1]};
#pragma unroll
    for (int m = 0; m < T::kTilesAtOnce; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x = s[m][n][i] * q.unit[n][i % 2];
        if (soft_cap > 0.0f) {
          const float cap = soft_cap * kLog2E;
          x = cap * tanh_of(__fdividef(x, cap));
        }
        if (!whole) {
          const int position = token + 16 * m + 8 * (i / 2);
          const Visible by_one = q.seen_by(8 * n + threadIdx.x % 4 * 2 + i % 2, seen);
          if (position < by_one.begin || position >= by_one.end) x = -INFINITY;
        }
        s[m][n][i] = x;
        peak[i % 2] = fmaxf(peak[i % 2], x);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (int offset = 4; offset < kWarpSize; offset *= 2) {
        peak[i] = fmaxf(peak[i], __shfl_xor_sync(kAllLanes, peak[i], offset));
      }
    }
    const bool higher = peak[0] > sums.peak[n][0] || peak[1] > sums.peak[n][1];
    if (__any_sync(kAllLanes, higher)) {
      const float alpha[2] = {exp2_approx(sums.peak[n][0] - peak[0]),
                              exp2_approx(sums.peak[n][1] - peak[1])};
      sums.rescale(n, alpha);
      sums.peak[n][0] = peak[0];
      sums.peak[n][1] = peak[1];
    }
#pragma unroll
    for (int m = 0; m < T::kTilesAtOnce; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[m][n][i] = exp2_approx(s[m][n][i] - peak[i % 2]);
        sums.total[n][i % 2] += s[m][n][i];
      }
      p[m][n][0] = transpose(pack<typename T::M>(s[m][n][0], s[m][n][1]));
      p[m][n][1] = transpose(pack<typename T::M>(s[m][n][2], s[m][n][3]));
    }
  }
  multiply_v<T>(rows, stage + T::kHalfBytes, p, sums);
}

// One chunk, its first token at position `first`, in a stage.
template <typename T>
__device__ __forceinline__ void attend(const MatrixRows<T>& rows, uint32_t stage, int first,
                                       const Visible& seen, float soft_cap, const Query<T>& q,
                                       Sums<T>& sums) {
#pragma unroll 1  // side by side they would need more registers
  for (int m = 0; m < T::kTokenTiles; m += T::kTilesAtOnce) {
    attend_tiles<T>(rows, stage + m * 16 * T::kRowBytes, first + 16 * m, seen, soft_cap, q, sums);
  }
}

// Element i of fragment j, for the lane of that number: its head of the group and its dimension.
// One branch asks whether the result is FP8, so that instructions that run lie together: they are
// cold, since other kernels ran after the last layer's call.
template <typename T>
__device__ __forceinline__ void store_fragment(const DecodeArgs& args, const Queries& queries,
                                               int j, int lane, float4 v) {
  const float values[4] = {v.x, v.y, v.z, v.w};
  const float v_scale = args.kv_scale ? args.kv_scale[args.kv_heads + queries.head] : 1.0f;
  const int64_t first_row =
      (static_cast<int64_t>(queries.token) * args.kv_heads + queries.head) * args.group;
  const int first_column = j / T::kSteps * 8 + lane % 4 * 2;
  const int first_d = j % T::kSteps * 16 + (T::kFp8 ? lane / 4 * 2 : lane / 4);
  const auto each = [&](const auto& store) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = first_column + i % 2, d = first_d + i / 2 * (T::kFp8 ? 1 : 8);
      int64_t row = first_row + column;
      if constexpr (T::kRows) {  // heads of other KV heads lie between those of two queries
        row += static_cast<int64_t>(column / args.group) * (args.kv_heads - 1) * args.group;
      }
      if (column < args.group * (T::kRows ? queries.rows : 1)) {
        store(row * T::kHeadDim + d, values[i] * v_scale);
      }
    }
  };
  if (args.out_scale) [[unlikely]] {
    const float out_scale = args.out_scale[0];
    each([&](int64_t at, float value) {
      store_rounded(static_cast<__nv_fp8_e4m3*>(args.out) + at, value / out_scale);
    });
  } else {
    each([&](int64_t at, float value) {
      store_rounded(static_cast<typename T::Q*>(args.out) + at, value);
    });
  }
}

}  // namespace fusewright::attention
