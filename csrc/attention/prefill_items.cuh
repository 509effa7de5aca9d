// What prefill attention divides a batch into, found on the device: tiles of 128 queries of one
// sequence and one head, those with the most keys first.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "primitives.cuh"

namespace fusewright::attention {

constexpr int kTileQueries = 128;
constexpr int kTileKeys = 128;

struct PrefillArgs {
  const int* block_table;  // [num_seqs, table_stride]
  const int* seq_lens;     // [num_seqs]
  const int* query_start;  // [num_seqs + 1]
  void* out;               // [tokens, heads, head_dim]
  const float* out_scale;  // [1] if out is FP8, else null
  unsigned* counters;      // 2: items taken beyond each block's first, blocks that are done
  int num_seqs, fewest;    // sequences with fewer queries are left out
  int heads, group, page_shift, box_shift;  // log2 of the tokens of a page and of a copy
  int64_t table_stride;
  float scale, soft_cap;
  int window;  // 0: all
};

// A tile, as the warp that fills shared memory leaves it for those that compute.
struct Item {
  int token;             // row of q and out
  int queries;           // that exist of the 128
  int head;
  int position;          // of the first query
  int seq_len;
  int begin, end;        // tiles of keys; none: there are no more items
};

// One lane's view of the sequences that have tiles. Tile i of a sequence that begins behind c tiles
// of keys has level c + i + 1; items go from the highest level to the lowest, so that no block
// begins a long one late.
struct Sequences {
  int* top;    // shared: the level of the last tile
  int* tiles;  // shared: how many
  int* index;  // shared: of the sequence
  int count, total, highest;

  // By one warp. Reads lengths only.
  __device__ __forceinline__ void collect(const PrefillArgs& args) {
    const int lane = threadIdx.x % kWarpSize;
    count = total = highest = 0;
#pragma unroll 4
    for (int base = 0; base < args.num_seqs; base += kWarpSize) {
      const int seq = base + lane;
      int queries = 0, length = 0;
      if (seq < args.num_seqs) {
        queries = __ldg(args.query_start + seq + 1) - __ldg(args.query_start + seq);
        length = __ldg(args.seq_lens + seq);
      }
      const bool live = queries >= args.fewest && length > 0;
      const int own = live ? (queries + kTileQueries - 1) / kTileQueries : 0;
      const int last = live ? (length - queries + kTileKeys - 1) / kTileKeys + own : 0;
      const unsigned lives = __ballot_sync(kAllLanes, live);
      if (live) {
        const int slot = count + __popc(lives & ((1u << lane) - 1));
        top[slot] = last;
        tiles[slot] = own;
        index[slot] = seq;
      }
      count += __popc(lives);
      total += __reduce_add_sync(kAllLanes, own);
      highest = max(highest, __reduce_max_sync(kAllLanes, last));
    }
    __syncwarp();
  }

  // Tiles of that level or a higher one.
  __device__ __forceinline__ int from_level(int level) const {
    int sum = 0;
    for (int i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) {
      sum += min(max(top[i] - level + 1, 0), tiles[i]);
    }
    return __reduce_add_sync(kAllLanes, sum);
  }

  // The n-th tile in that order: its sequence, its place in it. Requires n < total.
  __device__ __forceinline__ void find(int n, int& seq, int& tile) const {
    int level = 1, above = highest + 1, before = 0;
    while (above - level > 1) {
      const int middle = (above + level) / 2, sum = from_level(middle);
      if (sum > n) {
        level = middle;
      } else {
        above = middle;
        before = sum;
      }
    }
    int left = n - before;
    for (int base = 0;; base += kWarpSize) {
      const int i = base + threadIdx.x % kWarpSize;
      int place = -1;
      if (i < count) place = level - (top[i] - tiles[i]) - 1;
      const bool own = i < count && place >= 0 && place < tiles[i];
      const unsigned has = __ballot_sync(kAllLanes, own);
      if (left < __popc(has)) {
        const int before_me = __popc(has & ((1u << threadIdx.x % kWarpSize) - 1));
        const int owner = __ffs(__ballot_sync(kAllLanes, own && before_me == left)) - 1;
        tile = __shfl_sync(kAllLanes, place, owner);
        seq = index[base + owner];
        return;
      }
      left -= __popc(has);
    }
  }
};

__device__ __forceinline__ Item item_of(const PrefillArgs& args, int seq, int tile, int head) {
  const int start = args.query_start[seq], queries = args.query_start[seq + 1] - start;
  const int first = tile * kTileQueries, seq_len = args.seq_lens[seq];
  Item item;
  item.token = start + first;
  item.queries = min(queries - first, kTileQueries);
  item.head = head;
  item.position = seq_len - queries + first;
  item.seq_len = seq_len;
  const int reach = args.window > 0 ? max(item.position - args.window + 1, 0) : 0;
  item.begin = reach / kTileKeys;
  item.end = (item.position + item.queries + kTileKeys - 1) / kTileKeys;
  return item;
}

}  // namespace fusewright::attention
