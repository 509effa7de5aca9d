// The warpgroups of a prefill block that compute: the online softmax of 64 rows each.
#pragma once

#include "prefill_tile.cuh"

namespace fusewright::attention {

// It is finite, so that no difference of two peaks is that of two infinities.
constexpr float kNoPeak = -0x1p100f;

using fusewright::uniform;

__device__ __forceinline__ Item uniform(const Item& item) {
  return {uniform(item.token),   uniform(item.queries), uniform(item.head), uniform(item.position),
          uniform(item.seq_len), uniform(item.begin),   uniform(item.end)};
}

// A thread has two rows, r and r + 8: sums of V, the greatest logit so far, the sum of weights.
struct Rows {
  float sums[kHeadDim / 2];
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
  Rows rows;
  float logits[kTileKeys / 2];
  uint32_t weights[kTileKeys / 4];

  __device__ __forceinline__ int lane() const { return threadIdx.x % kWarpSize; }
  __device__ __forceinline__ int row() const {
    return group * 64 + threadIdx.x / kWarpSize % 4 * 16 + lane() / 4;
  }
  __device__ __forceinline__ int query_of(int row) const {
    return row & ((1 << args.query_shift) - 1);
  }
  __device__ __forceinline__ uint32_t stage_of(Part part, const Cursor& at) const {
    return rings + (part * kStages + at.stage) * kKeysBytes;
  }
  __device__ __forceinline__ void release(uint64_t& barrier) const {
    __syncwarp();
    if (lane() == 0) barrier_arrive(shared_address(&barrier));
  }
  __device__ __forceinline__ void take_turn() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(2 * kWarpgroupThreads) : "memory");
  }
  __device__ __forceinline__ void pass_turn() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(2 - group), "r"(2 * kWarpgroupThreads) : "memory");
  }

  // Where the MMAs' operands lie, as `operand` takes it.
  __device__ __forceinline__ uint32_t query_word() const {
    const uint32_t at = queries + q.stage * kQueryBytes + group * 64 * kLineBytes;
    return uniform(static_cast<int>(low_word(at, 0)));
  }
  __device__ __forceinline__ uint32_t key_word() const {
    return uniform(static_cast<int>(low_word(stage_of(kKeys, k), 0)));
  }
  __device__ __forceinline__ uint32_t value_word() const {
    return uniform(static_cast<int>(low_word(stage_of(kValues, v), kAtomBytes)));
  }

  // Starts logits = q k^T of the next tile.
  __device__ __forceinline__ void start_logits(uint32_t query_word, uint32_t key_word) {
    pin(logits);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const int half = step / 4, within = step % 4 * 32;
      multiply<typename T::Element>(
          logits, operand<kAtomBytes>(query_word, half * kQueryHalfBytes + within),
          operand<kGroupBytes>(key_word, half * kAtomBytes + within), step == 0);
    }
    wgmma_commit_group();
  }

  // Starts sums += weights v of the oldest tile.
  __device__ __forceinline__ void start_sums(uint32_t value_word) {
    pin(rows.sums);
    pin(weights);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      multiply_add<typename T::Element>(rows.sums, weights + 4 * step,
                                        operand<kGroupBytes>(value_word, 2 * step * kGroupBytes));
    }
    wgmma_commit_group();
  }

  __device__ __forceinline__ bool capped() const { return T::kGeneral && args.soft_cap > 0; }

  // The factor by which a logit becomes an exponent of 2.
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

  // Sets the logits of keys that a query must not see to -infinity.
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
      // This is 1 where the peak stays, also for a tile that the query does not see. A difference
      // of two products would be one fused operation, which keeps what rounding took from one.
      alpha[r] = exp2_approx((rows.peak[r] - peak) * unit);
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

  __device__ __forceinline__ void wait_full(Part part, const Cursor& at) const {
    barrier_wait(shared_address(&box->full[part][at.stage]), at.parity);
  }

  __device__ __forceinline__ void clear_values(int begin, int end) const {
    const uint32_t from = stage_of(kValues, v);
    for (int i = threadIdx.x % kWarpgroupThreads; i < (end - begin) * kHalves * 8;
         i += kWarpgroupThreads) {
      const int chunk = i % 8, half = i / 8 % kHalves, token = begin + i / (8 * kHalves);
      store_shared(
          from + token / 8 * kGroupBytes + half * kAtomBytes + token % 8 * kLineBytes + chunk * 16,
          float4{0, 0, 0, 0});
    }
  }

  // Zeros in the oldest V where no query sees anything and what lies there may be no number. That
  // is in a block that holds the sequence's end or the window's begin: of others come zeros.
  __device__ __forceinline__ void clear_unseen(int tile) const {
    const int first = tile * kTileKeys, box = (1 << args.box_shift) - 1;
    const int low = max((T::kGeneral ? reach_of(args, item.position) : 0) - first, 0);
    const int high = min(item.seq_len - first, kTileKeys);
    if (low == 0 && high == kTileKeys) return;
    wait_full(kValues, v);
    clear_values(low & ~box, low);
    clear_values(high, (high + box) & ~box);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, %1;" ::"r"(3 + group), "r"(kWarpgroupThreads) : "memory");
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(int tile) {
    const uint32_t from_q = query_word(), from_k = key_word(), from_v = value_word();
    wait_full(kKeys, k);
    take_turn();
    start_logits(from_q, from_k);
    wait_full(kValues, v);
    start_sums(from_v);
    pass_turn();
    wgmma_wait_group<1>();
    pin(logits);
    release(box->empty[kKeys][k.stage]);
    k.advance();
    cap();
    if constexpr (kMasked) mask(tile);
    float alpha[2];
    softmax(alpha);
    wgmma_wait_group<0>();
    pin(rows.sums);
    pin(weights);
    release(box->empty[kValues][v.stage]);
    v.advance();
    round_weights();
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) rows.sums[i] *= alpha[i / 2 % 2];
    if constexpr (T::kGeneral) {
      if (tile == item.begin) clear_unseen(tile);
    }
  }

  __device__ __forceinline__ void compute_item() {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) rows.sums[i] = 0.0f;
    rows.peak[0] = rows.peak[1] = kNoPeak;
    rows.total[0] = rows.total[1] = 0.0f;
    int tile = item.end - 1;
    wait_full(kKeys, k);
    take_turn();
    start_logits(query_word(), key_word());
    pass_turn();
    wgmma_wait_group<0>();
    pin(logits);
    release(box->empty[kKeys][k.stage]);
    k.advance();
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
    release(box->empty[kQueries][q.stage]);
    q.advance();
    wait_full(kValues, v);
    start_sums(value_word());
    wgmma_wait_group<0>();
    pin(rows.sums);
    release(box->empty[kValues][v.stage]);
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
      const int at = row() + 8 * r, query = query_of(at),
                head = item.head + (at >> args.query_shift);
      const float factor = r == 0 ? low : high;
      Out* to = static_cast<Out*>(args.out) +
                (static_cast<int64_t>(item.token + query) * args.heads + head) * kHeadDim;
      const bool live = query < item.queries;
#pragma unroll
      for (int base = 0; base < kHeadDim / 8; base += 4) {
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
          transpose_quad(x[0], x[1], x[2], x[3], quad);
          if (live) {
            *reinterpret_cast<uint4*>(to + 8 * (base + quad)) = uint4{x[0], x[1], x[2], x[3]};
          }
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    if (group == 1) pass_turn();  // the first is the other's
    for (;;) {
      wait_full(kQueries, q);
      item = uniform(box->item[q.stage]);
      if (item.begin == item.end) break;
      compute_item();
    }
    if (group == 0) take_turn();  // what the other passed last
  }
};

}  // namespace fusewright::attention
