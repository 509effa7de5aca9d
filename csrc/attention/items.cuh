// One sequence and KV head, an item, for clusters of blocks or a team of a block's warps: they take
// its chunks in turn, and their sums meet in shared memory; those of several clusters in memory.
#pragma once

#include "stream.cuh"

namespace fusewright::attention {

constexpr int kMaxCluster = 8;
constexpr int kMaxParts = 16;  // clusters an item

// Arrivals at sums that meet in memory; every launch leaves zeros. One stream a device may run this
// at a time.
static __device__ unsigned arrivals[kMaxItems];

// Whether this block is the last of `count` to come, which then sees what all have written.
__device__ __forceinline__ bool block_comes_last(unsigned* arrival, int count) {
  const unsigned last = count - 1;
  __threadfence();
  __syncthreads();
  const bool here = threadIdx.x == 0 && atomicInc(arrival, last) == last;
  __threadfence();
  return __syncthreads_or(here);
}

// Shared memory behind the rings: what the cluster's blocks send to this one. Where warps' sums lie
// in their rings: fragments, then (peak, peak, total, total) of the four lanes of a row.
template <typename T>
struct Inbox {
  static constexpr int kMaximaPerBlock = 4 * T::kHeadTiles;
  static constexpr int kFragmentBytes = T::kFragments * kWarpSize * 16;
  static constexpr int kBytes = kFragmentBytes + kMaxCluster * kMaximaPerBlock * 16;
};

__device__ __forceinline__ void add_scaled(float4& to, const float4& v, float even, float odd) {
  to.x += v.x * even;
  to.y += v.y * odd;
  to.z += v.z * even;
  to.w += v.w * odd;
}

// Merges two or more (peak, peak, total, total): their weights relative to the common peaks.
template <int kCount>
__device__ __forceinline__ float4 merge_maxima(const float4 (&maxima)[kCount],
                                               float2 (&weights)[kCount]) {
  float4 all = {kNoMax, kNoMax, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    all.x = fmaxf(all.x, maxima[i].x);
    all.y = fmaxf(all.y, maxima[i].y);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    weights[i] = {exp2_approx(maxima[i].x - all.x), exp2_approx(maxima[i].y - all.y)};
    all.z += maxima[i].z * weights[i].x;
    all.w += maxima[i].w * weights[i].y;
  }
  return all;
}

__device__ __forceinline__ float4 divided(const float4& v, float even, float odd) {
  const float of_even = reciprocal_approx(even), of_odd = reciprocal_approx(odd);
  return {v.x * of_even, v.y * of_odd, v.z * of_even, v.w * of_odd};
}

// Where the sums of a team's warps lie: fragments at the begin of their rings, maxima behind.
template <typename T, int kTeam>
struct Team {
  uint32_t rings;

  __device__ __forceinline__ float4 maxima(int entry, float2 (&weights)[kTeam]) const {
    float4 maxima[kTeam];
#pragma unroll
    for (int w = 0; w < kTeam; ++w) {
      maxima[w] = load_shared(rings + w * T::kRingBytes + Inbox<T>::kFragmentBytes + entry * 16);
    }
    return merge_maxima<kTeam>(maxima, weights);
  }

  // Part i of all fragments; maxima of its row.
  __device__ __forceinline__ float4 sum(int i, float4& row) const {
    float2 weights[kTeam];
    row = maxima(i / kWarpSize / T::kSteps * 4 + i % 4, weights);
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < kTeam; ++w) {
      add_scaled(sum, load_shared(rings + w * T::kRingBytes + i * 16), weights[w].x, weights[w].y);
    }
    return sum;
  }
};

// A team within a block: its threads store what its warps have left in the rings.
template <typename T, int kTeam>
__device__ __forceinline__ void merge_team(const DecodeArgs& args, uint32_t rings, int thread,
                                           const Queries& queries) {
  const Team<T, kTeam> team{rings};
#pragma unroll
  for (int i = thread; i < T::kFragments * kWarpSize; i += kTeam * kWarpSize) {
    float4 row;
    const float4 sum = team.sum(i, row);
    store_fragment<T>(args, queries, i / kWarpSize, i % kWarpSize, divided(sum, row.z, row.w));
  }
}

