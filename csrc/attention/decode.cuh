// Attention of one query a sequence over a paged KV cache (Kwon et al., 2023), one launch.
//
// Limit: memory. A call streams K and V of every sequence once. What it takes to stay near that:
// - Every warp streams by itself: a ring of chunks in its own shared memory, filled by 16-byte
//   copies, 24 KB ahead, eight warps a multiprocessor. No barrier between load and use but the
//   warp's own.
// - The grid is fixed by shapes; the work is divided in the kernel, from the lengths, in one of two
//   ways. Each (sequence, KV head) is an item for a cluster of 8 to 1 blocks or, where there are
//   more, for 2 warps or 1 of a block; its warps take its chunks in turn and their sums meet in
//   shared memory. Or, where lengths differ much: all chunks of all sequences in one row, cut into
//   equal shares, a share for one warp of each KV head; cuts move to the end of a sequence that is
//   near, all of them if the shares stay even. The sums of a cut sequence meet in memory, and the
//   warp that comes last merges them, in order of the shares. A cut costs some 10 us: an item that
//   has half as much again to do as its share is done sooner.
// - What the kernel ahead does not write is read before the wait for it: lengths, block tables and
//   the first chunks of an item, unless they hold a slot that this step stores. That slot may be
//   another sequence's: two may share a block that one of them fills.
//
// Equal lengths, shapes and GPU give equal bits.
//
// Free of any framework: pointers, strides and a stream. The instructions need sm_90.
#pragma once

#include <atomic>

#include "items.cuh"

namespace fusewright::attention {

constexpr int kMaxSeqs = 4096;
constexpr int kMaxItems = 1 << 16;  // (sequence, KV head) pairs
constexpr int kMaxGroup = 16;
constexpr int kBlocksPerMultiprocessor = 2;

// Arrivals at cut sequences; every launch leaves zeros. One stream a device may run this at a time.
static __device__ unsigned arrivals[kMaxItems];

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
    store_sums<T>(args, token, head, sums);
  }
}

// ---- the kernel

// Whether a division without cuts, whose longest part this is, is as good as equal shares. Twelve
// chunks are about what cuts cost; and who is done leaves its share of the bandwidth to the rest.
template <typename T>
__device__ __forceinline__ bool is_even(int longest, int64_t share) {
  return longest <= share + share / 2 + 12 * 16 / T::kChunk;
}

// Whether `warps` for each item are the better division.
template <typename T>
__device__ __forceinline__ bool prefer_items(const DecodeArgs& args, int warps) {
  int total = 0, longest = 0;
  for (int seq = threadIdx.x % kWarpSize; seq < args.num_seqs; seq += kWarpSize) {
    const int chunks = chunks_of<T>(args, seq);
    total += chunks;
    longest = max(longest, chunks);
  }
  total = __reduce_add_sync(kAllLanes, total);
  longest = __reduce_max_sync(kAllLanes, longest);
  const int64_t share = static_cast<int64_t>(total) * args.kv_heads / (gridDim.x * kWarps);
  return is_even<T>(longest / warps, share);
}

// cluster: blocks that share an item; 0: there are more items than clusters.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    decode_kernel(const __grid_constant__ DecodeArgs args, int cluster) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ int warp_sums[kWarps];
  __shared__ uint64_t barrier;
  const uint32_t rings = shared_address(memory);
  constexpr int kRings = kWarps * T::kRingBytes;
  const int warp = threadIdx.x / kWarpSize;
  const uint32_t arrived = shared_address(&barrier);
  if (cluster > 1) {
    if (threadIdx.x == 0) {
      barrier_expect(arrived, Inbox<T>::kFragmentBytes + cluster * Inbox<T>::kMaximaPerBlock * 16);
    }
    __syncwarp();
    cluster_arrive();
  }

  const int items = args.num_seqs * args.kv_heads, warps = gridDim.x * kWarps;
  const int team = cluster > 0 ? kWarps : 2 * items <= warps ? 2 : items <= warps ? 1 : 0;
  if (team > 0) {
    const Place place = place_of<T>(args, cluster, team);
    Stream<T> stream(args, place.head, nullptr);
    stream.left = 0;
    if (place.seq < args.num_seqs) {
      // Before the lengths are here, as many as may be: what is beyond the end is not copied.
      const int begin = args.window > 0 ? visible(args.seq_lens[place.seq], args.window).begin : 0;
      stream.seq = place.seq;
      stream.step = place.step;
      stream.first = begin / T::kChunk + place.ahead;
      stream.left = 1 << 20;
      stream.take_batch();
    }
    if (prefer_items<T>(args, place.step)) {
      run_item<T>(args, stream, rings, arrived, place);
      return;
    }
    if (cluster > 1) cluster_wait();
  }
  int* starts = reinterpret_cast<int*>(memory + kRings);
  lay_out<T>(args, starts, warp_sums);
  const int total = starts[args.num_seqs];
  const int max_shares = warps / args.kv_heads;
  Row<T> row{starts, args.num_seqs, min(max_shares, max(total * T::kChunk / kLeastCutTokens, 1))};
  row.whole = true;
  row.whole = is_even<T>(longest_share<T>(row, warp_sums), total / row.num_shares);
  wait_for_previous();
  start_next();
  const int stripe = blockIdx.x * kWarps + warp;
  const int share = stripe / args.kv_heads;
  if (share < row.num_shares) run_share<T>(args, row, rings, share, stripe % args.kv_heads);
}

// ---- launch

// Of a device, or of one kernel on it: found once.
struct Limits {
  int multiprocessors;
  int clusters[4];  // of 1, 2, 4, 8 blocks that run at once
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
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  for (int i = 0; i < 4; ++i) {
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
  int i = 3;
  while (i >= 0 && items > limits.clusters[i]) --i;
  if (i < 0) return {slots, 0};
  const int cluster = 1 << i, used = items * cluster;
  // Near a block a multiprocessor is enough, and half as many for one sequence, where more blocks
  // take longer to start than they gain; else there are some in reserve for equal shares.
  const int least = limits.multiprocessors * 9 / (num_seqs == 1 ? 20 : 10);
  const bool enough = used >= least && used >= kv_heads;
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
