// Attention of many queries a sequence over a paged KV cache, for tensor cores of sm_90a: the
// forward pass of FlashAttention-3 (Shah et al., 2024).
//
// Limit: products of matrices. What it takes to stay near that:
// - A block is two warpgroups that compute, 64 queries of one head each, and a warp that fills a
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
constexpr float kNoPeak = -1.0e30f;
#ifndef FW_PINGPONG
#define FW_PINGPONG 1
#endif
#ifndef FW_OVERLAP
#define FW_OVERLAP 1
#endif

// kGeneral: with a window or a soft cap.
template <typename E, int kDim, bool kIsGeneral>
struct PrefillTile {
  using Element = E;
  static constexpr int kHeadDim = kDim;
  static constexpr bool kGeneral = kIsGeneral;
  static constexpr int kHalves = kDim / 64;         // lines of 128 bytes that a row has
  static constexpr int kGroupBytes = kHalves * kAtomBytes;  // of eight tokens
  static constexpr int kQueryBytes = kTileQueries * kDim * 2;
  static constexpr int kKeysBytes = kTileKeys * kDim * 2;
  static constexpr int kStages = 2;
  static constexpr int kBytes = kQueryBytes + 2 * kStages * kKeysBytes;
};

// Barriers of a block, and what comes with them.
struct alignas(16) Mailbox {
  uint64_t query_full, query_empty;
  uint64_t full[2][2], empty[2][2];  // of K and V: of each stage
  Item item;
};