// Who works on an item: warps that take its chunks in turn, `step` of them, of which this is number
// `ahead`. Clusters of blocks (of 4 warps each), or a team of 4, 2 or 1 warps of a block.
struct Place {
  int item, seq, head, ahead, step;
  int rank, cluster;  // 0: no cluster
  int part, parts;    // this cluster's number, and how many there are
};

// A cluster's blocks exchange their sums: block r gets the r-th part of all fragments from every
// block, and stores that part of the result. Stores into another block's memory count down the
// barrier there, so that nobody waits for more than its own part. Of several clusters, the r-th
// block that comes last merges what all r-th blocks have left in memory.
template <typename T, int kCluster, bool kSeveral>
struct Exchange {
  using Box = Inbox<T>;
  static constexpr int kAll = T::kFragments * kWarpSize, kPart = kAll / kCluster;
  static constexpr int kSharers = kCluster / 2;  // threads a fragment, two blocks' sums each
  uint32_t rings, inbox, arrived;
  int rank;

  __device__ __forceinline__ void send() const {
    const Team<T, kWarps> team{rings};
#pragma unroll
    for (int i = threadIdx.x; i < kAll; i += kThreads) {
      float4 row;
      const float4 sum = team.sum(i, row);
      store_to_rank(inbox + (rank * kPart + i % kPart) * 16, arrived, i / kPart, sum);
    }
    const int to = threadIdx.x / Box::kMaximaPerBlock, entry = threadIdx.x % Box::kMaximaPerBlock;
    if (to < kCluster) {
      float2 weights[kWarps];
      store_to_rank(inbox + Box::kFragmentBytes + (rank * Box::kMaximaPerBlock + entry) * 16,
                    arrived, to, team.maxima(entry, weights));
    }
  }

  // Where a cluster leaves its sums: the fragments, then the maxima of each one's row.
  __device__ __forceinline__ float4* left_by(const DecodeArgs& args, const Place& p,
                                             int part) const {
    return args.partials + static_cast<int64_t>(p.item * p.parts + part) * 2 * kAll;
  }

  __device__ __forceinline__ void merge(const DecodeArgs& args, const Place& p, int token) const {
    const int sharer = threadIdx.x % kSharers;
#pragma unroll
    for (int base = 0; base < kPart; base += kThreads / kSharers) {
      const int index = base + static_cast<int>(threadIdx.x) / kSharers;
      const bool live = index < kPart;
      const int i = rank * kPart + min(index, kPart - 1);
      const int fragment = i / kWarpSize, lane = i % kWarpSize;
      float4 maxima[2], sums[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int from = sharer + k * kSharers;
        maxima[k] =
            load_shared(inbox + Box::kFragmentBytes +
                        (from * Box::kMaximaPerBlock + fragment / T::kSteps * 4 + lane % 4) * 16);
        sums[k] = load_shared(inbox + (from * kPart + i - rank * kPart) * 16);
      }
      float2 weights[2];
      float4 all = merge_maxima<2>(maxima, weights);
      float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
      add_scaled(sum, sums[0], weights[0].x, weights[0].y);
      add_scaled(sum, sums[1], weights[1].x, weights[1].y);
      float even = all.x, odd = all.y;
#pragma unroll
      for (int offset = 1; offset < kSharers; offset *= 2) {
        even = fmaxf(even, __shfl_xor_sync(kAllLanes, even, offset));
        odd = fmaxf(odd, __shfl_xor_sync(kAllLanes, odd, offset));
      }
      const float alpha = exp2_approx(all.x - even), beta = exp2_approx(all.y - odd);
      float values[6] = {sum.x * alpha, sum.y * beta,  sum.z * alpha,
                         sum.w * beta,  all.z * alpha, all.w * beta};
#pragma unroll
      for (int offset = 1; offset < kSharers; offset *= 2) {
#pragma unroll
        for (float& value : values) value += __shfl_xor_sync(kAllLanes, value, offset);
      }
      if (live && sharer == 0) {
        const float4 total = {values[0], values[1], values[2], values[3]};
        if constexpr (kSeveral) {
          float4* to = left_by(args, p, p.part) + i;
          __stcg(to, total);
          __stcg(to + kAll, {even, odd, values[4], values[5]});
        } else {
          store_fragment<T>(args, {token, 1, p.head}, fragment, lane,
                            divided(total, values[4], values[5]));
        }
      }
    }
  }

