// Attention of one query a sequence over a paged KV cache (Kwon et al., 2023), one launch.
//
// Limit: memory. A call streams K and V of every sequence once. What it takes to stay near that:
// - Every warp streams by itself: a ring of chunks in its own shared memory, filled by 16-byte
//   copies, 24 KB ahead, eight warps a multiprocessor. No barrier between load and use but the
//   warp's own.
// - The grid is fixed by shapes; the work is divided in the kernel, from the lengths, in one of two
//   ways. Each (sequence, KV head) is an item for a cluster of 8 to 1 blocks or, where there are
//   more, for 2 warps or 1 of a block; its warps take its chunks in turn and their sums meet in
//   shared memory. Where that leaves room, and the table has room for long sequences, an item has
//   several clusters: a long one is divided among them, their sums meet in memory, and the blocks
//   that come last merge them. Or, where lengths differ much: all chunks of all sequences in one
//   row, cut into equal shares, a share for one warp of each KV head; cuts move to the end of a
//   sequence that is near, all of them if the shares stay even. The sums of a cut sequence meet in
//   memory: of every 16 shares the warp that comes last merges them, and the last of those warps
//   merges theirs, in order of the shares. A cut costs some 10 us, so shares are used only if the
//   longest item has more than about 1.5 times the work of an equal share.
// - The kernel reads whatever the kernel ahead does not write before it waits for that kernel:
//   lengths, block tables and the first chunks of an item. Chunks that hold a slot which this step
//   stores are read after the wait. The slot may be another sequence's, as two may share a block.
//
// Equal lengths, shapes (the block table's too) and GPU give equal bits.
//
// Free of any framework: pointers, strides and a stream. The instructions need sm_90.
#pragma once

#include <algorithm>
#include <atomic>

#include "items.cuh"

