// The second layer of the chosen experts of a few tokens, and the weighted sum of the experts.
#pragma once

#include <math_constants.h>

#include "experts.cuh"

namespace fusewright::moe {

// A block keeps this beside its ring.
template <typename T>
struct DownShared {
  typename T::Sums sums;
  Plan plan;
  float topk_weight[kMaxPairs];
  float weight_of[kMaxPairs][T::kXRows];  // a chosen expert's for a token, or kNoWeight's bits
};

// No weight has these bits: a NaN is stored as another.
constexpr uint32_t kNoWeight = 0xffffffffu;

// The warps of down that copy all chosen experts' rows of the block's tile. Weights and scales go
// ahead of x, which is waited for.
template <typename T>
struct DownProducer {
  const Ring<T>& ring;
  const Plan& plan;
  const ExpertsArgs& args;
  int num_steps;

  // A step of a chosen expert, and its stage.
  struct Place {
    int chosen = 0, step = 0;
    RingPlace ring;
  };

  __device__ void advance(Place& place) const {
    place.ring.advance(T::kStages);
    if (++place.step == num_steps) {
      place.step = 0;
      ++place.chosen;
    }
  }

  __device__ Segment segment(const Place& place) const {
    return {place.chosen, plan.expert[place.chosen], static_cast<int>(blockIdx.x) * T::kRows};
  }

  __device__ int num_fills() const { return plan.num_chosen * num_steps; }

  __device__ void copy_weights(const CUtensorMap& map, const Place& place) const {
    if (threadIdx.x % kWarpSize != 0) return;
    const int num_x_rows = plan.count(place.chosen);
    copy_weight<T>(ring, place.ring.stage, map, segment(place), place.step, num_x_rows);
  }

  __device__ void copy_x(const CUtensorMap& map, const Place& place) const {
    const int column = static_cast<int>(threadIdx.x % kWarpSize) - 1;
    if (column < 0 || column >= plan.count(place.chosen)) return;
    const int at = plan.begin[place.chosen] + column;
    copy_x_row<T>(ring, place.ring.stage, map, place.step, plan.pair[at], plan.token[at]);
  }

  // Runs in one warp. Its first lane copies weights, each of the next a row of x.
  __device__ void copy(const CUtensorMap& weight_map, const CUtensorMap& x_map) const {
    const int fills = num_fills(), ahead = min(fills, T::kStages);
    Place weights, x;
    for (int fill = 0; fill < ahead; ++fill, advance(weights)) copy_weights(weight_map, weights);
    start_next();
    wait_for_previous();
    for (int fill = 0; fill < ahead; ++fill, advance(x)) copy_x(x_map, x);
    for (int fill = ahead; fill < fills; ++fill, advance(weights)) {
      wait_until_empty<T>(ring, weights.ring, fill);
      copy_weights(weight_map, weights);
      __syncwarp();
      copy_x(x_map, weights);
    }
  }

  // Runs in another warp.
  __device__ void copy_all_scales() const {
    Place place;
    for (int fill = 0; fill < num_fills(); ++fill, advance(place)) {
      wait_until_empty<T>(ring, place.ring, fill);
      copy_scales<T>(ring, place.ring.stage, args, segment(place), place.step);
    }
    wait_for_previous();
  }
};

// One output of a token, of which this thread has the sum.
struct DownOutput {
  bool real = false;
  int64_t at = 0;
  float residual = 0.0f, shared = 0.0f, norm_weight = 0.0f;
};

__device__ __forceinline__ DownOutput read_output(const ExpertsArgs& args, int token, int n) {
  DownOutput output;
  output.real = token < args.num_tokens && n < args.out_features;
  if (!output.real) return output;
  output.at = static_cast<int64_t>(token) * args.out_features + n;
  if (args.residual) output.residual = __bfloat162float(args.residual[output.at]);
  if (args.norm_weight) output.norm_weight = __bfloat162float(args.norm_weight[n]);
  return output;
}

// Rounded where separate ops would round. By whole warps: eight lanes have a token's outputs, and
// leave their sum of squares.
__device__ __forceinline__ void write_output(const ExpertsArgs& args, const DownOutput& output,
                                             float sum) {
  constexpr auto kElement = gemm::Element::kBFloat16;
  float total = gemm::rounded(sum, kElement);
  if (args.shared) total = gemm::rounded(total + output.shared, kElement);
  if (args.residual) total = gemm::rounded(total + output.residual, kElement);
  if (output.real) args.y[output.at] = __float2bfloat16_rn(total);
  if (!args.norm_weight) return;
  if (output.real) args.weighted[output.at] = __float2bfloat16_rn(total * output.norm_weight);
  float squares = total * total;
#pragma unroll
  for (int other = kTileRows / 2; other; other /= 2) {
    squares += __shfl_xor_sync(kAllLanes, squares, other);
  }
  if (output.real && output.at % kTileRows == 0) args.squares_out[output.at / kTileRows] = squares;
}

// A chosen expert's weights for the two tokens whose sums this thread has.
template <typename T>
struct ColumnWeights {
  uint32_t bits[2];