// A place in a ring and which time around it is.
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    stage ^= 1;
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
  Cursor cursor[2];
  Item item;
  const int* table;
  int reach;  // the first position that a query of the item sees

  // The cache's group of eight tokens where this lane's copy of tile t begins, of K; or none.
  __device__ __forceinline__ int group_of(int t) const {
    const int position = t * kTileKeys + (threadIdx.x % kWarpSize << args.box_shift);
    const bool readable = position < item.seq_len && position + (1 << args.box_shift) > reach &&
                          t >= item.begin;
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
    at.advance();
  }

  __device__ __forceinline__ void run(const CUtensorMap& q_map, uint32_t query, int* scratch,
                                      int max_seqs) {
    Sequences sequences{scratch, scratch + max_seqs, scratch + 2 * max_seqs, 0, 0, 0};
    sequences.collect(args);
    const int lane = threadIdx.x % kWarpSize;
    const int items = sequences.total * args.heads;
    gemm::wait_for_previous();
    uint32_t parity = 1;
    const uint32_t query_full = shared_address(&box->query_full);
    for (int n = blockIdx.x; n < items;) {
      int seq, tile;
      sequences.find(n / args.heads, seq, tile);
      item = item_of(args, seq, tile, n % args.heads);
      unsigned taken = 0;
      if (args.counters && lane == 0) taken = atomicAdd(args.counters, 1);
      table = args.block_table + seq * args.table_stride;
      reach = args.window > 0 ? max(item.position - args.window + 1, 0) : 0;
      int group = group_of(item.end - 1);
      gemm::barrier_wait(shared_address(&box->query_empty), parity);
      parity ^= 1;
      if (lane == 0) {
        box->item = item;
        gemm::barrier_expect_bytes(query_full, T::kQueryBytes);
#pragma unroll
        for (int half = 0; half < T::kHalves; ++half) {
          copy_box_3d(query + half * kTileQueries * 128, q_map, item.token,
                      item.head * T::kHalves + half, query_full);
        }
      }
      for (int t = item.end - 1; t >= item.begin; --t) {
        const int here = group;
        group = group_of(t - 1);  // ahead, since it takes a while
        fill<0>(here);
        fill<1>(here);
      }
      n = args.counters ? gridDim.x + __shfl_sync(kAllLanes, taken, 0) : n + gridDim.x;
    }
    gemm::start_next();
    gemm::barrier_wait(shared_address(&box->query_empty), parity);
    if (lane == 0) {
      box->item.begin = box->item.end = 0;
      gemm::barrier_arrive(query_full);
      if (args.counters && atomicAdd(args.counters + 1, 1) == gridDim.x - 1) {
        args.counters[0] = args.counters[1] = 0;
      }
    }
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
  uint32_t query, rings;
  Mailbox* box;
  int group;  // 0 or 1
  Cursor k, v;
  Item item;
  Rows<T> rows;
  float logits[kTileKeys / 2];
  uint32_t weights[kTileKeys / 4];

  __device__ __forceinline__ int lane() const { return threadIdx.x % kWarpSize; }
  __device__ __forceinline__ int row() const {
    return group * 64 + threadIdx.x / kWarpSize % 4 * 16 + lane() / 4;
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
    const uint32_t from = keys(0, k), q = query + group * 64 * 128;
    pin(logits);
    products_fence();
#pragma unroll
    for (int step = 0; step < T::kHeadDim / 16; ++step) {
      const int half = step / 4, within = step % 4 * 32;
      multiply<typename T::Element>(
          logits, describe(q + half * kTileQueries * 128 + within, 16, kAtomBytes),
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
    const int position = item.position + row();
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

  // Zeros in V where no query of the item sees anything: what lies there may be no number. Of those
  // copies that brought something; the others brought zeros.
  __device__ __forceinline__ void clear_unseen(int tile) {
    const int first = tile * kTileKeys;
    const int reach =
        T::kGeneral && args.window > 0 ? max(item.position - args.window + 1, 0) : 0;
    const int low = max(reach - first, 0), high = min(item.seq_len - first, kTileKeys);
    if (low == 0 && high == kTileKeys) return;
    wait_full(1, v);
    const uint32_t from = keys(1, v);
    for (int i = threadIdx.x % kWarpgroupThreads; i < kTileKeys * T::kHalves * 8;
         i += kWarpgroupThreads) {
      const int chunk = i % 8, half = i / 8 % T::kHalves, token = i / (8 * T::kHalves);
      if (token >= low && token < high) continue;
      store_shared(from + token / 8 * T::kGroupBytes + half * kAtomBytes + token % 8 * 128 +
                       chunk * 16,
                   float4{0, 0, 0, 0});
    }
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
    pass_turn();
    products_wait<1>();
    pin(logits);
    release(box->empty[0][k.stage]);
    k.advance();
    cap();
    if constexpr (kMasked) mask(tile);
    float alpha[2];
    softmax(alpha);
#if FW_OVERLAP
    // Weights come before the wait: without a use of their sum, the compiler puts them behind it.
    asm volatile(
        "{\n\t.reg .pred never;\n\tsetp.lt.f32 never, %0, 0f00000000;\n\t"
        "@never st.shared.f32 [%1], %0;\n\t}" ::"f"(rows.total[0] + rows.total[1]),
        "r"(query)
        : "memory");
#endif
    products_wait<0>();
    pin(rows.sums);
    pin(weights);
    release(box->empty[1][v.stage]);
    v.advance();
    round_weights();
#pragma unroll
    for (int i = 0; i < T::kHeadDim / 2; ++i) rows.sums[i] *= alpha[i / 2 % 2];
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
    k.advance();
    cap();
    mask(tile);
    float alpha[2];
    softmax(alpha);
    round_weights();
    clear_unseen(tile);
    --tile;
    // The first tile that all of this warpgroup's queries see to its end.
    const int seen = T::kGeneral ? 0 : (item.position + group * 64 + 1) / kTileKeys;
    for (; tile >= max(seen, item.begin); --tile) step<true>(tile);
    for (; tile >= item.begin; --tile) step<T::kGeneral>(tile);
    release(box->query_empty);
    wait_full(1, v);
    start_sums();
    products_wait<0>();
    pin(rows.sums);
    release(box->empty[1][v.stage]);
    v.advance();
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
      const int at = row() + 8 * r;
      const float factor = r == 0 ? low : high;
      Out* to = static_cast<Out*>(args.out) +
                (static_cast<int64_t>(item.token + at) * args.heads + item.head) * T::kHeadDim;
      const bool live = at < item.queries;
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
    for (uint32_t parity = 0;; parity ^= 1) {
      gemm::barrier_wait(shared_address(&box->query_full), parity);
      item = box->item;
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
                   const __grid_constant__ CUtensorMap kv_map, int max_seqs) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ Mailbox box;
  const uint32_t query = (shared_address(memory) + kAtomBytes - 1) / kAtomBytes * kAtomBytes;
  const uint32_t rings = query + T::kQueryBytes;
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpSize, 0);
  if (threadIdx.x == 0) {
    gemm::barrier_init(shared_address(&box.query_full), 1);
    gemm::barrier_init(shared_address(&box.query_empty), kComputeWarps);
    for (int i = 0; i < 4; ++i) {
      gemm::barrier_init(shared_address(&box.full[i / 2][i % 2]), 1);
      gemm::barrier_init(shared_address(&box.empty[i / 2][i % 2]), kComputeWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0) {
      Filler<T> filler{args, kv_map, rings, &box, {}, {}, nullptr, 0};
      int* scratch = reinterpret_cast<int*>(memory + (rings - shared_address(memory)) +
                                            2 * T::kStages * T::kKeysBytes);
      filler.run(q_map, query, scratch, max_seqs);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Computer<T> computer{args, query, rings, &box, warp / 4 - 1};
    computer.run();
  }
}

}  // namespace fusewright::attention