namespace fusewright::attention {

constexpr int kBlocksPerMultiprocessor = 2;

// ---- shares

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
  constexpr int kAtOnce = 3 - T::kHeadTiles;
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
__device__ __forceinline__ void run_share(const DecodeArgs& args, const Row<T>& row, Ring<T> ring,
                                          int share, int head) {
  const bool idle = share >= row.num_shares;
  const int x_begin = idle ? 0 : row.cut(share), x_end = idle ? 0 : row.cut(share + 1);
  Stream<T> stream(args, head, &row);
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
__device__ __forceinline__ bool is_even(float longest, float share) {
  return longest <= 1.5f * share + 12 * 16 / T::kChunk;
}

// Whether `step` warps for each item are the better division; `warps` there are in all.
template <typename T>
__device__ __forceinline__ bool prefer_items(const DecodeArgs& args, int step, int warps) {
  if (args.num_seqs == 1) return true;
  int total = 0, longest = 0;
  for (int seq = threadIdx.x % kWarpSize; seq < args.num_seqs; seq += kWarpSize) {
    const int chunks = chunks_of<T>(args, seq);
    total += chunks;
    longest = max(longest, chunks);
  }
  total = __reduce_add_sync(kAllLanes, total);
  longest = __reduce_max_sync(kAllLanes, longest);
  const float shares = __fdividef(static_cast<float>(warps), static_cast<float>(args.kv_heads));
  return is_even<T>(__fdividef(longest, step), __fdividef(total, shares));
}

// cluster: blocks that share an item; 0: there are more items than clusters. The grid has `parts`
// rows of clusters for all items.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    decode_kernel(const __grid_constant__ DecodeArgs args, int cluster) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ Notes notes;
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

  const int items = args.num_seqs * args.kv_heads, parts = gridDim.y;
  const int warps = gridDim.x * parts * kWarps;
  const int team = cluster > 0 ? kWarps : 2 * items <= warps ? 2 : items <= warps ? 1 : 0;
  if (team > 0) {
    Place place = place_of<T>(args, cluster, team);
    Stream<T> stream(args, place.head, nullptr);
    stream.left = 0;
    if (place.seq < args.num_seqs) start_item<T>(args, stream, place);
    if (prefer_items<T>(args, place.step * parts, warps)) {
      if (parts > 1) [[unlikely]] {
        if (is_long(chunks_of<T>(args, place.seq), place.step, parts)) {
          place.parts = parts;
          place.ahead += place.part * place.step;
          place.step *= parts;
          start_item<T>(args, stream, place);
        } else if (place.part > 0) {
          cluster_wait();
          return;
        }
      }
      run_item<T>(args, stream, rings, arrived, place);
      return;
    }
    if (cluster > 1) cluster_wait();
  }
  int* starts = reinterpret_cast<int*>(memory + kRings);
  const int longest = lay_out<T>(args, starts, notes);
  const int total = starts[args.num_seqs];
  const int max_shares = warps / args.kv_heads;
  Row<T> row{starts, args.num_seqs, min(max_shares, max(total * T::kChunk / kLeastCutTokens, 1))};
  const int equal = total / row.num_shares;
  // Without cuts, a share begins and ends half a sequence at most from where equal ones do. That is
  // mostly near enough, and spares the search for the longest.
  row.whole = true;
  row.whole =
      is_even<T>(equal + 1 + longest, equal) || is_even<T>(longest_share<T>(row, notes), equal);
  const int stripe = (blockIdx.y * gridDim.x + blockIdx.x) * kWarps + warp;
  const Ring<T> ring{rings + warp * T::kRingBytes};
  run_share<T>(args, row, ring, stripe / args.kv_heads, stripe % args.kv_heads);
}

// ---- launch

// Limits of a device, or of one kernel on it. They are found once.
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

constexpr int kLongTokens = 8192, kVeryLongTokens = 4 * kLongTokens;

// max_tokens: the most that a row of the block table holds. Grids that help only long items are
// used only if the table has room for them
// (docs/decisions/attention-work-follows-the-batch.md).
template <typename T>
Grid plan_grid(const Limits& limits, int num_seqs, int kv_heads, int64_t max_tokens) {
  const int items = num_seqs * kv_heads;
  int i = 3;
  while (i >= 0 && items > limits.clusters[i]) --i;
  if (i < 0) return {kBlocksPerMultiprocessor * limits.multiprocessors, 0, 1};
  const int cluster = 1 << i, blocks = items * cluster, enough = limits.multiprocessors * 9 / 10;
  if (blocks < enough) {  // clusters for long items, which short ones leave at once
    const int parts = std::min(limits.multiprocessors / blocks, kMaxParts);
    const int64_t max_chunks = (max_tokens + T::kChunk - 1) / T::kChunk;
    const bool split =
        parts > 3 ? is_long(max_chunks, cluster * kWarps, parts) : max_tokens > kVeryLongTokens;
    return {blocks, cluster, split && cluster == kMaxCluster ? parts : 1};
  }
  // Clusters of two spread evenly over multiprocessors. Of four or eight blocks some get two,
  // others none, and long items wait up to a third longer for the former. Each alone on its
  // multiprocessor, some 80 blocks of 16-bit K and V come near the limit; FP8, which they convert,
  // takes more.
  if (max_tokens > (cluster == kMaxCluster ? kVeryLongTokens : kLongTokens)) {
    for (int each = 1; each <= kBlocksPerMultiprocessor; ++each) {
      const int slots = each * limits.multiprocessors, parts = slots / (2 * items);
      const int least = slots * (each == 1 && !T::kFp8 ? 6 : 9) / 10;
      if (2 * items * parts >= least) return {2 * items, 2, parts};
    }
  }
  return {blocks, cluster, 1};
}

// float4s of partial sums that a call may need; what clusters of an item leave is less.
template <typename T>
int64_t partial_float4s(const Grid& grid, int kv_heads) {
  const int64_t shares = grid.blocks * grid.parts * kWarps / kv_heads;
  return 2 * shares * kv_heads * (T::kFragments + T::kHeadTiles) * kWarpSize;
}

template <typename T>
cudaError_t launch_decode(const DecodeArgs& args, const Grid& grid, cudaStream_t stream) {
  if (2 * grid.blocks * grid.parts * kWarps > kMaxPartials) return cudaErrorInvalidConfiguration;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(grid.cluster > 0 ? grid.cluster : 1), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.blocks, grid.parts);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes(T::kRingBytes, Inbox<T>::kBytes, args.num_seqs);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, decode_kernel<T>, args, grid.cluster);
}

}  // namespace fusewright::attention
