// Attention of one query a sequence over a paged KV cache (Kwon et al., 2023), one launch.
//
// Limit: memory. A call streams K and V of every sequence once. What it takes to stay near that:
// - Every warp streams by itself: a ring of chunks in its own shared memory, filled by 16-byte
//   copies, 24 KB ahead, eight warps a multiprocessor. No barrier between load and use but the
//   warp's own.
// - The grid is fixed by shapes; the work is divided in the kernel, from the lengths, in one of two
//   ways. Few sequences, short or alike: a cluster of blocks for each (sequence, KV head), whose
//   warps take its chunks in turn and whose sums meet in distributed shared memory. Otherwise: all
//   chunks of all sequences in one row, cut into equal shares, a share for one warp of each KV
//   head; cuts move to the end of a sequence that is near. The sums of a cut sequence meet in
//   memory, and the warp that comes last merges them, in order of the shares.
//
// Equal lengths, shapes and GPU give equal bits.
//
// Free of any framework: pointers, strides and a stream. The instructions need sm_90.
#pragma once

#include <atomic>

#include "shares.cuh"

namespace fusewright::attention {

constexpr int kMaxSeqs = 4096;
constexpr int kMaxItems = 1 << 16;  // (sequence, KV head) pairs
constexpr int kMaxGroup = 16;
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kMaxCluster = 16;

// Arrivals at cut sequences; every launch leaves zeros. One stream a device may run this at a time.
static __device__ unsigned arrivals[kMaxItems];

// ---- streaming

// What a warp has still to copy: chunks of a sequence, then those of the next in its share.
template <typename T>
struct Stream {
  const DecodeArgs& args;
  Copier<T> copier;
  const Row<T>* row;  // nullptr: only the one sequence
  int seq, first, step, left;
  int x, x_end;  // chunks of the row that follow
  Batch<T> now, next;
  int index = 0;

  __device__ Stream(const DecodeArgs& args_, int head, const Row<T>* row_)
      : args(args_), copier(args_, head), row(row_) {}

  __device__ __forceinline__ void take_batch() {
    if (left == 0 && row && x < x_end) {
      seq = row->sequence_at(x);
      const int begin = args.window > 0 ? visible(args.seq_lens[seq], args.window).begin : 0;
      first = begin / T::kChunk + x - row->starts[seq];
      step = 1;
      left = min(row->starts[seq + 1], x_end) - x;
      x += left;
    }
    next.count = 0;
    if (left == 0) return;
    next = find_pages<T>(args, seq, first, step, left);
    first += next.count * step;
    left -= next.count;
  }

  // The next chunk, if there is one, into a stage.
  __device__ __forceinline__ void copy_next(uint32_t stage) {
    if (index == now.count && next.count > 0) {
      now = next;
      index = 0;
      take_batch();
    }
    if (index < now.count) copier.copy(stage, now, index++);
    copy_async_commit();
  }
};

template <typename T>
struct Ring {
  uint32_t base;
  int at = 0;
  __device__ __forceinline__ uint32_t stage() const { return base + at * T::kStageBytes; }
  __device__ __forceinline__ void advance() { at = at + 1 == T::kStages ? 0 : at + 1; }
};

template <typename T>
__device__ __forceinline__ void fill(Stream<T>& stream, Ring<T>& ring) {
  stream.take_batch();
  for (int i = 0; i < T::kStages; ++i) {
    stream.copy_next(ring.stage());
    ring.advance();
  }
}

// `count` chunks, `step` apart from `first` on, of the sequence whose query this is.
template <typename T>
__device__ __forceinline__ void attend_chunks(Stream<T>& stream, Ring<T>& ring, int first, int step,
                                              int count, const Visible& seen, const Query<T>& q,
                                              Sums<T>& sums) {
  const MatrixRows<T> rows;
  for (int i = 0; i < count; ++i) {
    copy_async_wait<T::kStages - 1>();
    __syncwarp();
    attend<T>(rows, ring.stage(), (first + i * step) * T::kChunk, seen, stream.args.soft_cap, q,
              sums);
    __syncwarp();
    stream.copy_next(ring.stage());
    ring.advance();
  }
}

// ---- one sequence and KV head a cluster

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
  return {v.x / even, v.y / odd, v.z / even, v.w / odd};
}

