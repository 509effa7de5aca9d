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
// - Several queries of one sequence, as of a step that verifies drafts, are sequences that lie side
//   by side. The kernel finds them (shares.cuh), so one grid, and one captured graph, serves steps
//   with and without: up to 32 heads of neighbouring queries are one item, whose K and V are read
//   once. Its blocks then divide the fewer items anew (rows.cuh).
// - The kernel reads whatever the kernel ahead does not write before it waits for that kernel:
//   lengths, block tables, sinks and the first chunks of an item. Chunks that hold a slot which
//   this step stores are read after the wait. The slot may be another sequence's, as two may share
//   a block.
//
// Equal lengths, shapes (the block table's too) and GPU give equal bits.
//
// Free of any framework: pointers, strides and a stream. The instructions need sm_90.
#pragma once

#include <algorithm>
#include <atomic>

#include "rows.cuh"

namespace fusewright::attention {

constexpr int kBlocksPerMultiprocessor = 2;

// ---- the kernel

// Whether `step` warps for each item are the better division; `warps` there are in all.
template <typename T>
__device__ __forceinline__ bool prefer_items(const DecodeArgs& args, int step, int warps) {
  if (args.num_seqs == 1) return true;
  int total = 0, longest = 0;
  for (int seq = threadIdx.x % kWarpSize; seq < args.num_seqs; seq += kWarpSize) {
    const int chunks = chunks_of<T>(args, {}, seq);
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
//
// kMayJoin: rows of a sequence may be taken together. Code that is not there costs a short call
// less.
template <typename T, bool kMayJoin>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    decode_kernel(const __grid_constant__ DecodeArgs args, int cluster) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ Notes notes;
  __shared__ uint64_t barrier;
  const uint32_t rings = shared_address(memory);
  constexpr int kRings = kWarps * T::kRingBytes;
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
  bool has_rows = false;
  if (team > 0) {
    Place place = place_of<T>(args, cluster, team);
    Stream<T> stream(args, place.head, nullptr, {});
    stream.left = 0;
    if (place.seq < args.num_seqs) start_item<T>(args, stream, place);
    if constexpr (kMayJoin) has_rows = rows_save(args);
    if (!has_rows && prefer_items<T>(args, place.step * parts, warps)) {
      if (parts > 1) [[unlikely]] {
        if (is_long(chunks_of<T>(args, {}, place.seq), place.step, parts)) {
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
  } else if constexpr (kMayJoin) {
    has_rows = rows_save(args);
  }
  int* starts = reinterpret_cast<int*>(memory + kRings);
  if constexpr (kMayJoin) {
    if (has_rows) {
      run_rows<RowsTile<T>>(args, starts, notes, rings);
      return;
    }
  }
  const auto size_of = [&](int seq) { return chunks_of<T>(args, {}, seq); };
  const int longest = lay_out(args.num_seqs, starts, notes, size_of).most;
  run_shares<T>(args, {}, starts, longest, notes, rings);
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
  const auto kernel = decode_kernel<T, false>;
  const int most = shared_bytes(T::kRingBytes, Inbox<T>::kBytes, kMaxSeqs);
  for (const auto each : {kernel, decode_kernel<T, true>}) {
    error = cudaFuncSetAttribute(each, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(each, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
  }
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

// Positions that rows must save.
template <typename T>
float least_saved(const DecodeArgs& args) {
  return kLeastSavedBytes / (2.0f * args.kv_heads * T::kRowBytes);
}

// Whether the block table has room for a batch whose rows save so many.
template <typename T>
bool may_join(const DecodeArgs& args) {
  const int64_t max_tokens = static_cast<int64_t>(args.max_blocks) << args.log2_block_size;
  const int64_t seen = args.window > 0 ? std::min<int64_t>(args.window, max_tokens) : max_tokens;
  return most_rows(args.group) > 1 && (args.num_seqs - 1) * seen >= least_saved<T>(args);
}

// float4s of partial sums that shares may need; what clusters or blocks leave of an item is less.
template <typename T>
int64_t partial_float4s(const DecodeArgs& args, const Grid& grid) {
  if constexpr (!T::kRows) {
    if (may_join<T>(args)) return partial_float4s<RowsTile<T>>(args, grid);
  }
  const int64_t shares = grid.blocks * grid.parts * kWarps / args.kv_heads;
  return 2 * shares * args.kv_heads * (T::kFragments + T::kHeadTiles) * kWarpSize;
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
  DecodeArgs with_bound = args;
  with_bound.least_saved = least_saved<T>(args);
  const auto kernel = may_join<T>(args) ? decode_kernel<T, true> : decode_kernel<T, false>;
  return cudaLaunchKernelEx(&config, kernel, with_bound, grid.cluster);
}

}  // namespace fusewright::attention
