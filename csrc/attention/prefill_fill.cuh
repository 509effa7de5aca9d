// The warp of a prefill block that fills shared memory, ahead of those that compute.
#pragma once

#include "prefill_tile.cuh"

namespace fusewright::attention {

// Beyond each block's first; every launch leaves zeros. One stream a device may run this at a time.
static __device__ unsigned items_taken, blocks_done;

// A box of lines of a described tensor: of q, and of the cache.
__device__ __forceinline__ void copy_lines(uint32_t to, const CUtensorMap& map, int y, int z,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(0), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy_lines(uint32_t to, const CUtensorMap& map, int y, int z, int w,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(0), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

struct Filler {
  const PrefillArgs& args;
  const CUtensorMap& kv_map;
  uint32_t queries, rings;  // shared: of q, of K and V
  Mailbox* box;
  Cursor cursor[3];
  Item item;
  const int* table;  // of the item's sequence

  // The cache's group of eight tokens where this lane's copy of tile t begins, of K; or none.
  __device__ __forceinline__ int group_of(int t) const {
    const int position = t * kTileKeys + (threadIdx.x % kWarpSize << args.box_shift);
    const bool readable = position < item.position + item.queries &&
                          position + (1 << args.box_shift) > reach_of(args, item.position) &&
                          t >= item.begin;
    if (!readable) return -kTileKeys;
    const int block_id = __ldg(table + (position >> args.log2_block_size));
    const int within = position & ((1 << args.log2_block_size) - 1);
    return (2 * block_id << (args.log2_block_size - 3)) + (within >> 3);
  }

  // Waits for the stage and says what will come; lane 0 leaves the item with q.
  template <Part kPart>
  __device__ __forceinline__ uint32_t open(int bytes) {
    const Cursor& at = cursor[kPart];
    const uint32_t full = shared_address(&box->full[kPart][at.stage]);
    barrier_wait(shared_address(&box->empty[kPart][at.stage]), at.parity ^ 1);
    if (threadIdx.x % kWarpSize == 0) {
      if (kPart == kQueries) box->item[at.stage] = item;
      barrier_expect_bytes(full, bytes);
    }
    __syncwarp();
    return full;
  }

  // K or V of a tile; `group` is this lane's.
  template <Part kPart>
  __device__ __forceinline__ void fill(int group) {
    const uint32_t full = open<kPart>(kKeysBytes);
    const int lane = threadIdx.x % kWarpSize;
    if (lane < kTileKeys >> args.box_shift) {
      const uint32_t to = rings + (kPart * kStages + cursor[kPart].stage) * kKeysBytes +
                          (lane << args.box_shift) * kHeadDim * 2;
      const int v = kPart == kKeys || group < 0 ? 0 : 1 << (args.log2_block_size - 3);
      copy_lines(to, kv_map, 0, item.head / args.group * kHalves, group + v, full);
    }
    cursor[kPart].advance();
  }

  // A copy for each head of the tile and half of a row.
  __device__ __forceinline__ void fill_queries(const CUtensorMap& q_map) {
    const uint32_t full = open<kQueries>(kQueryBytes);
    const int heads = kTileRows >> args.query_shift, lane = threadIdx.x % kWarpSize;
    const int half = lane / heads, head = lane % heads;
    if (half < kHalves) {
      const uint32_t to = queries + cursor[kQueries].stage * kQueryBytes + half * kQueryHalfBytes +
                          (head << args.query_shift) * kLineBytes;
      copy_lines(to, q_map, item.token, (item.head + head) * kHalves + half, full);
    }
    cursor[kQueries].advance();
  }

  __device__ __forceinline__ void say_end() {
    item = Item{};
    open<kQueries>(0);
    if (threadIdx.x % kWarpSize > 0) return;
    if (atomicAdd(&blocks_done, 1) == gridDim.x - 1) items_taken = blocks_done = 0;
  }

  // `list` has room for every sequence.
  __device__ __forceinline__ void run(const CUtensorMap& q_map, int2* list) {
    Sequences sequences{list};
    sequences.collect(args);
    const int head_shift = kTileRowsShift - args.query_shift;
    const int shares = args.heads >> head_shift, items = sequences.total * shares;
    wait_for_previous();
    for (int n = blockIdx.x; n < items;) {
      int seq, tile;
      sequences.find(n / shares, seq, tile);
      item = item_of(args, seq, tile, n % shares << head_shift);
      table = args.block_table + seq * args.table_stride;
      int group = group_of(item.end - 1);
      fill_queries(q_map);
      unsigned taken = 0;
      if (threadIdx.x % kWarpSize == 0) taken = atomicAdd(&items_taken, 1);
      for (int t = item.end - 1; t >= item.begin; --t) {
        const int here = group;
        group = group_of(t - 1);  // ahead, since it takes a while
        fill<kKeys>(here);
        fill<kValues>(here);
      }
      n = gridDim.x + __shfl_sync(kAllLanes, taken, 0);
    }
    start_next();
    say_end();
  }
};

}  // namespace fusewright::attention