// The block's warps have left their sums in the rings. Block r of the cluster gets the r-th part of
// all fragments, from every block.
template <typename T>
__device__ __forceinline__ void merge_block(const DecodeArgs& args, uint32_t rings, uint32_t inbox,
                                            int rank, int cluster, int token, int head) {
  using Box = Inbox<T>;
  constexpr int kAll = T::kFragments * kWarpSize;
  const int lane = threadIdx.x % kWarpSize, part = kAll / cluster;
  const auto merged_maxima = [&](int entry, float2(&weights)[kWarps]) {
    float4 maxima[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      maxima[w] = load_shared(rings + w * T::kRingBytes + Box::kFragmentBytes + entry * 16);
    }
    return merge_maxima<kWarps>(maxima, weights);
  };
#pragma unroll
  for (int i = threadIdx.x; i < kAll; i += kThreads) {
    const int fragment = i / kWarpSize;
    float2 weights[kWarps];
    const float4 maxima = merged_maxima(fragment / T::kSteps * 4 + lane % 4, weights);
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      add_scaled(sum, load_shared(rings + w * T::kRingBytes + i * 16), weights[w].x, weights[w].y);
    }
    if (cluster == 1) {
      store_fragment<T>(args, token, head, fragment, lane, divided(sum, maxima.z, maxima.w));
    } else {
      store_to_rank(inbox + (rank * part + i % part) * 16, i / part, sum);
    }
  }
  const int to = threadIdx.x / Box::kMaximaPerBlock, entry = threadIdx.x % Box::kMaximaPerBlock;
  if (cluster > 1 && to < cluster) {
    float2 weights[kWarps];
    store_to_rank(inbox + Box::kFragmentBytes + (rank * Box::kMaximaPerBlock + entry) * 16, to,
                  merged_maxima(entry, weights));
  }
}

// This block's part of the result: cluster / 2 threads a fragment, two blocks' sums each.
template <typename T>
__device__ __forceinline__ void merge_cluster(const DecodeArgs& args, uint32_t inbox, int rank,
                                              int cluster, int token, int head) {
  using Box = Inbox<T>;
  constexpr int kAll = T::kFragments * kWarpSize;
  const int part = kAll / cluster, sharers = cluster / 2;
  const int sharer = threadIdx.x % sharers;
  for (int base = 0; base < part; base += kThreads / sharers) {
    const int index = base + static_cast<int>(threadIdx.x) / sharers;
    const bool live = index < part;
    const int i = rank * part + min(index, part - 1);
    const int fragment = i / kWarpSize, lane = i % kWarpSize;
    float4 maxima[2], sums[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int from = sharer + k * sharers;
      maxima[k] =
          load_shared(inbox + Box::kFragmentBytes +
                      (from * Box::kMaximaPerBlock + fragment / T::kSteps * 4 + lane % 4) * 16);
      sums[k] = load_shared(inbox + (from * part + i - rank * part) * 16);
    }
    float2 weights[2];
    float4 all = merge_maxima<2>(maxima, weights);
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    add_scaled(sum, sums[0], weights[0].x, weights[0].y);
    add_scaled(sum, sums[1], weights[1].x, weights[1].y);
    float even = all.x, odd = all.y;
    for (int offset = 1; offset < sharers; offset *= 2) {
      even = fmaxf(even, __shfl_xor_sync(kAllLanes, even, offset));
      odd = fmaxf(odd, __shfl_xor_sync(kAllLanes, odd, offset));
    }
    even = exp2_approx(all.x - even);
    odd = exp2_approx(all.y - odd);
    float values[6] = {sum.x * even, sum.y * odd,  sum.z * even,
                       sum.w * odd,  all.z * even, all.w * odd};
    for (int offset = 1; offset < sharers; offset *= 2) {
#pragma unroll
      for (float& value : values) value += __shfl_xor_sync(kAllLanes, value, offset);
    }
    if (live && sharer == 0) {
      const float4 total = {values[0], values[1], values[2], values[3]};
      store_fragment<T>(args, token, head, fragment, lane, divided(total, values[4], values[5]));
    }
  }
}

// The warps of a cluster take the sequence's chunks in turn, blocks first.
template <typename T>
__device__ __forceinline__ void run_item(const DecodeArgs& args, Stream<T>& stream, uint32_t rings,
                                         uint32_t inbox, int seq, int head, int rank, int cluster,
                                         int count) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  Ring<T> ring{rings + warp * T::kRingBytes};
  const int first = stream.next.first, step = stream.next.step;
  for (int i = 0; i < T::kStages; ++i) {
    stream.copy_next(ring.stage());
    ring.advance();
  }
  const int token = args.query_start[seq];
  Query<T> q;
  q.load(args, token, head);
  Sums<T> sums;
  sums.reset();
  attend_chunks<T>(stream, ring, first, step, count, visible(args.seq_lens[seq], args.window), q,
                   sums);
  sums.finish();
