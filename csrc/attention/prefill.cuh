// Attention of many queries a sequence over a paged KV cache, for tensor cores of sm_90a: the
// forward pass of FlashAttention-3 (Shah et al., 2024).
//
// Limit: products of matrices. What it takes to stay near that:
// - A block is two warpgroups that compute, 64 rows of q each, and a warp that fills a
//   ring of K and V tiles in shared memory. Pages come by the copy engine: a copy brings what one
//   page has of one head, in the layout that the products read; beyond the cache it brings zeros.
// - The product with K of the next tile runs while a warpgroup computes its softmax, and the two
//   warpgroups issue products in turns, so that one's softmax runs beside the other's products.
// - Blocks stay: while one item's result is stored, the next one's K and V are on their way.
//
// A query's result depends on its own context alone: tiles of keys begin at multiples of 128.
//
// Free of any framework: pointers, strides and a stream. The instructions need sm_90a.
#pragma once

#include <cuda.h>

#include "../gemm/async_copy.cuh"
#include "prefill_items.cuh"
#include "wgmma.cuh"

namespace fusewright::attention {

constexpr int kComputeWarps = 8;
constexpr int kPrefillThreads = 3 * kWarpgroupThreads;
constexpr int kTileRowsShift = 7;
constexpr int kLineBytes = 128;
// A power of two, or its product with what a logit is multiplied by would be rounded: such a product
// less the rounded one is to be 0.
constexpr float kNoPeak = -0x1p100f;

// Beyond each block's first; every launch leaves zeros. One stream a device may run this at a time.
static __device__ unsigned items_taken, blocks_done;

#ifndef FW_PINGPONG
#define FW_PINGPONG 1
#endif
#ifndef FW_LATE
#define FW_LATE 0
#endif
#ifndef FW_SKIP
#define FW_SKIP 0
#endif
#ifndef FW_STAGES
#define FW_STAGES 2
#endif
#ifndef FW_OVERLAP
#define FW_OVERLAP 0
#endif

// kGeneral: with a window or a soft cap.
template <typename E, int kDim, bool kIsGeneral>
struct PrefillTile {
  using Element = E;
  static constexpr int kHeadDim = kDim;
  static constexpr bool kGeneral = kIsGeneral;
  static constexpr int kHalves = kDim / 64;         // lines of 128 bytes that a row has
  static constexpr int kGroupBytes = kHalves * kAtomBytes;  // of eight tokens
  static constexpr int kQueryHalfBytes = kTileRows * 128;
  static constexpr int kQueryBytes = kHalves * kQueryHalfBytes;
  static constexpr int kKeysBytes = kTileKeys * kDim * 2;
  static constexpr int kStages = FW_STAGES;
  static constexpr int kBytes = 2 * kQueryBytes + 2 * kStages * kKeysBytes;
};

constexpr int kMostStages = 3;

// Barriers of a block, and what comes with them.
struct alignas(16) Mailbox {
  uint64_t query_full[2], query_empty[2];
  uint64_t full[2][kMostStages], empty[2][kMostStages];  // of K and V: of each stage
  Item item[2];
};

// A place in a ring and which time around it is.
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;
  template <int kStages>
  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  }
};

