// A batch in which some sequences are rows of one: whatever the grid, its blocks divide the items
// anew, since there are fewer than its shape has room for.
#pragma once

#include "cuts.cuh"

namespace fusewright::attention {

constexpr int kLeastChunks = 2;  // of a warp, in a part of an item

// How items are divided among the blocks' teams of warps. A KV head has `slots` teams; those of an
// item are its parts.
struct Division {
  int team, slots;
};

// Sums of a block's part of an item, in memory: fragments, then the maxima of their rows.
template <typename T>
struct Part {
  static constexpr int kAll = T::kFragments * kWarpSize, kMaxima = 4 * T::kHeadTiles;
  static constexpr int kFloat4s = kAll + kMaxima;

  static __device__ __forceinline__ int maxima_of(int i) {
    return kAll + i / kWarpSize / T::kSteps * 4 + i % 4;
  }
};

// Blocks leave their sums of an item's parts; the one that comes last merges them in order.
template <typename T>
__device__ __forceinline__ void merge_parts(const DecodeArgs& args, uint32_t rings, int slot,
                                            int part, int parts, unsigned* arrival,
                                            const Queries& queries) {
  using P = Part<T>;
  const auto left_by = [&](int which) {
    const int64_t block = static_cast<int64_t>(slot - part + which) * args.kv_heads + queries.head;
    return args.partials + block * P::kFloat4s;
  };
  const int tiles = (args.group * queries.rows + 7) / 8;
  const int used = tiles * T::kSteps * kWarpSize;
  const Team<T, kWarps> team{rings};
  float4* to = left_by(part);
  for (int i = threadIdx.x; i < used; i += kThreads) {
    float4 row;
    __stcg(to + i, team.sum(i, row));
    if (i % kWarpSize < 4 && i / kWarpSize % T::kSteps == 0) __stcg(to + P::maxima_of(i), row);
  }
  if (!block_comes_last(arrival, parts)) return;
  constexpr int kAtOnce = 8;
  for (int i = threadIdx.x; i < used; i += kThreads) {
    float4 row = {kNoMax, kNoMax, 0.0f, 0.0f}, sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int base = 0; base < parts; base += kAtOnce) {
      float4 rows[kAtOnce + 1], sums[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const bool live = base + k < parts;
        const float4* from = left_by(live ? base + k : part);
        rows[k] = live ? __ldcg(from + P::maxima_of(i)) : float4{kNoMax, kNoMax, 0.0f, 0.0f};
        sums[k] = live ? __ldcg(from + i) : float4{0.0f, 0.0f, 0.0f, 0.0f};
      }
      rows[kAtOnce] = row;
      float2 weights[kAtOnce + 1];
      row = merge_maxima<kAtOnce + 1>(rows, weights);
      const float4 before = sum;
      sum = {0.0f, 0.0f, 0.0f, 0.0f};
      add_scaled(sum, before, weights[kAtOnce].x, weights[kAtOnce].y);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) add_scaled(sum, sums[k], weights[k].x, weights[k].y);
    }
    store_fragment<T>(args, queries, i / kWarpSize, i % kWarpSize, divided(sum, row.z, row.w));
  }
}