#pragma unroll
  for (int n = 0; n < T::kHeadTiles; ++n) {
#pragma unroll
    for (int j = 0; j < T::kSteps; ++j) {
      const auto& v = sums.out[n][j];
      store_shared(ring.base + ((n * T::kSteps + j) * kWarpSize + lane) * 16,
                   {v[0], v[1], v[2], v[3]});
    }
    if (lane < 4) {
      store_shared(ring.base + Inbox<T>::kFragmentBytes + (n * 4 + lane) * 16,
                   {sums.peak[n][0], sums.peak[n][1], sums.total[n][0], sums.total[n][1]});
    }
  }
  __syncthreads();
  if (cluster > 1) cluster_wait();  // every block has started
  merge_block<T>(args, rings, inbox, rank, cluster, token, head);
  if (cluster == 1) return;
  cluster_arrive();
  cluster_wait();
  merge_cluster<T>(args, inbox, rank, cluster, token, head);
}

// ---- shares

// A share's sums of a sequence that is cut at its begin (`end` = 0) or at its end only (1).
template <typename T>
__device__ __forceinline__ float4* partial_of(const DecodeArgs& args, int share, int end,
                                              int head) {
  constexpr int kFloat4s = (T::kFragments + T::kHeadTiles) * kWarpSize;
  const int64_t slot = (2 * static_cast<int64_t>(share) + end) * args.kv_heads + head;
  return args.partials + slot * kFloat4s + threadIdx.x % kWarpSize;
}

template <typename T>
__device__ __forceinline__ void write_partial(float4* to, const Sums<T>& sums) {
#pragma unroll
  for (int n = 0; n < T::kHeadTiles; ++n) {
#pragma unroll
    for (int j = 0; j < T::kSteps; ++j) {
      const auto& v = sums.out[n][j];
      __stcg(to + (n * T::kSteps + j) * kWarpSize, {v[0], v[1], v[2], v[3]});
    }
    __stcg(to + (T::kFragments + n) * kWarpSize,
           {sums.peak[n][0], sums.peak[n][1], sums.total[n][0], sums.total[n][1]});
  }
}

template <typename T>
__device__ __forceinline__ void add_partial(const float4* from, Sums<T>& sums) {
  float4 parts[T::kFragments], maxima[T::kHeadTiles];
#pragma unroll
  for (int n = 0; n < T::kHeadTiles; ++n) {
    maxima[n] = __ldcg(from + (T::kFragments + n) * kWarpSize);
  }
#pragma unroll
  for (int j = 0; j < T::kFragments; ++j) parts[j] = __ldcg(from + j * kWarpSize);
#pragma unroll
  for (int n = 0; n < T::kHeadTiles; ++n) {
    const float peak[2] = {fmaxf(sums.peak[n][0], maxima[n].x),
                           fmaxf(sums.peak[n][1], maxima[n].y)};
    const float alpha[2] = {exp2_approx(sums.peak[n][0] - peak[0]),
                            exp2_approx(sums.peak[n][1] - peak[1])};
    const float beta[2] = {exp2_approx(maxima[n].x - peak[0]), exp2_approx(maxima[n].y - peak[1])};
    sums.rescale(n, alpha);
#pragma unroll
    for (int j = 0; j < T::kSteps; ++j) {
      const float4& v = parts[n * T::kSteps + j];
      const float values[4] = {v.x, v.y, v.z, v.w};
      for (int i = 0; i < 4; ++i) sums.out[n][j][i] += values[i] * beta[i % 2];
    }
    sums.total[n][0] += maxima[n].z * beta[0];
    sums.total[n][1] += maxima[n].w * beta[1];
    sums.peak[n][0] = peak[0];
    sums.peak[n][1] = peak[1];
  }
}

