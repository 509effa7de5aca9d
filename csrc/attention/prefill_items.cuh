// What prefill attention divides a batch into, found on the device: tiles of queries of one
// sequence and some of the heads that share a KV head, those with the most keys first.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "prefill.h"
#include "primitives.cuh"

namespace fusewright::attention {

// A tile, as the warp that fills shared memory leaves it for those that compute.
struct Item {
  int token;     // row of q and out
  int queries;   // that exist
  int head;      // the first
  int position;  // of the first query
  int seq_len;
  int begin, end;  // tiles of keys; none: there are no more items
};

// The sequences that have tiles. Tile i of a sequence with c tiles of earlier tokens has level
// c + i + 1; items go from the highest level to the lowest, so that no block begins a long one
// late.
struct Sequences {
  int2* list;         // shared: level of the last tile; tiles << kIndexBits | index of the sequence
  int count, total;   // sequences, tiles
  int above, before;  // where the search is: below this level; that many tiles are not

  // One warp calls it. It reads lengths only.
  __device__ __forceinline__ void collect(const PrefillArgs& args) {
    const int lane = threadIdx.x % kWarpSize, least = args.tile_queries - 1;
    count = total = above = before = 0;
#pragma unroll 4
    for (int base = 0; base < args.num_seqs; base += kWarpSize) {
      const int seq = base + lane;
      int queries = 0, length = 0;
      if (seq < args.num_seqs) {
        queries = __ldg(args.query_start + seq + 1) - __ldg(args.query_start + seq);
        length = __ldg(args.seq_lens + seq);
      }
      const bool live = queries >= args.fewest && length > 0;
      const int own = live ? (queries + least) / args.tile_queries : 0;
      const int last = live ? (length - queries + least) / args.tile_queries + own : 0;
      const unsigned lives = __ballot_sync(kAllLanes, live);
      if (live) {
        list[count + __popc(lives & ((1u << lane) - 1))] = int2{last, own << kIndexBits | seq};
      }
      count += __popc(lives);
      total += __reduce_add_sync(kAllLanes, own);
      above = max(above, __reduce_max_sync(kAllLanes, last + 1));
    }
    __syncwarp();
  }

  // Tiles of that level or a higher one.
  __device__ __forceinline__ int from_level(int level) const {
    int sum = 0;
    for (int i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) {
      const int2 entry = list[i];
      sum += min(max(entry.x - level + 1, 0), entry.y >> kIndexBits);
    }
    return __reduce_add_sync(kAllLanes, sum);
  }

  // The n-th tile in that order: its sequence, its place in it. Requires n < total, and no smaller
  // n than the last time.
  __device__ __forceinline__ void find(int n, int& seq, int& tile) {
    int level = above, sum = before;
    for (int step = 1; sum <= n; step *= 2) {  // down, faster and faster
      above = level;
      before = sum;
      level = max(above - step, 1);
      sum = from_level(level);
    }
    while (above - level > 1) {
      const int middle = (above + level) / 2;
      sum = from_level(middle);
      if (sum > n) {
        level = middle;
      } else {
        above = middle;
        before = sum;
      }
    }
    int left = n - before;
    for (int base = 0;; base += kWarpSize) {
      const int lane = threadIdx.x % kWarpSize, i = base + lane;
      const int2 entry = i < count ? list[i] : int2{0, 0};
      const int tiles = entry.y >> kIndexBits, place = level - (entry.x - tiles) - 1;
      const bool has = place >= 0 && place < tiles;
      const unsigned all = __ballot_sync(kAllLanes, has);
      if (left < __popc(all)) {
        const bool mine = has && __popc(all & ((1u << lane) - 1)) == left;
        const int owner = __ffs(__ballot_sync(kAllLanes, mine)) - 1;
        tile = __shfl_sync(kAllLanes, place, owner);
        seq = __shfl_sync(kAllLanes, entry.y, owner) & (kMostSeqs - 1);
        return;
      }
      left -= __popc(all);
    }
  }
};

// The first position that the query at `position` sees.
__device__ __forceinline__ int reach_of(const PrefillArgs& args, int position) {
  const int first = args.window > 0 ? max(position - args.window + 1, 0) : 0;
  return args.chunk > 0 ? max(first, position / args.chunk * args.chunk) : first;
}

// Makes the item of a tile, from lengths that collect has read before.
template <int kTileKeys>
__device__ __forceinline__ Item item_of(const PrefillArgs& args, int seq, int tile, int head) {
  const int start = __ldg(args.query_start + seq);
  const int queries = __ldg(args.query_start + seq + 1) - start;
  const int first = tile * args.tile_queries;
  Item item;
  item.seq_len = __ldg(args.seq_lens + seq);
  item.token = start + first;
  item.queries = min(queries - first, args.tile_queries);
  item.head = head;
  item.position = item.seq_len - queries + first;
  item.begin = reach_of(args, item.position) / kTileKeys;
  item.end = (item.position + item.queries + kTileKeys - 1) / kTileKeys;
  return item;
}

}  // namespace fusewright::attention