  __device__ static ColumnWeights of(const DownShared<T>& shared, int chosen) {
    const int column = threadIdx.x % 4 * 2;
    ColumnWeights found = {{kNoWeight, kNoWeight}};
#pragma unroll
    for (int odd = 0; odd < 2 && odd < T::kXRows; ++odd) {
      if (column + odd < T::kXRows) {
        found.bits[odd] = __float_as_uint(shared.weight_of[chosen][column + odd]);
      }
    }
    return found;
  }

  // Adds sums of the expert, times its weight for each token that chose it.
  __device__ void add(const float (&part)[4], float (&sums)[4]) const {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const float sum = fmaf(part[odd], __uint_as_float(bits[odd]), sums[odd]);
      if (bits[odd] != kNoWeight) sums[odd] = sum;
    }
  }
};

template <typename T>
__device__ __forceinline__ void consume_down(const Ring<T>& ring, DownShared<T>& shared,
                                             int num_steps, const ExpertsArgs& args) {
  static_assert(T::kRows * kMaxTokens <= T::kConsumers && T::kRows == kTileRows);
  const Plan& plan = shared.plan;
  const int token = threadIdx.x / T::kRows, row = threadIdx.x % T::kRows;
  // If the ids are ready, so is the residual; the shared experts' result may not be.
  if (!args.ids_ready) wait_for_previous();
  DownOutput output = read_output(args, token, blockIdx.x * T::kRows + row);
  const auto line_place = LinePlace<T>::of();
  wait_for_previous();  // the kernel before may read what y overwrites
  if (args.shared && output.real) output.shared = __bfloat162float(args.shared[output.at]);
  const int num_chosen = plan.num_chosen;
  float sums[4] = {};
  RingPlace place;
  for (int chosen = 0; chosen < num_chosen; ++chosen) {
    const auto weights = ColumnWeights<T>::of(shared, chosen);
    float part[4] = {};
    add_segment<T>(ring, place, line_place, num_steps, part);
    weights.add(part, sums);
  }
  store_sums<T>(shared.sums, sums);
  sync_consumers<T>();
  if (threadIdx.x >= kTileRows * kMaxTokens) return;
  const int column = min(token, T::kXRows - 1);  // of more than there are, none is written
  write_output(args, output, add_warps<T>(shared.sums, column, row));
}

template <typename T>
__device__ __forceinline__ void read_routing(DownShared<T>& shared, const ExpertsArgs& args) {
  const int thread = threadIdx.x, num_pairs = args.num_tokens * args.top_k;
  if (thread < num_pairs) {
    const float weight = __ldcg(args.topk_weights + thread);
    shared.topk_weight[thread] = weight == weight ? weight : CUDART_NAN_F;
  }
  float* const none = &shared.weight_of[0][0];
  for (int i = thread; i < num_pairs * T::kXRows; i += blockDim.x) {
    none[i] = __uint_as_float(kNoWeight);
  }
  make_plan(shared.plan, args);
  const Plan& plan = shared.plan;
  if (thread < plan.num_chosen) {
    for (int i = plan.begin[thread]; i < plan.begin[thread + 1]; ++i) {
      shared.weight_of[thread][plan.token[i]] = shared.topk_weight[plan.pair[i]];
    }
  }
  __syncthreads();
}

template <typename T>
constexpr int kDownThreads = T::kConsumers + T::kCopyWarps * kWarpSize;

// Beside two blocks of down for few tokens, a multiprocessor's registers last for gate_up's one.
template <typename T>
constexpr int kRegisterShares = T::kXRows <= 2 ? 3 : 1;

template <typename T>
__global__ void __launch_bounds__(kDownThreads<T>, kRegisterShares<T>)
    down_kernel(const __grid_constant__ CUtensorMap weight_map,
                const __grid_constant__ CUtensorMap x_map,
                const __grid_constant__ ExpertsArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Ring<T> ring{shared_address(memory)};
  auto& shared = *reinterpret_cast<DownShared<T>*>(memory + T::kRingBytes);
  init_ring<T>(ring, weight_map, x_map);
  if (!args.ids_ready) wait_for_previous();
  read_routing<T>(shared, args);
  const int num_steps = steps_of<T>(args);
  const DownProducer<T> producer{ring, shared.plan, args, num_steps};
  const int warp = threadIdx.x / kWarpSize;
  if (warp == T::kCopyWarp) {
    producer.copy(weight_map, x_map);
  } else if (T::kScales > 0 && warp == T::kScaleWarp) {
    producer.copy_all_scales();
  } else {
    consume_down<T>(ring, shared, num_steps, args);
  }
}

}  // namespace fusewright::moe