// Leaves this warp's sums of a cut sequence; true for the warp that came last, with all of them.
template <typename T>
__device__ __forceinline__ bool gather_partials(const DecodeArgs& args, const Row<T>& row,
                                                int share, int seq, int head, int begin, int end,
                                                Sums<T>& sums) {
  const int seq_begin = row.starts[seq], seq_end = row.starts[seq + 1];
  const int first = begin == seq_begin ? share : row.share_of(seq_begin);
  const int last = end == seq_end ? share : row.share_of(seq_end - 1);
  const bool first_starts_before = row.cut(first) < seq_begin;
  write_partial<T>(partial_of<T>(args, share, share == first && first_starts_before, head), sums);
  __threadfence();
  __syncwarp();
  unsigned arrived = 0;
  unsigned* arrival = arrivals + seq * args.kv_heads + head;
  if (threadIdx.x % kWarpSize == 0) arrived = atomicAdd(arrival, 1);
  arrived = __shfl_sync(kAllLanes, arrived, 0);
  if (arrived != static_cast<unsigned>(last - first)) return false;
  __threadfence();
  if (threadIdx.x % kWarpSize == 0) *arrival = 0;
  sums.reset();
  for (int s = first; s <= last; ++s) {
    add_partial<T>(partial_of<T>(args, s, s == first && first_starts_before, head), sums);
  }
  return true;
}

template <typename T>
__device__ __forceinline__ void run_share(const DecodeArgs& args, const Row<T>& row, uint32_t rings,
                                          int share, int head) {
  const int x_begin = row.cut(share), x_end = row.cut(share + 1);
  if (x_begin >= x_end) return;
  Ring<T> ring{rings + static_cast<int>(threadIdx.x) / kWarpSize * T::kRingBytes};
  Stream<T> stream(args, head, &row);
  stream.left = 0;
  stream.x = x_begin;
  stream.x_end = x_end;
  fill<T>(stream, ring);
  Sums<T> sums;
  for (int x = x_begin; x < x_end;) {
    const int seq = row.sequence_at(x);
    const int begin = x, end = min(row.starts[seq + 1], x_end);
    const Visible seen = visible(args.seq_lens[seq], args.window);
    const int token = args.query_start[seq];
    Query<T> q;
    q.load(args, token, head);
    sums.reset();
    attend_chunks<T>(stream, ring, seen.begin / T::kChunk + x - row.starts[seq], 1, end - x, seen,
                     q, sums);
    x = end;
    const bool cut = begin > row.starts[seq] || end < row.starts[seq + 1];
    if (cut && !gather_partials<T>(args, row, share, seq, head, begin, end, sums)) continue;
    sums.finish();
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int n = 0; n < T::kHeadTiles; ++n) {
#pragma unroll
      for (int j = 0; j < T::kSteps; ++j) {
        const auto& v = sums.out[n][j];
        store_fragment<T>(args, token, head, n * T::kSteps + j, lane,
                          divided({v[0], v[1], v[2], v[3]}, sums.total[n][0], sums.total[n][1]));
      }
    }
  }
}

// ---- the kernel

// Whether a cluster for each item is the better division: no warp of it has much more to do than in
// equal shares. What four chunks take is about what a cut costs.
template <typename T>
__device__ __forceinline__ bool prefer_items(const DecodeArgs& args, int cluster) {
  int total = 0, longest = 0;
  for (int seq = threadIdx.x % kWarpSize; seq < args.num_seqs; seq += kWarpSize) {
    const int chunks = chunks_of<T>(args, seq);
    total += chunks;
    longest = max(longest, chunks);
  }
  total = __reduce_add_sync(kAllLanes, total);
  longest = __reduce_max_sync(kAllLanes, longest);
  const int64_t share = static_cast<int64_t>(total) * args.kv_heads / (gridDim.x * kWarps);
  return longest / (cluster * kWarps) <= share + share / 8 + 4 * 16 / T::kChunk;
}

