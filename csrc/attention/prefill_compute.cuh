// The warpgroups of a prefill block that compute: the online softmax of 64 rows each.
#pragma once

#include "prefill_tile.cuh"

namespace fusewright::attention {

// Logits of rows that are scaled back by more lie so far apart that more changes nothing.
constexpr int kMostRowShift = 40;

using fusewright::uniform;

__device__ __forceinline__ Item uniform(const Item& item) {
  return {uniform(item.token),   uniform(item.queries), uniform(item.head), uniform(item.position),
          uniform(item.seq_len), uniform(item.begin),   uniform(item.end)};
}

// A thread has two rows, r and r + 8: sums of V, the greatest logit so far, the sum of weights.
template <typename T>
struct Rows {
  float sums[T::kHeadDim / 2];
  float peak[2], total[2];
};

template <typename T>
struct Computer {
  static constexpr int kHeadDim = T::kHeadDim, kTileKeys = T::kTileKeys, kLines = T::kLines;
  static constexpr int kGroupBytes = T::kGroupBytes;
  // It is below all logits, and finite, times their scales too, so that no difference of two peaks
  // is that of two infinities. Queries of an FP8 cache are scaled into fp16.
  static constexpr float kNoPeak = T::kFp8 ? -0x1p60f : -0x1p100f;

  const PrefillArgs& args;
  uint32_t memory;
  Mailbox<T>* box;
  int group;        // 0 to kGroups - 1
  int query, head;  // of the thread's first row, in the tile
  int first_query;  // of the group's rows
  Cursor<T::kQueryStages> q;
  Cursor<T::kStages> k, v;
  Item item;
  float row_scale[2], v_scale;  // of the item, if K and V are FP8
  Rows<T> rows;
  float logits[kTileKeys / 2];
  uint32_t weights[kTileKeys / 4];

  __device__ __forceinline__ Computer(const PrefillArgs& args, uint32_t memory, Mailbox<T>* box,
                                      int group)
      : args(args), memory(memory), box(box), group(group) {
    const int row = group * 64 + threadIdx.x / kWarpSize % 4 * 16 + lane() / 4;
    head = row / args.tile_queries;
    query = row - head * args.tile_queries;
    const int first = uniform(group * 64 % args.tile_queries);
    first_query = first + 64 <= args.tile_queries ? first : 0;  // else of several heads
  }

