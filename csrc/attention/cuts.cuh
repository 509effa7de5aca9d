// A batch in equal shares, a share for one warp of each KV head: what cut sequences cost.
#pragma once

#include "items.cuh"

namespace fusewright::attention {

constexpr int kSharesMergedAtOnce = 16;
constexpr int kMaxPartials = 1 << 13;  // two a warp of the grid

// Counts like `arrivals`, at the first of the partials that one warp merges.
static __device__ unsigned group_arrivals[kMaxPartials];

// The shares that hold a cut sequence, and where they leave their sums of it: a share has one place
// for a sequence that is cut at its begin, one for one that is cut at its end only.
template <typename T>
struct Cut {
  const DecodeArgs& args;
  int head, first, last;
  bool first_starts_before;

  __device__ __forceinline__ int index_of(int share) const {
    return (2 * share + (share == first && first_starts_before)) * args.kv_heads + head;
  }
  __device__ __forceinline__ float4* partial_of(int share) const {
    constexpr int kFloat4s = (T::kFragments + T::kHeadTiles) * kWarpSize;
    return args.partials + static_cast<int64_t>(index_of(share)) * kFloat4s +
           threadIdx.x % kWarpSize;
  }
};

template <typename T>
__device__ __forceinline__ void write_partial(float4* to, const Sums<T>& sums) {
#pragma unroll
  for (int n = 0; n < T::kHeadTiles; ++n) {
#pragma unroll
    for (int j = 0; j < T::kSteps; ++j) {
      __stcg(to + (n * T::kSteps + j) * kWarpSize, sums.fragment(n, j));
    }
    __stcg(to + (T::kFragments + n) * kWarpSize,
           {sums.peak[n][0], sums.peak[n][1], sums.total[n][0], sums.total[n][1]});
  }
}

// The sums of `count` shares, `step` apart from `share` on, several at a time: a load from L2 takes
// longer than what is done with it.
template <typename T>
__device__ __forceinline__ void merge_partials(const Cut<T>& cut, int share, int step, int count,
                                               Sums<T>& sums) {
  constexpr int kAtOnce = T::kHeadTiles == 1 ? 2 : 1;
  sums.reset();
  for (int base = 0; base < count; base += kAtOnce) {
#pragma unroll
    for (int n = 0; n < T::kHeadTiles; ++n) {
      float4 maxima[kAtOnce + 1], parts[kAtOnce][T::kSteps];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const bool live = base + k < count;
        const float4* from = cut.partial_of(share + min(base + k, count - 1) * step);
        maxima[k] = __ldcg(from + (T::kFragments + n) * kWarpSize);
        if (!live) maxima[k] = {kNoMax, kNoMax, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < T::kSteps; ++j) {
          parts[k][j] = __ldcg(from + (n * T::kSteps + j) * kWarpSize);
        }
      }
      maxima[kAtOnce] = {sums.peak[n][0], sums.peak[n][1], sums.total[n][0], sums.total[n][1]};
      float2 weights[kAtOnce + 1];
      const float4 all = merge_maxima<kAtOnce + 1>(maxima, weights);
      sums.rescale(n, {weights[kAtOnce].x, weights[kAtOnce].y});
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int j = 0; j < T::kSteps; ++j) {
          const float4& v = parts[k][j];
          const float values[4] = {v.x, v.y, v.z, v.w};
          for (int i = 0; i < 4; ++i) {
            sums.out[n][j][i] += values[i] * (i % 2 ? weights[k].y : weights[k].x);
          }
        }
      }
      sums.peak[n][0] = all.x;
      sums.peak[n][1] = all.y;
      sums.total[n][0] = all.z;
      sums.total[n][1] = all.w;
    }
  }
}

// Whether this warp is the last of `count` to come, which then sees what all have written.
__device__ __forceinline__ bool warp_comes_last(unsigned* arrival, int count) {
  const unsigned last = count - 1;
  unsigned arrived = 0;
  __threadfence();
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) arrived = atomicInc(arrival, last);
  arrived = __shfl_sync(kAllLanes, arrived, 0);
  __threadfence();
  return arrived == last;
}

