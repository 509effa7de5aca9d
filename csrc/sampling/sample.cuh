// One token a row: temperature, min-p, top-k, top-p, then the largest of logit / temperature +
// Gumbel noise (ops/sample.py has the meaning).
//
// Limit: at one row, latencies; at hundreds, instructions an element. What it takes:
// - A cluster of blocks a row. Each holds a slice of the row's keys in shared memory: the logits
//   are read once.
// - A threshold is searched by digits of 8 bits from the top: a histogram of the slice, a sum over
//   the blocks' histograms through distributed shared memory, a scan. Top-k counts; top-p weighs,
//   in units of 2^-38 of the best token's weight. Sums of integers have no order: the result
//   depends neither on the schedule nor on the number of blocks.
// - Each lane has a copy of the histogram, whose words lie in its bank: additions never collide in
//   a warp, however alike the logits are.
// - Noise is computed only where it can win: not below the threshold, and not where a bound, a
//   third of its instructions, says that it falls short of what is reached.
//
// Free of any framework: pointers, strides and a stream. Clusters need sm_90.
#pragma once

#include "cluster.cuh"
#include "keys.cuh"

namespace fusewright::sampling {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kDigitBits = 8;
constexpr int kBins = 1 << kDigitBits;
constexpr int kPartBits = 19;  // a weight has two parts of so many bits
constexpr int kMaxBlocks = 16;
constexpr float kGreedyTemperature = 1e-5f;
constexpr float kReach = 27.1f;     // temperatures: exp(-27.1) < 2^-39, noise spans 25.8
constexpr float kRounding = 1e-6f;  // more than a quotient and a sum are rounded by

struct SampleArgs {
  const void* logits;  // [num_rows, vocab]
  int64_t row_stride;  // elements
  int vocab;
  int num_rows;
  const float* temperature;  // [num_rows], as all below
  const int* top_k;          // nullptr: off; likewise the next two
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int* positions;
  int* token_ids;
  float* thresholds;  // nullptr, or the smallest logit that each row that draws keeps
  int slice;          // keys a block holds; a multiple of 16 bytes
};

using Sum = unsigned long long;

struct BlockState {
  Inbox bins[2], bests, winners;
  Sum best_of[kMaxBlocks], winner_of[kMaxBlocks];  // by rank
  Sum warp_sums[kWarpSize];
  Sum remaining;
  uint32_t digit;
};

__device__ __forceinline__ uint32_t ordered(float v) {
  const uint32_t bits = __float_as_uint(v + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The largest of a warp.
__device__ __forceinline__ Sum warp_max(Sum v) {
  const uint32_t high = static_cast<uint32_t>(v >> 32);
  const uint32_t highest = __reduce_max_sync(kAllLanes, high);
  const uint32_t low = high == highest ? static_cast<uint32_t>(v) : 0;
  return Sum{highest} << 32 | __reduce_max_sync(kAllLanes, low);
}

template <typename F, int kThreads, int kCopies>
struct Row {
  static constexpr int kVector = 16 / sizeof(typename F::Raw);
  static constexpr int kTeam = kThreads / kBins;  // threads that add up a bin's copies

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

  // Reads the slice; the largest key of the row.
  __device__ uint32_t load(const typename F::Raw* logits) {
    uint32_t best = 0;
    const auto take = [&](uint32_t raw) {
      const uint32_t key = F::key_of(raw);
      best = max(best, key);
      return key;
    };
    auto* const single = reinterpret_cast<typename F::Raw*>(keys);
    const bool aligned = reinterpret_cast<uintptr_t>(logits) % 16 == 0;
    const int whole = aligned ? count / kVector : 0;
    for (int i = threadIdx.x; i < whole; i += kThreads) {
      const uint4 packed = __ldg(reinterpret_cast<const uint4*>(logits) + i);
      uint32_t words[] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (uint32_t& word : words) {
        word = F::kBits == 32 ? take(word) : take(word & 0xffffu) | take(word >> 16) << 16;
      }
      keys[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    const int end = (count + kVector - 1) / kVector * kVector;
    for (int i = whole * kVector + threadIdx.x; i < end; i += kThreads) {
      single[i] = static_cast<typename F::Raw>(i < count ? take(logits[i]) : 0);
    }
    best = static_cast<uint32_t>(largest_of_block(best));
    const int lane = threadIdx.x % kWarpSize;
    cluster_wait();
    if (threadIdx.x < blocks) state.bests.send(&state.best_of[rank], best, lane);
    state.bests.wait(0);
    return static_cast<uint32_t>(warp_max(lane < blocks ? state.best_of[lane] : 0));
  }

  // In the first warp.
  __device__ Sum largest_of_block(Sum v) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    v = warp_max(v);
    if (lane == 0) state.warp_sums[warp] = v;
    __syncthreads();
    return warp == 0 ? warp_max(lane < kThreads / kWarpSize ? state.warp_sums[lane] : 0) : 0;
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

  // Of the row's bins, from the top, the one in which the sum reaches the target: sets state.digit
  // and state.remaining, what of the target is left for it; 0 where all bins are empty.
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
      if (lane == kWarpSize - 1) state.warp_sums[warp] = sum;
    }
    __syncthreads();
    if (bin >= 0) {
      Sum total = 0;
#pragma unroll
      for (int i = 0; i < kBins / kWarpSize; ++i) {
        if (i == warp) sum += total;
        total += state.warp_sums[i];
      }
      const Sum target = target_of(total);
      if (sum >= target && sum - own < target) {
        state.digit = bin;
        state.remaining = target - (sum - own);
      }
      if (total == 0 && bin == 0) state.remaining = 0;
    }
    ++round;
    __syncthreads();
  }

  // The key of the top_k-th largest.
  __device__ uint32_t find_top_k(int top_k) {
    Sum target = top_k;
    uint32_t prefix = 0;
    uint32_t* const mine = histogram + threadIdx.x % kCopies;
    for (int shift = F::kBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
      each_key([&](uint32_t key, int) {
        const uint32_t digit = (key ^ prefix) >> shift;
        if (digit < kBins) atomicAdd(mine + digit * kCopies, 1);
      });
      __syncthreads();
      merge_copies<false>();
      find_digit([&](Sum) { return target; });
      prefix |= state.digit << shift;
      target = state.remaining;
    }
    return prefix;
  }

  // The largest key such that it and those above hold at least top_p of the mass of keys from
  // `floor` on; that of -inf where there is no mass.
  __device__ uint32_t find_top_p(float top_p, uint32_t floor, float best, float temperature) {
    const float scale = fmaxf(1.44269504f / temperature, 0x1p-126f);  // not 0: that times infinity
    Sum target = 0;
    uint32_t prefix = 0;
    uint32_t* const mine = histogram + threadIdx.x % kCopies;
    for (int shift = F::kBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
      each_key([&](uint32_t key, int) {
        const uint32_t digit = (key ^ prefix) >> shift;
        if (digit >= kBins || key < floor) return;
        // Two parts of kPartBits by additions that round: conversions would take four times longer.
        const float units = exp2f((F::value_of(key) - best) * scale) * (1 << kPartBits);
        const float high = __fadd_rd(units, 0x1p23f);
        const float low = __fmaf_rn(units - (high - 0x1p23f), 1 << kPartBits, 0x1p23f);
        const uint32_t high_part = __float_as_uint(high) - 0x4B000000u;
        const uint32_t low_part = __float_as_uint(low) - 0x4B000000u;
        uint32_t* const counter = mine + digit * kCopies;
        if (low_part) atomicAdd(counter, low_part);
        if (high_part) atomicAdd(counter + kBins * kCopies, high_part);
      });
      __syncthreads();
      merge_copies<true>();
      const bool first_round = shift == F::kBits - kDigitBits;
      find_digit([&](Sum total) {
        if (!first_round) return target;
        // Some mass at all: a top_p of 0 keeps the best token, not none.
        const double mass = ceil(static_cast<double>(top_p) * static_cast<double>(total));
        return mass < 1 ? Sum{1} : static_cast<Sum>(mass);
      });
      prefix |= state.digit << shift;
      target = state.remaining;
      if (target == 0) return F::kLowest;
    }
    return prefix;
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
    winner = largest_of_block(winner);
    if (threadIdx.x == 0) state.winners.send(&state.winner_of[rank], winner, 0);
    if (rank != 0 || threadIdx.x >= kWarpSize) return 0;
    state.winners.wait(0);
    return warp_max(threadIdx.x < blocks ? state.winner_of[threadIdx.x] : 0);
  }
};

template <typename F, int kThreads, int kBlocksPerSm, int kCopies>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) sample_kernel(SampleArgs args) {
  extern __shared__ __align__(16) uint32_t dynamic[];
  __shared__ BlockState state;
  using Raw = typename F::Raw;
  const int blocks = blocks_in_cluster(), rank = block_rank();
  const int row = blockIdx.x / blocks;
  const int first = rank * args.slice;
  constexpr int kCounters = 2 * kBins * kCopies;
  auto* const received = reinterpret_cast<Sum*>(dynamic + kCounters);
  Row<F, kThreads, kCopies> r{
      state,  dynamic, received, reinterpret_cast<uint4*>(received + 2 * blocks * kBins),
      blocks, rank,    first,    max(0, min(args.slice, args.vocab - first))};
  if (threadIdx.x == 0) {
    for (Inbox* inbox : {&state.bins[0], &state.bins[1], &state.bests, &state.winners}) {
      inbox->init();
    }
    Inbox::fence_init();
    state.bins[0].expect(blocks * kBins * sizeof(Sum));
    state.bins[1].expect(blocks * kBins * sizeof(Sum));
    state.bests.expect(blocks * sizeof(Sum));
    state.winners.expect(blocks * sizeof(Sum));
  }
  __syncwarp();
  cluster_arrive();
  for (int i = threadIdx.x; i < kCounters / 4; i += kThreads) {
    reinterpret_cast<uint4*>(dynamic)[i] = make_uint4(0, 0, 0, 0);
  }
  cudaGridDependencySynchronize();

  const float temperature = args.temperature[row];
  const uint32_t best_key =
      r.load(static_cast<const Raw*>(args.logits) + row * args.row_stride + first);
  uint32_t threshold = F::kLowest;
  Sum winner;
  if (temperature < kGreedyTemperature) {
    winner = r.largest(best_key);
  } else {
    float best = F::value_of(best_key);
    if (best_key == F::kLowest) best = 0.0f;
    // What is further below has a weight of less than half a unit, and no noise lifts it up to the
    // best token's.
    const uint32_t relevant = F::least_key(best - kReach * temperature - kRounding * fabsf(best));
    if (args.min_p && args.min_p[row] > 0) {
      threshold = F::least_key(fminf(best + temperature * logf(args.min_p[row]), best));
    }
    const int top_k = args.top_k ? args.top_k[row] : 0;
    if (top_k > 0 && top_k < args.vocab) threshold = max(threshold, r.find_top_k(top_k));
    if (args.top_p && args.top_p[row] < 1) {
      const uint32_t floor = max(threshold, relevant);
      threshold = max(threshold, r.find_top_p(args.top_p[row], floor, best, temperature));
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