  __device__ __forceinline__ void gather(const DecodeArgs& args, const Place& p, int token) const {
    if (!block_comes_last(arrivals + p.item * kMaxCluster + rank, p.parts)) return;
    constexpr int kAtOnce = 8;
    for (int i = rank * kPart + threadIdx.x; i < (rank + 1) * kPart; i += kThreads) {
      float4 row = {kNoMax, kNoMax, 0.0f, 0.0f}, sum = {0.0f, 0.0f, 0.0f, 0.0f};
      for (int base = 0; base < p.parts; base += kAtOnce) {
        float4 rows[kAtOnce + 1], sums[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const float4* from = left_by(args, p, base + k) + i;
          const bool live = base + k < p.parts;
          rows[k] = live ? __ldcg(from + kAll) : float4{kNoMax, kNoMax, 0.0f, 0.0f};
          sums[k] = live ? __ldcg(from) : float4{0.0f, 0.0f, 0.0f, 0.0f};
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
      store_fragment<T>(args, {token, 1, p.head}, i / kWarpSize, i % kWarpSize,
                        divided(sum, row.z, row.w));
    }
  }

  __device__ __forceinline__ void run(const DecodeArgs& args, const Place& p, int token) const {
    send();
    barrier_wait_cluster(arrived, 0);
    merge(args, p, token);
    if constexpr (kSeveral) gather(args, p, token);
  }
};

template <typename T>
__device__ __forceinline__ void store_sums(const DecodeArgs& args, const Queries& queries,
                                           const Sums<T>& sums) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int n = 0; n < T::kHeadTiles; ++n) {
#pragma unroll
    for (int j = 0; j < T::kSteps; ++j) {
      store_fragment<T>(args, queries, n * T::kSteps + j, lane,
                        divided(sums.fragment(n, j), sums.total[n][0], sums.total[n][1]));
    }
  }
}

template <typename T>
__device__ __forceinline__ void leave_sums(uint32_t ring, const Sums<T>& sums) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int n = 0; n < T::kHeadTiles; ++n) {
#pragma unroll
    for (int j = 0; j < T::kSteps; ++j) {
      store_shared(ring + ((n * T::kSteps + j) * kWarpSize + lane) * 16, sums.fragment(n, j));
    }
    if (lane < 4) {
      store_shared(ring + Inbox<T>::kFragmentBytes + (n * 4 + lane) * 16,
                   {sums.peak[n][0], sums.peak[n][1], sums.total[n][0], sums.total[n][1]});
    }
  }
}

template <typename T>
__device__ __forceinline__ Place place_of(const DecodeArgs& args, int cluster, int team) {
  const int warp = threadIdx.x / kWarpSize;
  Place p;
  p.cluster = cluster;
  p.rank = cluster > 0 ? blockIdx.x % cluster : 0;
  p.part = blockIdx.y;
  p.parts = 1;
  // Teams: first one in every block, then the second ones.
  p.item = cluster > 0 ? blockIdx.x / cluster : blockIdx.x + warp / team * gridDim.x;
  p.seq = p.item / args.kv_heads;
  p.head = p.item % args.kv_heads;
  p.step = cluster > 0 ? cluster * kWarps : team;
  p.ahead = cluster > 0 ? warp * cluster + p.rank : warp % team;
  return p;
}