// A team's part of an item. Every warp of the block comes here; those without an item have no
// chunks.
template <typename T>
__device__ __forceinline__ void run_part(const DecodeArgs& args, const Neighbors<T>& neighbors,
                                         const int* starts, uint32_t rings, const Division& how) {
  const int warp = threadIdx.x / kWarpSize, team = how.team;
  const int blocks = gridDim.x * gridDim.y, block = blockIdx.y * gridDim.x + blockIdx.x;
  const int number = block + warp / team * blocks;
  const int slot = number / args.kv_heads, head = number % args.kv_heads;
  const bool idle = slot >= how.slots || slot >= starts[args.num_seqs];
  const Row<T> row{starts, args.num_seqs, 1};
  const int seq = idle ? 0 : row.sequence_at(slot);
  const int part = idle ? 0 : slot - starts[seq], parts = idle ? 1 : starts[seq + 1] - starts[seq];
  const int rows = idle ? 1 : neighbors.rows(seq);
  const Visible seen = visible_of_rows(args.seq_lens[seq], args.window, rows);
  const int chunks = idle ? 0 : (seen.end + T::kChunk - 1) / T::kChunk - seen.begin / T::kChunk;
  const int step = team * parts, ahead = part * team + warp % team;
  const int count = chunks > ahead ? (chunks - ahead + step - 1) / step : 0;
  const int first = seen.begin / T::kChunk + ahead;
  const Queries queries = {args.query_start[seq] - rows + 1, rows, head};

  Stream<T> stream(args, head, nullptr, neighbors);
  stream.seq = seq;
  stream.step = step;
  stream.first = first;
  stream.left = count;
  stream.take_batch();
  Ring<T> ring{rings + warp * T::kRingBytes};
  const unsigned fresh = fresh_chunks<T>(args, stream.next);
  int filled = 0;
  for (; filled < T::kStages && !(fresh >> filled & 1); ++filled) {
    stream.copy_next(ring.stage());
    ring.advance();
  }
  wait_for_previous();
  start_next();
  for (; filled < T::kStages; ++filled) {
    stream.copy_next(ring.stage());
    ring.advance();
  }
  Sums<T> sums;
  sums.reset();
  if (count > 0) {
    Query<T> q;
    q.load(args, queries, ring.end());
    if (args.sinks && ahead == 0) sums.add_sinks(args, queries);
    attend_chunks<T>(stream, ring, first, step, count, seen, q, sums);
    sums.finish();
  }
  if (team == 1) {
    if (count > 0) store_sums<T>(args, queries, sums);
    return;
  }
  leave_sums<T>(ring.base, sums);
  __syncthreads();
  if (idle) return;
  if (team == 2) {
    merge_team<T, 2>(args, rings + (warp & ~1) * T::kRingBytes, threadIdx.x % (2 * kWarpSize),
                     queries);
  } else if (parts == 1) {
    merge_team<T, kWarps>(args, rings, threadIdx.x, queries);
  } else {
    unsigned* arrival = arrivals + seq * args.kv_heads + head;
    merge_parts<T>(args, rings, slot, part, parts, arrival, queries);
  }
}

// The whole block. T has rows; `starts` has num_seqs + 1 places.
template <typename T>
__device__ __forceinline__ void run_rows(const DecodeArgs& args, int* starts, Notes& notes,
                                         uint32_t rings) {
  __shared__ unsigned words[kFollowWords];
  note_neighbors(args, words);
  const Neighbors<T> neighbors{words, most_rows(args.group)};
  const auto size_of = [&](int seq) { return chunks_of<T>(args, neighbors, seq); };
  const Weights chunks = lay_out(args.num_seqs, starts, notes, size_of);
  const int blocks = gridDim.x * gridDim.y, total = starts[args.num_seqs];
  Division how{kWarps, blocks / args.kv_heads};
  for (; how.team > 1 && how.slots < chunks.count; how.team /= 2) {
    how.slots = blocks * kWarps / (how.team / 2) / args.kv_heads;
  }
  // Parts have equal work, as far as no slot remains without: sum over items of ceil(size / work)
  // is at most total / work + count.
  const int spare = max(how.slots - chunks.count, 1);
  const int work = max((total + spare - 1) / spare, kLeastChunks * how.team);
  const auto parts_of = [&](int size) {
    return how.team < kWarps ? min(size, 1) : min((size + work - 1) / work, kMaxParts);
  };
  const int most = parts_of(chunks.most);
  const float longest = __fdividef(chunks.most, max(most, 1) * how.team);
  const float equal = __fdividef(total, how.slots * how.team);
  if (how.slots >= chunks.count && is_even<T>(longest, equal)) {
    const auto parts = [&](int seq) { return parts_of(chunks_of<T>(args, neighbors, seq)); };
    lay_out(args.num_seqs, starts, notes, parts);
    run_part<T>(args, neighbors, starts, rings, how);
  } else {
    run_shares<T>(args, neighbors, starts, chunks.most, notes, rings);
  }
}

}  // namespace fusewright::attention
