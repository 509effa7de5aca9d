// One token a row: temperature, min-p, top-k, top-p, then the largest of logit / temperature +
// Gumbel noise (ops/sampling/sample.py has the meaning).
//
// Limit: at one row, latencies; at hundreds, instructions an element. What it takes:
// - A cluster of blocks a row. Each holds a slice of the row's keys in shared memory: the logits
//   are read once.
// - A threshold is searched by digits of 8 bits: a histogram of the slice, a sum over the blocks'
//   histograms through distributed shared memory, a scan. The first digit counts down from the best
//   key, and in 16 bits is most often the only one. Top-k counts; top-p weighs, in units of 2^-38
//   of the best token's weight. Sums of integers have no order: the result depends neither on the
//   schedule nor on the number of blocks.
// - Two lanes share a copy of the histogram, whose words lie in their bank: additions hardly
//   collide in a warp, however alike the logits are.
// - Noise is computed only where it can win: not below the threshold, and not where a bound, a
//   third of its instructions, says that it falls short of what is reached.
//
// Free of any framework: pointers, strides and a stream. Clusters need sm_90.
#pragma once

#include "../common/cluster.cuh"
#include "keys.cuh"
#include "sample.h"

namespace fusewright::sampling {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kDigitBits = 8;
constexpr int kBins = 1 << kDigitBits;
constexpr int kCopies = 16;              // of a histogram
constexpr int kTeam = kThreads / kBins;  // threads that add up a bin's copies
constexpr int kCounters = 2 * kBins * kCopies;
constexpr int kPartBits = 19;  // a weight has two parts of so many bits
constexpr float kGreedyTemperature = 1e-5f;
constexpr float kReach = 27.1f;     // temperatures: exp(-27.1) < 2^-39, noise spans 25.8
constexpr float kRounding = 1e-6f;  // more than a quotient and a sum are rounded by

using Sum = unsigned long long;

// Each exchange between a block's warps has an array of its own: no barrier of the block lies
// between what reads one and what writes the next.
struct BlockState {
  Inbox bins[2], bests, outsides, winners;
  Sum best_of[kMostBlocks], outside_of[kMostBlocks], winner_of[kMostBlocks];  // by rank
  uint32_t warp_bests[kWarps];
  Sum warp_outsides[kWarps], warp_bins[kBins / kWarpSize], warp_winners[kWarps];
  Sum target, remaining;  // remaining: 0 where the bins do not hold the target
  uint32_t digit;
};

__device__ __forceinline__ uint32_t ordered(float v) {
  const uint32_t bits = __float_as_uint(v + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The largest of a warp.
__device__ __forceinline__ uint32_t warp_max(uint32_t v) { return __reduce_max_sync(kAllLanes, v); }

__device__ __forceinline__ Sum warp_max(Sum v) {
  const uint32_t high = static_cast<uint32_t>(v >> 32);
  const uint32_t highest = __reduce_max_sync(kAllLanes, high);
  const uint32_t low = high == highest ? static_cast<uint32_t>(v) : 0;
  return Sum{highest} << 32 | __reduce_max_sync(kAllLanes, low);
}

// The largest of a block, in its first warp.
template <typename V>
__device__ __forceinline__ V block_max(V v, V (&warp_maxima)[kWarps]) {
  static_assert(kWarps == kWarpSize);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  v = warp_max(v);
  if (lane == 0) warp_maxima[warp] = v;
  __syncthreads();
  return warp == 0 ? warp_max(warp_maxima[lane]) : 0;
}

template <typename F>
struct Row {
  using Raw = typename F::Raw;
  static constexpr int kVector = 16 / sizeof(Raw);

  BlockState& state;
  uint32_t* histogram;  // [2, kBins, kCopies]: low parts or counts, high parts
  Sum* received;        // [2, blocks, kBins]: two, as a block may still read one
  uint4* keys;
  int blocks, rank;
  int first, count;  // the slice's place in the row, and what of it there is
  int round = 0;

  template <typename Use>
  __device__ void each_key(Use use) const {
    const int vectors = (count + kVector - 1) / kVector;
    for (int i = threadIdx.x; i < vectors; i += kThreads) {
      const uint4 packed = keys[i];
      const uint32_t words[] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const uint32_t key =
            F::kBits == 32 ? words[j] : (j % 2 ? words[j / 2] >> 16 : words[j / 2] & 0xffffu);
        use(key, i * kVector + j);
      }
    }
  }

  // Reads the slice; the largest key of the row, above kHighest if the row has a NaN.
  __device__ uint32_t load(const Raw* logits) {
    constexpr int kAhead = 4;  // loads of a thread in flight
    uint32_t best = 0, least = 0xffffffffu;
    const auto take = [&](uint32_t word) {
      const uint32_t key = F::keys_of(word);
      best = F::max_of(best, key);
      least = F::min_of(least, key);
      return key;
    };
    const bool aligned = reinterpret_cast<uintptr_t>(logits) % 16 == 0;
    const int whole = aligned ? count / kVector : 0;
    for (int i = threadIdx.x; i < whole; i += kAhead * kThreads) {
      uint4 packed[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int at = i + j * kThreads;
        if (at < whole) packed[j] = __ldg(reinterpret_cast<const uint4*>(logits) + at);
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int at = i + j * kThreads;
        const uint4 p = packed[j];
        if (at < whole) keys[at] = make_uint4(take(p.x), take(p.y), take(p.z), take(p.w));
      }
    }
    if (F::kBits == 16) {
      best = max(best & 0xffffu, best >> 16);
      least = min(least & 0xffffu, least >> 16);
    }
    auto* const single = reinterpret_cast<Raw*>(keys);
    const int end = (count + kVector - 1) / kVector * kVector;
    for (int i = whole * kVector + threadIdx.x; i < end; i += kThreads) {
      const Raw key = static_cast<Raw>(i < count ? F::keys_of(logits[i]) : 0);
      single[i] = key;
      best = max(best, uint32_t{key});
      if (i < count) least = min(least, uint32_t{key});
    }
    if (least < F::kLowest) best = F::kHighest + 1;  // a NaN whose sign is set
    best = block_max(best, state.warp_bests);
    const int lane = threadIdx.x % kWarpSize;
    cluster_wait();
    if (threadIdx.x < blocks) state.bests.send(&state.best_of[rank], best, lane);
    state.bests.wait(0);
    return static_cast<uint32_t>(warp_max(lane < blocks ? state.best_of[lane] : 0));
  }

  // The copies of each bin added up, told to all blocks, and zero again.
  template <bool kMass>
  __device__ void merge_copies() {
    constexpr int kSteps = kCopies / kTeam / 4;
    const int bin = threadIdx.x / kTeam, part = threadIdx.x % kTeam;
    auto* low = reinterpret_cast<uint4*>(histogram + bin * kCopies) + part * kSteps;
    Sum sum = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint4 a = low[i];
      low[i] = make_uint4(0, 0, 0, 0);
      sum += Sum{a.x} + a.y + a.z + a.w;
      if constexpr (kMass) {
        uint4& high = low[kBins * kCopies / 4 + i];
        const uint4 b = high;
        high = make_uint4(0, 0, 0, 0);
        sum += (Sum{b.x} + b.y + b.z + b.w) << kPartBits;
      }
    }
#pragma unroll
    for (int step = 1; step < kTeam; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    for (int to = part; to < blocks; to += kTeam) {
      state.bins[round % 2].send(received + (round % 2 * blocks + rank) * kBins + bin, sum, to);
    }
  }

  // Tells all blocks what lies below the window, of which each thread has a part.
  __device__ void send_outside() {
    if (threadIdx.x >= kWarpSize) return;
    Sum sum = state.warp_outsides[threadIdx.x];
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (threadIdx.x < blocks) state.outsides.send(&state.outside_of[rank], sum, threadIdx.x);
  }

  // Of the row's bins, from the top, the one in which the sum reaches the target: sets state.digit
  // and state.remaining, what of the target is left for it.
  template <typename Target>
  __device__ void find_digit(Target target_of) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int bin = kBins - 1 - static_cast<int>(threadIdx.x);
    Sum own = 0, sum = 0;
    if (bin >= 0) {
      Inbox& inbox = state.bins[round % 2];
      inbox.wait(round / 2 % 2);
      if (threadIdx.x == 0) inbox.expect(blocks * kBins * sizeof(Sum));
      const Sum* const from = received + round % 2 * blocks * kBins + bin;
#pragma unroll 8
      for (int i = 0; i < blocks; ++i) own += from[i * kBins];
      sum = own;
#pragma unroll
      for (int step = 1; step < kWarpSize; step *= 2) {
        const Sum below = __shfl_up_sync(kAllLanes, sum, step);
        if (lane >= step) sum += below;
      }
      if (lane == kWarpSize - 1) state.warp_bins[warp] = sum;
    }
    __syncthreads();
    if (bin >= 0) {
      Sum total = 0;
#pragma unroll
      for (int i = 0; i < kBins / kWarpSize; ++i) {
        if (i == warp) sum += total;
        total += state.warp_bins[i];
      }
      const Sum target = target_of(total);
      if (sum >= target && sum - own < target) {
        state.digit = bin;
        state.remaining = target - (sum - own);
      }
      if (threadIdx.x == 0) {
        state.target = target;
        if (total < target) state.remaining = 0;
      }
    }
    ++round;
    __syncthreads();
  }

  // The largest key such that it and those above number, or weigh, what target_of makes of the sum
  // of all; keys for which `weigh` gives nothing do not count. kLowest if there is no such key.
  //
  // First with a window: the kBins prefixes of 16 bits from the best one's down. Most often it
  // holds the target, and few keys, so that few additions meet in memory; what is below is added up
  // in registers. If not, by digits from the top.
  template <bool kMass, typename Weigh, typename Target>
  __device__ uint32_t search(uint32_t best, Weigh weigh, Target target_of) {
    constexpr int kShift = F::kBits - 16;
    uint32_t* const mine = histogram + threadIdx.x % kCopies;
    const auto add = [&](uint32_t digit, uint2 parts) {
      uint32_t* const counter = mine + digit * kCopies;
      if (!kMass || parts.x) atomicAdd(counter, parts.x);
      if (kMass && parts.y) atomicAdd(counter + kBins * kCopies, parts.y);
    };
    const uint32_t lowest = max(best >> kShift, kBins - 1) - (kBins - 1);
    uint2 outside = {0, 0};
    each_key([&](uint32_t key, int) {
      const uint32_t digit = (key >> kShift) - lowest;
      if (!kMass && digit >= kBins) return;
      const uint2 parts = weigh(key);
      if (digit < kBins) {
        add(digit, parts);
      } else {
        outside.x += parts.x, outside.y += parts.y;
      }
    });
    if (kMass) {  // a thread has few keys: a warp's sums of parts fit 32 bits
      const Sum low = __reduce_add_sync(kAllLanes, outside.x);
      const Sum high = __reduce_add_sync(kAllLanes, outside.y);
      if (threadIdx.x % kWarpSize == 0) {
        state.warp_outsides[threadIdx.x / kWarpSize] = low + (high << kPartBits);
      }
    }
    __syncthreads();
    if (kMass) send_outside();
    merge_copies<kMass>();
    find_digit([&](Sum total) {
      if (kMass) {
        state.outsides.wait(0);
        for (int i = 0; i < blocks; ++i) total += state.outside_of[i];
      }
      return target_of(total);
    });
    Sum target = state.remaining;
    uint32_t prefix = (lowest + state.digit) << kShift;
    int shift = kShift - kDigitBits;
    if (target == 0) target = state.target, prefix = 0, shift = F::kBits - kDigitBits;
    for (; shift >= 0; shift -= kDigitBits) {
      each_key([&](uint32_t key, int) {
        const uint32_t digit = (key ^ prefix) >> shift;
        if (digit < kBins) add(digit, weigh(key));
      });
      __syncthreads();
      merge_copies<kMass>();
      find_digit([&](Sum) { return target; });
      target = state.remaining;
      if (target == 0) return F::kLowest;
      prefix |= state.digit << shift;
    }
    return F::least_equal(prefix);
  }

  // The key of the top_k-th largest.
  __device__ uint32_t find_top_k(int top_k, uint32_t best) {
    return search<false>(
        best, [](uint32_t) { return make_uint2(1, 0); }, [&](Sum) { return Sum(top_k); });
  }

  // The largest key such that it and those above hold at least top_p of the mass of keys from
  // `floor` on; kLowest where there is no mass.
  __device__ uint32_t find_top_p(float top_p, uint32_t floor, uint32_t best_key, float best,
                                 float temperature) {
    const float scale = fmaxf(1.44269504f / temperature, 0x1p-126f);  // not 0: that times infinity
    const auto weigh = [&](uint32_t key) {
      if (key < floor) return make_uint2(0, 0);
      // Two parts of kPartBits by additions that round: conversions would take four times longer.
      const float units = exp2f((F::value_of(key) - best) * scale) * (1 << kPartBits);
      const float high = __fadd_rd(units, 0x1p23f);
      const float low = __fmaf_rn(units - (high - 0x1p23f), 1 << kPartBits, 0x1p23f);
      return make_uint2(__float_as_uint(low) - 0x4B000000u, __float_as_uint(high) - 0x4B000000u);
    };
    return search<true>(best_key, weigh, [&](Sum total) {
      // Some mass at all: a top_p of 0 keeps the best token, not none.
      const double mass = ceil(static_cast<double>(top_p) * static_cast<double>(total));
      return mass < 1 ? Sum{1} : static_cast<Sum>(mass);
    });
  }

  // (ordered value, complement of the index) of the slice's largest: of equals the first wins.
  __device__ Sum largest(uint32_t threshold) const {
    Sum winner = Sum{ordered(-INFINITY)} << 32 | 0xffffffffu;
    each_key([&](uint32_t key, int i) {
      if (key < threshold) return;
      const Sum mine = Sum{ordered(F::value_of(key))} << 32 | ~static_cast<uint32_t>(first + i);
      winner = max(winner, mine);
    });
    return winner;
  }

  __device__ Sum largest_noisy(uint32_t threshold, float best, float temperature,
                               const Noise& noise) const {
    Sum winner = Sum{ordered(-INFINITY)} << 32 | 0xffffffffu;
    const float inverse = 1.0f / temperature;
    // The best token gets this far with the least noise.
    float reached = best * inverse + Noise::kLeast - kRounding * fabsf(best * inverse);
    each_key([&](uint32_t key, int i) {
      if (key < threshold) return;
      const float value = F::value_of(key), about = value * inverse;
      const uint32_t index = first + i, bits = noise.bits(index);
      // Not the other way round: nothing is decided by what is no number.
      if (__fmaf_rn(fabsf(about), kRounding, about) + Noise::bound_of_bits(bits) < reached) return;
      const float noisy = __fadd_rn(__fdiv_rn(value, temperature), Noise::of_bits(bits));
      reached = fmaxf(reached, noisy);
      winner = max(winner, Sum{ordered(noisy)} << 32 | ~index);
    });
    return winner;
  }

  // The largest of the row's winners, in the first warp of the block of rank 0.
  __device__ Sum largest_of_row(Sum winner) {
    winner = block_max(winner, state.warp_winners);
    if (threadIdx.x == 0) state.winners.send(&state.winner_of[rank], winner, 0);
    if (rank != 0 || threadIdx.x >= kWarpSize) return 0;
    state.winners.wait(0);
    return warp_max(threadIdx.x < blocks ? state.winner_of[threadIdx.x] : 0);
  }
};

template <typename F>
__global__ void __launch_bounds__(kThreads, 1) sample_kernel(SampleArgs args) {
  extern __shared__ __align__(16) uint32_t dynamic[];
  __shared__ BlockState state;
  const int blocks = blocks_in_cluster(), rank = block_rank();
  const int row = blockIdx.x / blocks;
  const int first = rank * args.slice;
  auto* const received = reinterpret_cast<Sum*>(dynamic + kCounters);
  Row<F> r{state,  dynamic, received, reinterpret_cast<uint4*>(received + 2 * blocks * kBins),
           blocks, rank,    first,    max(0, min(args.slice, args.vocab - first))};
  if (threadIdx.x == 0) {
    for (Inbox* inbox : {&state.bins[0], &state.bins[1]}) inbox->init();
    for (Inbox* inbox : {&state.bests, &state.outsides, &state.winners}) inbox->init();
    barrier_init_fence();
    for (Inbox* inbox : {&state.bins[0], &state.bins[1]}) {
      inbox->expect(blocks * kBins * sizeof(Sum));
    }
    for (Inbox* inbox : {&state.bests, &state.outsides, &state.winners}) {
      inbox->expect(blocks * sizeof(Sum));
    }
  }
  __syncwarp();
  cluster_arrive();
  for (int i = threadIdx.x; i < kCounters / 4; i += kThreads) {
    reinterpret_cast<uint4*>(dynamic)[i] = make_uint4(0, 0, 0, 0);
  }
  cudaGridDependencySynchronize();

  const float temperature = args.temperature[row];
  const uint32_t best_key =
      r.load(static_cast<const typename F::Raw*>(args.logits) + row * args.row_stride + first);
  const bool greedy = temperature < kGreedyTemperature;
  // All threads of the cluster have the same best key, and nobody sends to one that has it but has
  // nothing more to do.
  if (best_key <= F::kLowest || best_key >= F::kHighest + greedy) {
    if (rank == 0 && threadIdx.x == 0) {
      args.token_ids[row] = best_key <= F::kLowest ? kNothingLeft : kNotANumber;
      if (args.thresholds) args.thresholds[row] = -INFINITY;
    }
    return;
  }
  uint32_t threshold = F::kLowest;
  Sum winner;
  if (greedy) {
    winner = r.largest(F::least_equal(best_key));
  } else {
    const float best = F::value_of(best_key);
    // What is further below has a weight of less than half a unit, and no noise lifts it up to the
    // best token's.
    const uint32_t relevant = F::least_key(best - kReach * temperature - kRounding * fabsf(best));
    if (args.min_p && args.min_p[row] > 0) {
      threshold = F::least_key(fminf(best + temperature * logf(args.min_p[row]), best));
    }
    const int top_k = args.top_k ? args.top_k[row] : 0;
    if (top_k > 0 && top_k < args.vocab) threshold = max(threshold, r.find_top_k(top_k, best_key));
    if (args.top_p && args.top_p[row] < 1) {
      const uint32_t floor = max(threshold, relevant);
      threshold = max(threshold, r.find_top_p(args.top_p[row], floor, best_key, best, temperature));
    }
    winner = r.largest_noisy(max(threshold, relevant), best, temperature,
                             Noise(args.seeds[row], args.positions[row]));
  }
  winner = r.largest_of_row(winner);
  if (rank == 0 && threadIdx.x == 0) {
    args.token_ids[row] = static_cast<int>(~static_cast<uint32_t>(winner));
    if (args.thresholds) args.thresholds[row] = F::value_of(threshold);
  }
}

}  // namespace fusewright::sampling