  __device__ __forceinline__ int lane() const { return threadIdx.x % kWarpSize; }
  template <typename At>
  __device__ __forceinline__ static int index_of(Part part, const At& at) {
    return 2 * at.stage + part;
  }
  template <typename At>
  __device__ __forceinline__ uint32_t stage_of(Part part, const At& at) const {
    return memory + T::kRingsAt + index_of(part, at) * T::kKeysBytes;
  }
  __device__ __forceinline__ void release(uint64_t& barrier) const {
    barrier_arrive_warp(shared_address(&barrier), lane());
  }
  __device__ __forceinline__ void take_turn() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(2 * kWarpgroupThreads) : "memory");
  }
  __device__ __forceinline__ void pass_turn() const {
    const int next = group + 1 == T::kGroups ? 0 : group + 1;
    asm volatile("bar.arrive %0, %1;" ::"r"(1 + next), "r"(2 * kWarpgroupThreads) : "memory");
  }

  // Where the MMAs' operands lie, as `operand` takes it.
  __device__ __forceinline__ uint32_t query_word() const {
    const uint32_t at = memory + q.stage * T::kQueryBytes + group * 64 * kLineBytes;
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
      const int line = step / 4, within = step % 4 * 32;
      multiply<typename T::Operand>(
          logits, operand<kAtomBytes>(query_word, line * T::kQueryLineBytes + within),
          operand<kGroupBytes>(key_word, line * kAtomBytes + within), step == 0);
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
      multiply_add<typename T::Operand>(rows.sums, weights + 4 * step,
                                        operand<kGroupBytes>(value_word, 2 * step * kGroupBytes));
    }
    wgmma_commit_group();
  }

  __device__ __forceinline__ bool capped() const { return T::kGeneral && args.soft_cap > 0; }

  // Returns the scale of row r's logits.
  __device__ __forceinline__ float scale(int r) const {
    return T::kFp8 ? args.scale * row_scale[r] : args.scale;
  }

  // The factor by which a logit of row r becomes an exponent of 2.
  __device__ __forceinline__ float unit(int r) const {
    return (capped() ? args.soft_cap : scale(r)) * kLog2E;
  }

  // Logits become parts of the soft cap, if there is one.
  __device__ __forceinline__ void cap() {
    if (!capped()) return;
    const float factor[2] = {scale(0) / args.soft_cap, scale(1) / args.soft_cap};
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) logits[i] = tanh_of(logits[i] * factor[i / 2 % 2]);
  }

  // Sets the logits of keys that a query must not see to -infinity.
  __device__ __forceinline__ void mask(int tile) {
    const int first = tile * kTileKeys + lane() % 4 * 2;
    const int position = item.position + query;
    int reach[2] = {0, 0};
    if constexpr (T::kGeneral) {
      reach[0] = reach_of(args, position);
      reach[1] = reach_of(args, position + 8);
    }
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) {
      const int key = first + i / 4 * 8 + i % 2, r = i / 2 % 2;
      bool hidden = key > position + 8 * r;
      if constexpr (T::kGeneral) hidden |= key < reach[r];
      if (hidden) logits[i] = -INFINITY;
    }
  }

  // Logits become weights in float32; `alpha` is what earlier sums are to be multiplied by.
  __device__ __forceinline__ void softmax(float (&alpha)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float unit = this->unit(r);
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
      weights[i] = pack<typename T::Operand>(logits[2 * i], logits[2 * i + 1]);
    }
  }

  template <typename At>
  __device__ __forceinline__ void wait_full(Part part, const At& at) const {
    barrier_wait(shared_address(box->full + index_of(part, at)), at.parity);
  }

  __device__ __forceinline__ void clear_values(int begin, int end) const {
    const uint32_t from = stage_of(kValues, v);
    for (int i = threadIdx.x % kWarpgroupThreads; i < (end - begin) * kLines * 8;
         i += kWarpgroupThreads) {
      const int chunk = i % 8, line = i / 8 % kLines, token = begin + i / (8 * kLines);
      store_shared(
          from + token / 8 * kGroupBytes + line * kAtomBytes + token % 8 * kLineBytes + chunk * 16,
          float4{0, 0, 0, 0});
    }
  }

  // Zeros in the oldest V where no query sees anything and what lies there may be no number. That
  // is in a block that holds the sequence's end or the window's begin: of others come zeros. Each
  // warpgroup clears for itself, so that it waits for no other: the words they store are the same.
  __device__ __forceinline__ void clear_unseen(int tile) const {
    const int first = tile * kTileKeys, box = (1 << args.box_shift) - 1;
    const int low = max((T::kGeneral ? reach_of(args, item.position) : 0) - first, 0);
    const int high = min(item.seq_len - first, kTileKeys);
    if (low == 0 && high == kTileKeys) return;
    wait_full(kValues, v);
    clear_values(low & ~box, low);
    clear_values(high, (high + box) & ~box);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, %1;" ::"r"(1 + T::kGroups + group), "r"(kWarpgroupThreads)
                 : "memory");
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
    if (tile == item.begin) release(box->query_empty[q.stage]);
    release(box->empty[index_of(kKeys, k)]);
    k.advance();
    cap();
    if constexpr (kMasked) mask(tile);
    float alpha[2];
    softmax(alpha);
    wgmma_wait_group<0>();
    pin(rows.sums);
    pin(weights);
    release(box->empty[index_of(kValues, v)]);
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
    if (tile == item.begin) release(box->query_empty[q.stage]);
    release(box->empty[index_of(kKeys, k)]);
    k.advance();
    cap();
    mask(tile);
    float alpha[2];
    softmax(alpha);
    round_weights();
    clear_unseen(tile);
    --tile;
    // Tiles below `seen` lie before all of this warpgroup's queries, tiles from `reached` on within
    // reach of the tile's last.
    const int seen = (item.position + first_query + 1) / kTileKeys;
    if constexpr (T::kGeneral) {
      const int last = reach_of(args, item.position + item.queries - 1);
      const int reached = (last + kTileKeys - 1) / kTileKeys;
      for (; tile >= item.begin; --tile) {
        if (tile >= seen || tile < reached) {
          step<true>(tile);
        } else {
          step<false>(tile);
        }
      }
    } else {
      for (; tile >= max(seen, item.begin); --tile) step<true>(tile);
      for (; tile >= item.begin; --tile) step<false>(tile);
    }
    q.advance();
    wait_full(kValues, v);
    start_sums(value_word());
    wgmma_wait_group<0>();
    pin(rows.sums);
    release(box->empty[index_of(kValues, v)]);
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
      if (args.sinks) {
        const float sink =
            sink_of<typename T::Element>(args.sinks, args.wide_sinks, item.head + head);
        total += exp2_approx(sink - rows.peak[r] * unit(r));
      }
      inverse[r] = (T::kFp8 ? v_scale : 1.0f) / total;
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
      const int64_t token = item.token + query + 8 * r;
      const float factor = r == 0 ? low : high;
      Out* to = static_cast<Out*>(args.out) + (token * args.heads + item.head + head) * kHeadDim;
      const bool live = query + 8 * r < item.queries;
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

  // Turns the group's rows of q from bf16 to fp16, in place: a row times the power of two that
  // brings its greatest to 2^14, which loses nothing that counts beside that. Leaves the inverse of
  // it. Two threads take a row, each four of the eight chunks of a line.
  __device__ __forceinline__ void scale_queries() {
    const int at = threadIdx.x % kWarpgroupThreads / 2, part = threadIdx.x % 2;
    const uint32_t line = memory + q.stage * T::kQueryBytes + (group * 64 + at) * kLineBytes;
    uint4 words[kLines * 4];
    __nv_bfloat162 most = __float2bfloat162_rn(0.0f);
#pragma unroll
    for (int i = 0; i < kLines * 4; ++i) {
      words[i] = load_words(line + i / 4 * T::kQueryLineBytes + ((part * 4 + i % 4) ^ at % 8) * 16);
      const __nv_bfloat162* const pairs = reinterpret_cast<const __nv_bfloat162*>(words + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) most = __hmax2(most, __habs2(pairs[j]));
    }
    float peak = fmaxf(__low2float(most), __high2float(most));
    peak = fmaxf(peak, __shfl_xor_sync(kAllLanes, peak, 1));
    const int exponent = max(__float_as_int(peak) >> 23, 15);
    const float factor = __int_as_float((268 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < kLines * 4; ++i) {
      uint32_t* const pairs = reinterpret_cast<uint32_t*>(words + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = unpack_bfloat16(pairs[j]);
        pairs[j] = pack<__half>(pair.x * factor, pair.y * factor);
      }
      store_words(line + i / 4 * T::kQueryLineBytes + ((part * 4 + i % 4) ^ at % 8) * 16, words[i]);
    }
    const int inverse = min(exponent - 14, 127 + kMostRowShift);
    if (part == 0) box->row_scale[group * 64 + at] = __int_as_float(inverse << 23);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, %1;" ::"r"(1 + T::kGroups + group), "r"(kWarpgroupThreads)
                 : "memory");
  }

  __device__ __forceinline__ void set_scales() {
    const float* scales = args.kv_scale ? args.kv_scale + item.head / args.group : nullptr;
    row_scale[0] = row_scale[1] = scales ? __ldg(scales) : 1.0f;
    v_scale = scales ? __ldg(scales + args.kv_heads) : 1.0f;
    if constexpr (T::kScalesQueries) {
      scale_queries();
      const float* const of_rows =
          box->row_scale + group * 64 + threadIdx.x / kWarpSize % 4 * 16 + lane() / 4;
      row_scale[0] *= of_rows[0];
      row_scale[1] *= of_rows[8];
    }
  }

  __device__ __forceinline__ void run() {
    if (group == T::kGroups - 1) pass_turn();  // the first is that of the first
    for (;;) {
      barrier_wait(shared_address(box->query_full + q.stage), q.parity);
      item = uniform(box->item[q.stage]);
      if (item.begin == item.end) break;
      if constexpr (T::kFp8) set_scales();
      compute_item();
    }
    if (group == 0) take_turn();  // what the last passed last
  }
};

}  // namespace fusewright::attention