// Leaves this warp's sums of a cut sequence; true for the warp that came last, with all of them.
template <typename T>
__device__ __forceinline__ bool gather_partials(const DecodeArgs& args, const Row<T>& row,
                                                int share, int seq, int head, int begin, int end,
                                                Sums<T>& sums) {
  const int seq_begin = row.starts[seq], seq_end = row.starts[seq + 1];
  const int first = begin == seq_begin ? share : row.share_of(seq_begin);
  const int last = end == seq_end ? share : row.share_of(seq_end - 1);
  const Cut<T> cut{args, head, first, last, row.cut(first) < seq_begin};
  write_partial<T>(cut.partial_of(share), sums);
  const int leader = share - (share - first) % kSharesMergedAtOnce;
  const int count = min(last - leader + 1, kSharesMergedAtOnce);
  if (!warp_comes_last(group_arrivals + cut.index_of(leader), count)) return false;
  merge_partials<T>(cut, leader, 1, count, sums);
  const int groups = (last - first) / kSharesMergedAtOnce + 1;
  if (groups == 1) return true;
  write_partial<T>(cut.partial_of(leader), sums);
  if (!warp_comes_last(arrivals + seq * args.kv_heads + head, groups)) return false;
  merge_partials<T>(cut, first, kSharesMergedAtOnce, groups, sums);
  return true;
}

// Where a warp's chunks begin and which blocks hold the first is found before the wait for what the
// kernel ahead makes. Warps beyond the last share have nothing to do.
template <typename T>
__device__ __forceinline__ void run_share(const DecodeArgs& args, const Row<T>& row,
                                          const Neighbors<T>& neighbors, Ring<T> ring, int share,
                                          int head) {
  const bool idle = share >= row.num_shares;
  const int x_begin = idle ? 0 : row.cut(share), x_end = idle ? 0 : row.cut(share + 1);
  Stream<T> stream(args, head, &row, neighbors);
  stream.left = 0;
  stream.x = x_begin;
  stream.x_end = x_end;
  stream.take_batch();
  wait_for_previous();
  start_next();
  for (int i = 0; i < T::kStages; ++i) {
    stream.copy_next(ring.stage());
    ring.advance();
  }
  Sums<T> sums;
  for (int x = x_begin; x < x_end;) {
    const int seq = row.sequence_at(x);
    const int begin = x, end = min(row.starts[seq + 1], x_end);
    const Visible seen = neighbors.seen(args, seq);
    const int rows = neighbors.rows(seq);
    const Queries queries = {args.query_start[seq] - rows + 1, rows, head};
    Query<T> q;
    q.load(args, queries, ring.end());
    sums.reset();
    if (args.sinks && begin == row.starts[seq]) sums.add_sinks(args, queries);
    attend_chunks<T>(stream, ring, seen.begin / T::kChunk + x - row.starts[seq], 1, end - x, seen,
                     q, sums);
    x = end;
    const bool cut = begin > row.starts[seq] || end < row.starts[seq + 1];
    if (cut && !gather_partials<T>(args, row, share, seq, head, begin, end, sums)) continue;
    sums.finish();
    store_sums<T>(args, queries, sums);
  }
}

// Whether a division without cuts, whose longest part this is, is as good as equal shares. Twelve
// chunks are about what cuts cost; and who is done leaves its share of the bandwidth to the rest.
template <typename T>
__device__ __forceinline__ bool is_even(float longest, float share) {
  return longest <= 1.5f * share + 12 * 16 / T::kChunk;
}

// The whole block: cuts the row into shares, and runs those of this block's warps. `starts` and
// `longest` are of `lay_out`, of chunks.
template <typename T>
__device__ __forceinline__ void run_shares(const DecodeArgs& args, const Neighbors<T>& neighbors,
                                           const int* starts, int longest, Notes& notes,
                                           uint32_t rings) {
  const int warp = threadIdx.x / kWarpSize, total = starts[args.num_seqs];
  const int max_shares = gridDim.x * gridDim.y * kWarps / args.kv_heads;
  Row<T> row{starts, args.num_seqs, min(max_shares, max(total * T::kChunk / kLeastCutTokens, 1))};
  const int equal = total / row.num_shares;
  // Without cuts, a share begins and ends half a sequence at most from where equal ones do. That is
  // mostly near enough, and spares the search for the longest.
  row.whole = true;
  row.whole =
      is_even<T>(equal + 1 + longest, equal) || is_even<T>(longest_share<T>(row, notes), equal);
  const int stripe = (blockIdx.y * gridDim.x + blockIdx.x) * kWarps + warp;
  const Ring<T> ring{rings + warp * T::kRingBytes};
  run_share<T>(args, row, neighbors, ring, stripe / args.kv_heads, stripe % args.kv_heads);
}

}  // namespace fusewright::attention