// Whether an item of that many chunks gains from all of its `parts` clusters of `step` warps: the
// first ones of two or three come near to the limit by themselves.
__host__ __device__ __forceinline__ bool is_long(int64_t chunks, int step, int parts) {
  return chunks > (parts > 3 ? 8 : 32) * step;
}

template <typename T>
__device__ __forceinline__ void start_item(const DecodeArgs& args, Stream<T>& stream,
                                           const Place& p) {
  // Before the lengths are here, as many as may be: what is beyond the end is not copied.
  const int begin = args.window > 0 ? visible(args.seq_lens[p.seq], args.window).begin : 0;
  stream.seq = p.seq;
  stream.step = p.step;
  stream.first = begin / T::kChunk + p.ahead;
  stream.left = 1 << 20;
  stream.take_batch();
}

template <typename T>
__device__ __forceinline__ void run_item(const DecodeArgs& args, Stream<T>& stream, uint32_t rings,
                                         uint32_t arrived, const Place& p) {
  const int warp = threadIdx.x / kWarpSize;
  const int chunks = p.seq < args.num_seqs ? chunks_of<T>(args, {}, p.seq) : 0;
  const int count = chunks > p.ahead ? (chunks - p.ahead + p.step - 1) / p.step : 0;
  Ring<T> ring{rings + warp * T::kRingBytes};
  stream.left = max(count - stream.next.count, 0);
  stream.next.count = min(stream.next.count, count);
  const int first = stream.next.first;
  const int token = chunks > 0 ? args.query_start[p.seq] : 0;
  const Queries queries = {token, 1, p.head};
  const unsigned fresh = fresh_chunks<T>(args, stream.next);
  int filled = 0;
  for (; filled < T::kStages && !(fresh >> filled & 1); ++filled) {
    stream.copy_next(ring.stage());
    ring.advance();
  }
  Sums<T> sums;
  sums.reset();
  if (args.sinks && p.ahead == 0) sums.add_sinks(args, queries);
  wait_for_previous();
  start_next();  // not before the wait: the next kernel may read early what those before this wrote
  if (p.cluster > 0 && chunks == 0) {
    if (p.cluster > 1) cluster_wait();
    return;
  }
  for (; filled < T::kStages; ++filled) {
    stream.copy_next(ring.stage());
    ring.advance();
  }
  if (chunks > 0) {
    Query<T> q;
    q.load(args, queries, ring.end());
    attend_chunks<T>(stream, ring, first, p.step, count, visible(args.seq_lens[p.seq], args.window),
                     q, sums);
    sums.finish();
  }
  if (p.step == 1) {
    if (chunks > 0) store_sums<T>(args, queries, sums);
    return;
  }
  leave_sums<T>(ring.base, sums);
  __syncthreads();
  const uint32_t inbox = rings + kWarps * T::kRingBytes;
  if (p.cluster > 1) {
    cluster_wait();  // every block has started
    if (p.parts > 1) [[unlikely]] {
      if (p.cluster == 8) {
        Exchange<T, 8, true>{rings, inbox, arrived, p.rank}.run(args, p, token);
      } else {
        Exchange<T, 2, true>{rings, inbox, arrived, p.rank}.run(args, p, token);
      }
    } else if (p.cluster == 8) {
      Exchange<T, 8, false>{rings, inbox, arrived, p.rank}.run(args, p, token);
    } else if (p.cluster == 4) {
      Exchange<T, 4, false>{rings, inbox, arrived, p.rank}.run(args, p, token);
    } else {
      Exchange<T, 2, false>{rings, inbox, arrived, p.rank}.run(args, p, token);
    }
  } else if (chunks > 0 && p.step == kWarps) {
    merge_team<T, kWarps>(args, rings, threadIdx.x, queries);
  } else if (chunks > 0) {
    merge_team<T, 2>(args, rings + (warp & ~1) * T::kRingBytes, threadIdx.x % (2 * kWarpSize),
                     queries);
  }
}

}  // namespace fusewright::attention
