// The warp of a prefill block that copies into shared memory, ahead of those that compute.
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

template <typename T>
struct Filler {
  const PrefillArgs& args;
  const CUtensorMap& kv_map;
  uint32_t memory;
  Mailbox<T>* box;
  Cursor<T::kQueryStages> query_at;
  Cursor<T::kFp8 ? T::kRawStages : 2 * T::kStages> at;  // of K and V, in turns
  Item item;
  const int* table;  // of the item's sequence

  // The cache's group of eight tokens where this lane's copy of tile t begins, of K; or none.
  __device__ __forceinline__ int group_of(int t) const {
    const int position = t * T::kTileKeys + (threadIdx.x % kWarpSize << args.box_shift);
    const bool readable = position < item.position + item.queries &&
                          position + (1 << args.box_shift) > reach_of(args, item.position) &&
                          t >= item.begin;
    if (!readable) return -T::kTileKeys;
    const int block_id = __ldg(table + (position >> args.log2_block_size));
    const int within = position & ((1 << args.log2_block_size) - 1);
    return (2 * block_id << (args.log2_block_size - 3)) + (within >> 3);
  }

  // Waits for the stage and says what will come.
  __device__ __forceinline__ uint32_t open(uint64_t* full, uint64_t* empty, uint32_t parity,
                                           int bytes) {
    barrier_wait(shared_address(empty), parity ^ 1);
    if (threadIdx.x % kWarpSize == 0) barrier_expect_bytes(shared_address(full), bytes);
    __syncwarp();
    return shared_address(full);
  }

  // The item comes with its q.
  __device__ __forceinline__ uint32_t open_queries(int bytes) {
    const int stage = query_at.stage;
    barrier_wait(shared_address(box->query_empty + stage), query_at.parity ^ 1);
    if (threadIdx.x % kWarpSize == 0) box->item[stage] = item;
    return open(box->query_full + stage, box->query_empty + stage, query_at.parity, bytes);
  }

  // K or V of a tile; `group` is this lane's.
  __device__ __forceinline__ void fill(Part part, int group) {
    constexpr int kBytes = T::kFp8 ? T::kRawBytes : T::kKeysBytes;
    uint64_t* const full = T::kFp8 ? box->raw_full : box->full;
    uint64_t* const empty = T::kFp8 ? box->raw_empty : box->empty;
    const uint32_t barrier = open(full + at.stage, empty + at.stage, at.parity, kBytes);
    const int lane = threadIdx.x % kWarpSize;
    if (lane < T::kTileKeys >> args.box_shift) {
      const uint32_t to = memory + (T::kFp8 ? T::kRawAt : T::kRingsAt) + at.stage * kBytes +
                          (lane << args.box_shift) * (kBytes / T::kTileKeys);
      const int v = part == kKeys || group < 0 ? 0 : 1 << (args.log2_block_size - 3);
      const int head = item.head / args.group * (T::kFp8 ? 1 : T::kLines);
      copy_lines(to, kv_map, 0, head, group + v, barrier);
    }
    at.advance();
  }

  // A copy for each head of the tile and line of a row.
  __device__ __forceinline__ void fill_queries(const CUtensorMap& q_map) {
    const uint32_t barrier = open_queries(T::kQueryBytes);
    const int lane = threadIdx.x % kWarpSize;
    const int line = lane / args.tile_heads, head = lane % args.tile_heads;
    if (line < T::kLines) {
      const uint32_t to = memory + query_at.stage * T::kQueryBytes + line * T::kQueryLineBytes +
                          head * args.tile_queries * kLineBytes;
      copy_lines(to, q_map, item.token, (item.head + head) * T::kLines + line, barrier);
    }
    query_at.advance();
  }

  __device__ __forceinline__ void say_end() {
    item = Item{};
    open_queries(0);
    if (threadIdx.x % kWarpSize > 0) return;
    if (atomicAdd(&blocks_done, 1) == gridDim.x - 1) items_taken = blocks_done = 0;
  }

  // `list` has room for every sequence.
  __device__ __forceinline__ void run(const CUtensorMap& q_map, int2* list) {
    Sequences sequences{list};
    sequences.collect(args);
    const int shares = args.heads / args.tile_heads, items = sequences.total * shares;
    wait_for_previous();
    for (int n = blockIdx.x; n < items;) {
      int seq, tile;
      sequences.find(n / shares, seq, tile);
      item = item_of<T::kTileKeys>(args, seq, tile, n % shares * args.tile_heads);
      table = args.block_table + seq * args.table_stride;
      int group = group_of(item.end - 1);
      fill_queries(q_map);
      unsigned taken = 0;
      if (threadIdx.x % kWarpSize == 0) taken = atomicAdd(&items_taken, 1);
      for (int t = item.end - 1; t >= item.begin; --t) {
        const int here = group;
        group = group_of(t - 1);  // ahead, since it takes a while
        fill(kKeys, here);
        fill(kValues, here);
      }
      n = gridDim.x + __shfl_sync(kAllLanes, taken, 0);
    }
    start_next();
    say_end();
  }
};

}  // namespace fusewright::attention