__device__ __forceinline__ void copy_box_3d(uint32_t to, const CUtensorMap& map, int y, int z,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(0), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy_box_4d(uint32_t to, const CUtensorMap& map, int y, int z,
                                            int w, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(0), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// ---- the warp that fills

template <typename T>
struct Filler {
  const PrefillArgs& args;
  const CUtensorMap& kv_map;
  uint32_t rings;
  Mailbox* box;
  Cursor cursor[2], cursor_q;
  Item item;
  const int* table;
  int reach;  // the first position that a query of the item sees

  // The cache's group of eight tokens where this lane's copy of tile t begins, of K; or none.
  __device__ __forceinline__ int group_of(int t) const {
    const int position = t * kTileKeys + (threadIdx.x % kWarpSize << args.box_shift);
    const bool readable = position < item.position + item.queries &&
                          position + (1 << args.box_shift) > reach && t >= item.begin;
    if (!readable) return -kTileKeys;
    const int page = __ldg(table + (position >> args.page_shift));
    const int within = position & ((1 << args.page_shift) - 1);
    return (2 * page << (args.page_shift - 3)) + (within >> 3);
  }

  template <int kWhich>
  __device__ __forceinline__ void fill(int group) {
    Cursor& at = cursor[kWhich];
    const uint32_t full = shared_address(&box->full[kWhich][at.stage]);
    gemm::barrier_wait(shared_address(&box->empty[kWhich][at.stage]), at.parity ^ 1);
    const int lane = threadIdx.x % kWarpSize;
    if (lane == 0) gemm::barrier_expect_bytes(full, T::kKeysBytes);
    __syncwarp();
    if (lane < kTileKeys >> args.box_shift) {
      const uint32_t to = rings + (kWhich * T::kStages + at.stage) * T::kKeysBytes +
                          (lane << args.box_shift) * T::kHeadDim * 2;
      const int v = kWhich == 0 || group < 0 ? 0 : 1 << (args.page_shift - 3);
      copy_box_4d(to, kv_map, 0, item.head / args.group * T::kHalves, group + v, full);
    }
    at.template advance<T::kStages>();
  }

  // q of the item and what else is to be known of it.
  __device__ __forceinline__ void fill_query(const CUtensorMap& q_map, uint32_t query) {
    const int at = cursor_q.stage, lane = threadIdx.x % kWarpSize;
    const uint32_t full = shared_address(&box->query_full[at]);
    gemm::barrier_wait(shared_address(&box->query_empty[at]), cursor_q.parity ^ 1);
    if (lane == 0) {
      box->item[at] = item;
      gemm::barrier_expect_bytes(full, T::kQueryBytes);
    }
    __syncwarp();
    const int heads = kTileRows >> args.query_shift, half = lane / heads, head = lane % heads;
    if (half < T::kHalves) {
      copy_box_3d(query + at * T::kQueryBytes + half * T::kQueryHalfBytes +
                      (head << args.query_shift) * kLineBytes,
                  q_map, item.token, (item.head + head) * T::kHalves + half, full);
    }
    cursor_q.template advance<2>();
  }

  __device__ __forceinline__ void end() {
    const int at = cursor_q.stage;
    gemm::barrier_wait(shared_address(&box->query_empty[at]), cursor_q.parity ^ 1);
    if (threadIdx.x % kWarpSize == 0) {
      box->item[at].begin = box->item[at].end = 0;
      gemm::barrier_arrive(shared_address(&box->query_full[at]));
      if (atomicAdd(&blocks_done, 1) == gridDim.x - 1) items_taken = blocks_done = 0;
    }
  }

  __device__ __forceinline__ void run(const CUtensorMap& q_map, uint32_t query, int2* scratch) {
    Sequences sequences{scratch};
    sequences.collect(args);
    const int shares = args.heads >> (kTileRowsShift - args.query_shift);
    const int items = sequences.total * shares;
    gemm::wait_for_previous();
    for (int n = blockIdx.x; n < items;) {
      int seq, tile;
      sequences.find(n / shares, seq, tile);
      item = item_of(args, seq, tile, n % shares << (kTileRowsShift - args.query_shift));
      table = args.block_table + seq * args.table_stride;
      reach = reach_of(args, item.position);
      int group = group_of(item.end - 1);
      fill_query(q_map, query);
      unsigned taken = 0;
      if (threadIdx.x % kWarpSize == 0) taken = atomicAdd(&items_taken, 1);
      for (int t = item.end - 1; t >= item.begin; --t) {
        const int here = group;
        group = group_of(t - 1);  // ahead, since it takes a while
        fill<0>(here);
        fill<1>(here);
      }
      n = gridDim.x + __shfl_sync(kAllLanes, taken, 0);
    }
    gemm::start_next();
    end();
  }
};

// ---- the warpgroups that compute

// Online softmax of 64 queries; a thread has two rows, r and r + 8.
template <typename T>
struct Rows {
  float sums[T::kHeadDim / 2];
  float peak[2], total[2];
};

template <typename T>
struct Computer {
  const PrefillArgs& args;
  uint32_t queries, rings;
  Mailbox* box;
  int group;  // 0 or 1
  Cursor q, k, v;
  Item item;
  Rows<T> rows;
  float logits[kTileKeys / 2];
  uint32_t weights[kTileKeys / 4];

  __device__ __forceinline__ int lane() const { return threadIdx.x % kWarpSize; }
  __device__ __forceinline__ int row() const {
    return group * 64 + threadIdx.x / kWarpSize % 4 * 16 + lane() / 4;
  }
  __device__ __forceinline__ int query_of(int row) const {
    return row & ((1 << args.query_shift) - 1);
  }
  __device__ __forceinline__ uint32_t keys(int which, const Cursor& at) const {
    return rings + (which * T::kStages + at.stage) * T::kKeysBytes;
  }
  __device__ __forceinline__ void release(uint64_t& barrier) const {
    __syncwarp();
    if (lane() == 0) gemm::barrier_arrive(shared_address(&barrier));
  }
  __device__ __forceinline__ void take_turn() const {
#if FW_PINGPONG
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(2 * kWarpgroupThreads) : "memory");
#endif
  }
  __device__ __forceinline__ void pass_turn() const {
#if FW_PINGPONG
    asm volatile("bar.arrive %0, %1;" ::"r"(2 - group), "r"(2 * kWarpgroupThreads) : "memory");
#endif
  }

  // Starts logits = q k^T of the next tile.
  __device__ __forceinline__ void start_logits() {
    const uint32_t from = keys(0, k);
    const uint32_t to = queries + q.stage * T::kQueryBytes + group * 64 * kLineBytes;
    pin(logits);
    products_fence();
#pragma unroll
    for (int step = 0; step < T::kHeadDim / 16; ++step) {
      const int half = step / 4, within = step % 4 * 32;
      multiply<typename T::Element>(
          logits, describe(to + half * T::kQueryHalfBytes + within, 16, kAtomBytes),
          describe(from + half * kAtomBytes + within, 16, T::kGroupBytes), step == 0);
    }
    products_commit();
  }

  // Starts sums += weights v of the oldest tile.
  __device__ __forceinline__ void start_sums() {
    const uint32_t from = keys(1, v);
    pin(rows.sums);
    pin(weights);
    products_fence();
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      multiply_add<typename T::Element>(
          rows.sums, weights + 4 * step,
          describe(from + 2 * step * T::kGroupBytes, kAtomBytes, T::kGroupBytes));
    }
    products_commit();
  }

  __device__ __forceinline__ bool capped() const { return T::kGeneral && args.soft_cap > 0; }

  // What a logit is to be multiplied by, for a power of two.
  __device__ __forceinline__ float unit() const {
    return (capped() ? args.soft_cap : args.scale) * 1.4426950408889634f;
  }

  // Logits become parts of the soft cap, if there is one.
  __device__ __forceinline__ void cap() {
    if (!capped()) return;
    const float factor = args.scale / args.soft_cap;
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) logits[i] = tanh_of(logits[i] * factor);
  }

  // What a query must not see becomes -infinity.
  __device__ __forceinline__ void mask(int tile) {
    const int first = tile * kTileKeys + lane() % 4 * 2;
    const int position = item.position + query_of(row());
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) {
      const int key = first + i / 4 * 8 + i % 2, query_at = position + i / 2 % 2 * 8;
      bool hidden = key > query_at;
      if constexpr (T::kGeneral) hidden |= args.window > 0 && key <= query_at - args.window;
      if (hidden) logits[i] = -INFINITY;
    }
  }

  // Logits become weights in float32; `alpha` is what earlier sums are to be multiplied by.
  __device__ __forceinline__ void softmax(float (&alpha)[2]) {
    const float unit = this->unit();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float high[2] = {rows.peak[r], rows.peak[r]};
#pragma unroll
      for (int i = 0; i < kTileKeys / 8; ++i) {
        high[0] = fmaxf(high[0], logits[4 * i + 2 * r]);
        high[1] = fmaxf(high[1], logits[4 * i + 2 * r + 1]);
      }
      float peak = fmaxf(high[0], high[1]);
      peak = fmaxf(peak, __shfl_xor_sync(kAllLanes, peak, 1));
      peak = fmaxf(peak, __shfl_xor_sync(kAllLanes, peak, 2));
      const float scaled = peak * unit;
      alpha[r] = exp2_approx(rows.peak[r] * unit - scaled);
      rows.peak[r] = peak;
      float sum[2] = {rows.total[r] * alpha[r], 0.0f};
#pragma unroll
      for (int i = 0; i < kTileKeys / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = logits[4 * i + 2 * r + j];
          x = exp2_approx(x * unit - scaled);
          sum[j] += x;
        }
      }
      rows.total[r] = sum[0] + sum[1];
    }
  }

  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int i = 0; i < kTileKeys / 4; ++i) {
      weights[i] = pack<typename T::Element>(logits[2 * i], logits[2 * i + 1]);
    }
  }

  __device__ __forceinline__ void wait_full(int which, const Cursor& at) const {
    gemm::barrier_wait(shared_address(&box->full[which][at.stage]), at.parity);
  }

  __device__ __forceinline__ void clear_values(int begin, int end) const {
    const uint32_t from = keys(1, v);
    for (int i = threadIdx.x % kWarpgroupThreads; i < (end - begin) * T::kHalves * 8;
         i += kWarpgroupThreads) {
      const int chunk = i % 8, half = i / 8 % T::kHalves, token = begin + i / (8 * T::kHalves);
      store_shared(from + token / 8 * T::kGroupBytes + half * kAtomBytes +
                       token % 8 * kLineBytes + chunk * 16,
                   float4{0, 0, 0, 0});
    }
  }

  // Zeros in the oldest V where no query sees anything and what lies there may be no number. That is
  // in a page that holds the sequence's end or the window's begin: of others come zeros.
  __device__ __forceinline__ void clear_unseen(int tile) const {
    const int first = tile * kTileKeys, box = (1 << args.box_shift) - 1;
    const int low = max((T::kGeneral ? reach_of(args, item.position) : 0) - first, 0);
    const int high = min(item.seq_len - first, kTileKeys);
    if (low == 0 && high == kTileKeys) return;
    wait_full(1, v);
    clear_values(low & ~box, low);
    clear_values(high, (high + box) & ~box);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, %1;" ::"r"(3 + group), "r"(kWarpgroupThreads) : "memory");
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(int tile) {
    wait_full(0, k);
    take_turn();
    start_logits();
    wait_full(1, v);
    start_sums();
#if FW_LATE == 0
    pass_turn();
#endif
    products_wait<1>();
#if FW_LATE == 1
    pass_turn();
#endif
    pin(logits);
    release(box->empty[0][k.stage]);
    k.template advance<T::kStages>();
    cap();
    if constexpr (kMasked) mask(tile);
    float alpha[2];
    softmax(alpha);
#if FW_OVERLAP
    // Weights come before the wait: without a use of their sum, the compiler puts them behind it.
    asm volatile(
        "{\n\t.reg .pred never;\n\tsetp.lt.f32 never, %0, 0f00000000;\n\t"
        "@never st.shared.f32 [%1], %0;\n\t}" ::"f"(rows.total[0] + rows.total[1]),
        "r"(queries)
        : "memory");
#endif
    products_wait<0>();
    pin(rows.sums);
    pin(weights);
    release(box->empty[1][v.stage]);
    v.template advance<T::kStages>();
    round_weights();
#if FW_SKIP
    if (__any_sync(kAllLanes, alpha[0] != 1.0f || alpha[1] != 1.0f))
#endif
    {
#pragma unroll
      for (int i = 0; i < T::kHeadDim / 2; ++i) rows.sums[i] *= alpha[i / 2 % 2];
    }
    if constexpr (T::kGeneral) {
      if (tile == item.begin) clear_unseen(tile);
    }
  }

  __device__ __forceinline__ void compute_item() {
#pragma unroll
    for (int i = 0; i < T::kHeadDim / 2; ++i) rows.sums[i] = 0.0f;
    rows.peak[0] = rows.peak[1] = kNoPeak;
    rows.total[0] = rows.total[1] = 0.0f;
    int tile = item.end - 1;
    wait_full(0, k);
    take_turn();
    start_logits();
    pass_turn();
    products_wait<0>();
    pin(logits);
    release(box->empty[0][k.stage]);
    k.template advance<T::kStages>();
    cap();
    mask(tile);
    float alpha[2];
    softmax(alpha);
    round_weights();
    clear_unseen(tile);
    --tile;
    // The first tile that all of this warpgroup's queries see to its end.
    const int seen = T::kGeneral ? 0 : (item.position + query_of(group * 64) + 1) / kTileKeys;
    for (; tile >= max(seen, item.begin); --tile) step<true>(tile);
    for (; tile >= item.begin; --tile) step<T::kGeneral>(tile);
    release(box->query_empty[q.stage]);
    q.template advance<2>();
    wait_full(1, v);
    start_sums();
    products_wait<0>();
    pin(rows.sums);
    release(box->empty[1][v.stage]);
    v.template advance<T::kStages>();
    store();
  }

  __device__ __forceinline__ void store() {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = rows.total[r];
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      inverse[r] = 1.0f / total;
    }
    if (args.out_scale) {
      const float scale = 1.0f / *args.out_scale;
      store_as<__nv_fp8_e4m3>(inverse[0] * scale, inverse[1] * scale);
    } else {
      store_as<typename T::Element>(inverse[0], inverse[1]);
    }
  }

  // Each thread has two neighbouring elements of every eight; four threads exchange theirs so that
  // each has eight of every thirty-two.
  template <typename Out>
  __device__ __forceinline__ void store_as(float low, float high) {
    const int quad = lane() % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = row() + 8 * r, query = query_of(at), head = item.head + (at >> args.query_shift);
      const float factor = r == 0 ? low : high;
      Out* to = static_cast<Out*>(args.out) +
                (static_cast<int64_t>(item.token + query) * args.heads + head) * T::kHeadDim;
      const bool live = query < item.queries;
#pragma unroll
      for (int base = 0; base < T::kHeadDim / 8; base += 4) {
        if constexpr (sizeof(Out) == 1) {
#pragma unroll
          for (int j = base; j < base + 4; ++j) {
            Out pair[2];
            store_rounded(pair, rows.sums[4 * j + 2 * r] * factor);
            store_rounded(pair + 1, rows.sums[4 * j + 2 * r + 1] * factor);
            if (live) {
              *reinterpret_cast<uint16_t*>(to + 8 * j + 2 * quad) =
                  static_cast<uint16_t>(pair[0].__x | pair[1].__x << 8);
            }
          }
        } else {
          uint32_t x[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float* pair = rows.sums + 4 * (base + j) + 2 * r;
            x[j] = pack<Out>(pair[0] * factor, pair[1] * factor);
          }
          exchange(x[0], x[1], x[2], x[3], quad);
          if (live) {
            *reinterpret_cast<uint4*>(to + 8 * (base + quad)) = uint4{x[0], x[1], x[2], x[3]};
          }
        }
      }
    }
  }

  // Transposes four words of four threads.
  static __device__ __forceinline__ void exchange(uint32_t& a, uint32_t& b, uint32_t& c,
                                                  uint32_t& d, int quad) {
    const bool odd = quad & 1, upper = quad & 2;
    uint32_t s = __shfl_xor_sync(kAllLanes, odd ? a : b, 1);
    (odd ? a : b) = s;
    s = __shfl_xor_sync(kAllLanes, odd ? c : d, 1);
    (odd ? c : d) = s;
    s = __shfl_xor_sync(kAllLanes, upper ? a : c, 2);
    (upper ? a : c) = s;
    s = __shfl_xor_sync(kAllLanes, upper ? b : d, 2);
    (upper ? b : d) = s;
  }

  __device__ __forceinline__ void run() {
    if (group == 1) pass_turn();  // the first is the other's
    for (;;) {
      gemm::barrier_wait(shared_address(&box->query_full[q.stage]), q.parity);
      item = box->item[q.stage];
      if (item.begin == item.end) break;
      compute_item();
    }
    if (group == 0) take_turn();  // what the other passed last
  }
};

template <typename T>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    prefill_kernel(const __grid_constant__ PrefillArgs args,
                   const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap kv_map) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ Mailbox box;
  const uint32_t queries = (shared_address(memory) + kAtomBytes - 1) / kAtomBytes * kAtomBytes;
  const uint32_t rings = queries + 2 * T::kQueryBytes;
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpSize, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      gemm::barrier_init(shared_address(&box.query_full[i]), 1);
      gemm::barrier_init(shared_address(&box.query_empty[i]), kComputeWarps);
    }
    for (int i = 0; i < 2 * T::kStages; ++i) {
      gemm::barrier_init(shared_address(&box.full[i % 2][i / 2]), 1);
      gemm::barrier_init(shared_address(&box.empty[i % 2][i / 2]), kComputeWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0) {
      Filler<T> filler{args, kv_map, rings, &box};
      const uint32_t list = rings + 2 * T::kStages * T::kKeysBytes - shared_address(memory);
      filler.run(q_map, queries, reinterpret_cast<int2*>(memory + list));
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Computer<T> computer{args, queries, rings, &box, warp / 4 - 1};
    computer.run();
  }
}

}  // namespace fusewright::attention