// cluster: blocks that share an item; 0: there are more items than clusters.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    decode_kernel(const __grid_constant__ DecodeArgs args, int cluster) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ int warp_sums[kWarps];
  const uint32_t rings = shared_address(memory);
  constexpr int kRings = kWarps * T::kRingBytes;
  const int warp = threadIdx.x / kWarpSize;
  if (cluster > 1) cluster_arrive();
  wait_for_previous();
  start_next();  // not before the wait: at most one unfinished kernel precedes any that has started

  if (cluster > 0) {
    const int item = blockIdx.x / cluster, rank = blockIdx.x % cluster;
    const int seq = item / args.kv_heads, head = item % args.kv_heads;
    const bool exists = seq < args.num_seqs;
    Stream<T> stream(args, head, nullptr);
    if (exists) {
      // Before the lengths are here, as many as may be: what is beyond the end is not copied.
      const int begin = args.window > 0 ? visible(args.seq_lens[seq], args.window).begin : 0;
      stream.seq = seq;
      stream.step = cluster * kWarps;
      stream.first = begin / T::kChunk + warp * cluster + rank;
      stream.left = 1 << 20;
      stream.take_batch();
    }
    if (prefer_items<T>(args, cluster)) {
      const int chunks = exists ? chunks_of<T>(args, seq) : 0;
      const int ahead = warp * cluster + rank;
      const int step = cluster * kWarps;
      const int count = chunks > ahead ? (chunks - ahead + step - 1) / step : 0;
      if (chunks > 0) {
        stream.left = max(count - stream.next.count, 0);
        stream.next.count = min(stream.next.count, count);
        run_item<T>(args, stream, rings, rings + kRings, seq, head, rank, cluster, count);
      } else if (cluster > 1) {
        cluster_wait();
      }
      return;
    }
    if (cluster > 1) cluster_wait();
  }
  int* starts = reinterpret_cast<int*>(memory + kRings);
  lay_out<T>(args, starts, warp_sums);
  const int total = starts[args.num_seqs];
  const int max_shares = gridDim.x * kWarps / args.kv_heads;
  Row<T> row{starts, args.num_seqs, min(max_shares, max(total * T::kChunk / kLeastCutTokens, 1))};
  const int stripe = blockIdx.x * kWarps + warp;
  const int share = stripe / args.kv_heads;
  if (share < row.num_shares) run_share<T>(args, row, rings, share, stripe % args.kv_heads);
}

// ---- launch

// Of a device, or of one kernel on it: found once.
struct Limits {
  int multiprocessors;
  int clusters[5];  // of 1, 2, 4, 8, 16 blocks that run at once
};

inline int shared_bytes(int ring_bytes, int inbox_bytes, int num_seqs) {
  const int starts_bytes = (num_seqs + 1) * 4;
  return kWarps * ring_bytes + (inbox_bytes > starts_bytes ? inbox_bytes : starts_bytes);
}

template <typename T>
cudaError_t find_limits(Limits& limits) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&limits.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const auto kernel = decode_kernel<T>;
  const int most = shared_bytes(T::kRingBytes, Inbox<T>::kBytes, kMaxSeqs);
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  for (int i = 0; i < 5; ++i) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {1u << i, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kMaxCluster);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = shared_bytes(T::kRingBytes, Inbox<T>::kBytes, 1);
    config.attrs = &attribute;
    config.numAttrs = 1;
    error = cudaOccupancyMaxActiveClusters(&limits.clusters[i], kernel, &config);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

constexpr int kMaxDevices = 64;

template <typename T>
cudaError_t limits_of(const Limits*& limits) {
  static Limits found[kMaxDevices];
  static std::atomic<bool> ready[kMaxDevices];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  if (!ready[device].load(std::memory_order_acquire)) {
    Limits fresh;
    error = find_limits<T>(fresh);
    if (error != cudaSuccess) return error;
    found[device] = fresh;  // another thread would write the same
    ready[device].store(true, std::memory_order_release);
  }
  limits = &found[device];
  return cudaSuccess;
}

struct Grid {
  int blocks, cluster;  // cluster as decode_kernel takes it
};

inline Grid plan_grid(const Limits& limits, int num_seqs, int kv_heads) {
  const int slots = kBlocksPerMultiprocessor * limits.multiprocessors;
  const int items = num_seqs * kv_heads;
  int i = 4;
  while (i >= 0 && items > limits.clusters[i]) --i;
  if (i < 0) return {slots, 0};
  const int cluster = 1 << i, used = items * cluster;
  // Near a block a multiprocessor is enough; else there are some in reserve for equal shares.
  const bool enough = used >= limits.multiprocessors * 9 / 10 && used >= kv_heads;
  return {enough ? used : limits.clusters[i] * cluster, cluster};
}

// float4s of partial sums that a call may need.
template <typename T>
int64_t partial_float4s(const Grid& grid, int kv_heads) {
  const int64_t shares = grid.blocks * kWarps / kv_heads;
  return 2 * shares * kv_heads * (T::kFragments + T::kHeadTiles) * kWarpSize;
}

// Requires 1 <= num_seqs <= kMaxSeqs, num_seqs * kv_heads <= kMaxItems, kv_heads <= grid.blocks *
// kWarps; q rows, kv and partials on addresses that are multiples of 16. Nothing is read before
// the kernel ahead has finished, so the launch is always programmatic.
template <typename T>
cudaError_t launch_decode(const DecodeArgs& args, const Grid& grid, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(grid.cluster > 0 ? grid.cluster : 1), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes(T::kRingBytes, Inbox<T>::kBytes, args.num_seqs);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, decode_kernel<T>, args, grid.cluster);
}

}  // namespace fusewright::attention
