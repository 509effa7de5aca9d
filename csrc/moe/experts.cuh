// The chosen experts of a few tokens: gate_up with its activation, and down with the weighted sum.
//
// Limit: memory. Each chosen expert's weight is read once, for all its tokens, and no other's is.
// Weights stream as gemm/skinny_linear.cuh has it: tensor copies into rings of shared memory, MMAs
// of 16 rows by 8 tokens. Only rows of x that an expert needs are copied beside its weight.
//
// - gate_up: eight gates and the ups of the same outputs are a tile. Blocks, as many as run at
//   once, divide all chosen experts' tiles and fetch across their ends. Which experts those are is
//   known only when the router is done, so nothing is read before.
// - down: a block has the same eight rows of all chosen experts, and adds up each token's outputs
//   in registers, experts in ascending order, each times its weight. What the experts' weights are
//   multiplied with comes late, but the choice has long been there (ids_ready): the ring is filled
//   with weights before the wait.
//
// Each output's sum has one order, whatever other tokens there are.
#pragma once

#include "plan.cuh"
#include "tile.cuh"

namespace fusewright::moe {

// The shared memory that a block keeps beside its ring.
template <typename T>
struct GateUpShared {
  typename T::Sums sums[2];  // of two tiles in turn: one is read while the next is written
  float norm_scale[kMaxTokens];
  Plan plan;
};

template <typename T>
struct DownShared {
  typename T::Sums sums;
  Plan plan;
  float topk_weight[kMaxPairs];
  alignas(16) int16_t pair_of[kMaxPairs][kMaxTokens];  // a chosen expert's, with a token; or -1
};

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

template <typename T>
__device__ __forceinline__ void init_ring(const Ring<T>& ring, const CUtensorMap& weight_map,
                                          const CUtensorMap& x_map) {
  if (threadIdx.x == 0) {
    prefetch_map(weight_map);
    prefetch_map(x_map);
    for (int stage = 0; stage < T::kStages; ++stage) {
      barrier_init(ring.full(stage), T::kScales > 0 ? 1 + kWarpSize : 1);
      barrier_init(ring.empty(stage), T::kLines);
    }
    barrier_init_fence();
  }
}

// Four bytes, or zero without reading.
__device__ __forceinline__ void copy_float(uint32_t to, const float* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}

// By a warp: the scales of a step of a segment, which its full barrier waits for.
template <typename T>
__device__ __forceinline__ void copy_scales(const Ring<T>& ring, int stage, const ExpertsArgs& args,
                                            const Segment& segment, int step) {
  if constexpr (T::kScales > 0) {
    const int groups = args.in_features / gemm::kScaleBlock;
    for (int lane = threadIdx.x % kWarpSize; lane < T::kScales; lane += kWarpSize) {
      const int row = lane < T::kEightsScales ? segment.low : segment.high;
      const int i = lane % T::kEightsScales;
      bool valid = true;
      int64_t at = row + i;
      if constexpr (T::Operands::kBlockScales) {
        const int group = step * T::kLines + i;
        valid = group < groups;
        at = static_cast<int64_t>(row / gemm::kScaleBlock) * groups + group;
      }
      copy_float(ring.scale(stage, lane), args.weight_scale + (valid ? at : 0), valid);
    }
    copy_async_arrive(ring.full(stage));
  }
}

// By a warp: weights of a step of a segment, whose rows of x will follow.
template <typename T>
__device__ __forceinline__ void copy_weight(const Ring<T>& ring, int stage, const CUtensorMap& map,
                                            const ExpertsArgs& args, const Segment& segment,
                                            int step, int num_x_rows) {
  copy_scales<T>(ring, stage, args, segment, step);
  if (threadIdx.x % kWarpSize != 0) return;
  const uint32_t full = ring.full(stage), to = ring.weight(stage);
  barrier_expect_bytes(full, T::kRows * T::kRowBytes + num_x_rows * T::kXRowBytes);
  gemm::copy_box(to, map, 0, step * T::kLines, segment.low, full, gemm::kEvictFirst);
  if constexpr (T::kRows == 16) {
    gemm::copy_box(to + 8 * T::kRowBytes, map, 0, step * T::kLines, segment.high, full,
                   gemm::kEvictFirst);
  }
}

template <typename T>
__device__ __forceinline__ void copy_x_row(const Ring<T>& ring, int stage, const CUtensorMap& map,
                                           int step, int row, int column) {
  gemm::copy_box(ring.x(stage) + column * T::kXRowBytes, map, 0, step * T::kXLines, row,
                 ring.full(stage), gemm::kEvictNormal);
}

// The parity of a stage's `empty` to wait for is that of the round before.
template <typename T>
__device__ __forceinline__ void wait_until_empty(const Ring<T>& ring, const RingPlace& place,
                                                 int fill) {
  if (fill >= T::kStages) barrier_wait(ring.empty(place.stage), place.parity ^ 1);
}

// Tiles of gate_up: a block takes consecutive ones, which share pages of memory.
struct GateUpTiles {
  int stripes, first, last;

  static __device__ GateUpTiles of(const ExpertsArgs& args, const Plan& plan) {
    const int stripes = args.out_features / kTileRows;
    const int64_t num_tiles = stripes * plan.num_chosen, block = blockIdx.x;
    return {stripes, static_cast<int>(num_tiles * block / gridDim.x),
            static_cast<int>(num_tiles * (block + 1) / gridDim.x)};
  }

  __device__ Segment segment(const ExpertsArgs& args, const Plan& plan, int tile) const {
    const int chosen = tile / stripes;
    const int low = plan.expert[chosen] * 2 * args.out_features + first_output(tile);
    return {chosen, low, low + args.out_features};
  }

  __device__ int first_output(int tile) const { return tile % stripes * kTileRows; }
};

// The producer warp: lane 0 copies weights, each of the next a row of x.
template <typename T>
__device__ __forceinline__ void produce_gate_up(const CUtensorMap& weight_map,
                                                const CUtensorMap& x_map, const Ring<T>& ring,
                                                const Plan& plan, const GateUpTiles& tiles,
                                                int num_steps, const ExpertsArgs& args) {
  const int lane = threadIdx.x % kWarpSize, column = lane - 1;
  RingPlace place;
  int fill = 0;
  for (int tile = tiles.first; tile < tiles.last; ++tile) {
    const Segment segment = tiles.segment(args, plan, tile);
    const int count = min(plan.count(segment.chosen), T::kXRows);
    const bool has_row = column >= 0 && column < count;
    const int row = has_row ? plan.token[plan.begin[segment.chosen] + column] : 0;
    for (int step = 0; step < num_steps; ++step, ++fill, place.advance(T::kStages)) {
      wait_until_empty<T>(ring, place, fill);
      copy_weight<T>(ring, place.stage, weight_map, args, segment, step, count);
      __syncwarp();
      if (has_row) copy_x_row<T>(ring, place.stage, x_map, step, row, column);
    }
  }
}

__device__ __forceinline__ gemm::Epilogue epilogue_of(Activation activation) {
  return activation == Activation::kSiluMul ? gemm::Epilogue::kSiluMul
                                            : gemm::Epilogue::kGeluTanhMul;
}

// A tile's outputs: gates and ups rounded, activated, multiplied.
template <typename T>
__device__ __forceinline__ void write_gate_up(const ExpertsArgs& args,
                                              const GateUpShared<T>& shared,
                                              const typename T::Sums& sums, int chosen,
                                              int first_output) {
  const Plan& plan = shared.plan;
  const int column = threadIdx.x / kTileRows, row = threadIdx.x % kTileRows;
  if (column >= min(plan.count(chosen), T::kXRows)) return;
  const int at = plan.begin[chosen] + column;
  const float norm = args.squares ? shared.norm_scale[plan.token[at]] : 1.0f;
  const auto sum = [&](int r) {
    return gemm::rounded(add_warps<T>(sums, column, r) * norm, gemm::Element::kBFloat16);
  };
  const float gate = gemm::activated(sum(row), epilogue_of(args.activation));
  args.y[static_cast<int64_t>(plan.pair[at]) * args.out_features + first_output + row] =
      __float2bfloat16_rn(gate * sum(row + kTileRows));
}

template <typename T>
__device__ __forceinline__ void consume_gate_up(const Ring<T>& ring, GateUpShared<T>& shared,
                                                const GateUpTiles& tiles, int num_steps,
                                                const ExpertsArgs& args) {
  static_assert(kTileRows * T::kXRows <= T::kConsumers && kMaxTokens * 8 <= T::kConsumers);
  if (args.squares && threadIdx.x < kMaxTokens * 8) {
    const float scale = gemm::norm_scale(threadIdx.x, args.squares, args.num_square_groups,
                                         args.num_tokens, args.in_features, args.eps);
    if (threadIdx.x % 8 == 0) shared.norm_scale[threadIdx.x / 8] = scale;
  }
  RingPlace place;
  int buffer = 0;
  for (int tile = tiles.first; tile < tiles.last; ++tile, buffer ^= 1) {
    float sums[4] = {};
    add_segment<T>(ring, place, num_steps, sums);
    store_sums<T>(shared.sums[buffer], sums);
    sync_consumers<T>();
    write_gate_up<T>(args, shared, shared.sums[buffer], tile / tiles.stripes,
                     tiles.first_output(tile));
  }
}

template <typename T>
__device__ __forceinline__ int steps_of(const ExpertsArgs& args) {
  return (args.in_features * T::kWeightBytes + T::kRowBytes - 1) / T::kRowBytes;
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads)
    gate_up_kernel(const __grid_constant__ CUtensorMap weight_map,
                   const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ ExpertsArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Ring<T> ring{shared_address(memory)};
  auto& shared = *reinterpret_cast<GateUpShared<T>*>(memory + T::kRingBytes);
  init_ring<T>(ring, weight_map, x_map);
#pragma unroll 1
  for (int real = 0; real < 2; ++real) {
    if (real) wait_for_previous();
    make_plan(shared.plan, args, real);
  }
  start_next();  // which may rely on what this kernel has waited for
  const GateUpTiles tiles = GateUpTiles::of(args, shared.plan);
  const int num_steps = steps_of<T>(args);
  if (threadIdx.x >= T::kConsumers) {
    produce_gate_up<T>(weight_map, x_map, ring, shared.plan, tiles, num_steps, args);
  } else {
    consume_gate_up<T>(ring, shared, tiles, num_steps, args);
  }
}

// The producer warp of down: all chosen experts' rows of the block's tile. Weights go ahead of x,
// which is waited for.
template <typename T>
struct DownProducer {
  const CUtensorMap& weight_map;
  const CUtensorMap& x_map;
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

  __device__ void copy_weights(const Place& place) const {
    const int low = plan.expert[place.chosen] * args.out_features + blockIdx.x * T::kRows;
    const Segment segment = {place.chosen, low, low};
    copy_weight<T>(ring, place.ring.stage, weight_map, args, segment, place.step,
                   plan.count(place.chosen));
  }

  __device__ void copy_x(const Place& place) const {
    const int column = static_cast<int>(threadIdx.x % kWarpSize) - 1;
    if (column < 0 || column >= plan.count(place.chosen)) return;
    const int at = plan.begin[place.chosen] + column;
    copy_x_row<T>(ring, place.ring.stage, x_map, place.step, plan.pair[at], plan.token[at]);
  }

  __device__ void run() const {
    const int num_fills = plan.num_chosen * num_steps;
    const int num_ahead = min(num_fills, T::kStages);
    Place weights, x;
    for (int fill = 0; fill < num_ahead; ++fill, advance(weights)) copy_weights(weights);
    start_next();
    wait_for_previous();
    for (int fill = 0; fill < num_ahead; ++fill, advance(x)) copy_x(x);
    for (int fill = num_ahead; fill < num_fills; ++fill, advance(weights)) {
      wait_until_empty<T>(ring, weights.ring, fill);
      copy_weights(weights);
      __syncwarp();
      copy_x(weights);
    }
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
  if (args.shared) output.shared = __bfloat162float(args.shared[output.at]);
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

// Sums of one expert, times its weight for each token that chose it.
template <typename T>
__device__ __forceinline__ void add_weighted(const DownShared<T>& shared, int chosen,
                                             const float (&part)[4], float (&sums)[4]) {
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const int pair = shared.pair_of[chosen][threadIdx.x % 4 * 2 + odd];
    if (pair < 0) continue;
    sums[odd] += part[odd] * shared.topk_weight[pair];
  }
}

template <typename T>
__device__ __forceinline__ void consume_down(const Ring<T>& ring, DownShared<T>& shared,
                                             int num_steps, const ExpertsArgs& args) {
  static_assert(T::kRows * kMaxTokens <= T::kConsumers && T::kRows == kTileRows);
  const int token = threadIdx.x / T::kRows, row = threadIdx.x % T::kRows;
  const DownOutput output = read_output(args, token, blockIdx.x * T::kRows + row);
  const Plan& plan = shared.plan;
  float sums[4] = {};
  RingPlace place;
  for (int chosen = 0; chosen < plan.num_chosen; ++chosen) {
    float part[4] = {};
    add_segment<T>(ring, place, num_steps, part);
    add_weighted<T>(shared, chosen, part, sums);
  }
  store_sums<T>(shared.sums, sums);
  sync_consumers<T>();
  if (threadIdx.x >= kTileRows * kMaxTokens) return;
  const int column = min(token, T::kXRows - 1);  // of more than there are, none is written
  write_output(args, output, add_warps<T>(shared.sums, column, row));
}

template <typename T>
__device__ __forceinline__ void read_routing(DownShared<T>& shared, const ExpertsArgs& args) {
  const int thread = threadIdx.x;
  if (thread < args.num_tokens * args.top_k) {
    shared.topk_weight[thread] = __ldcg(args.topk_weights + thread);
  }
  static_assert(sizeof(shared.pair_of[0]) == sizeof(int4));
  if (thread < kMaxPairs) {
    reinterpret_cast<int4*>(shared.pair_of)[thread] = int4{-1, -1, -1, -1};
  }
  make_plan(shared.plan, args);
  const Plan& plan = shared.plan;
  if (thread < plan.num_chosen) {
    for (int i = plan.begin[thread]; i < plan.begin[thread + 1]; ++i) {
      shared.pair_of[thread][plan.token[i]] = static_cast<int16_t>(plan.pair[i]);
    }
  }
  __syncthreads();
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads)
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
  if (threadIdx.x >= T::kConsumers) {
    DownProducer<T>{weight_map, x_map, ring, shared.plan, args, num_steps}.run();
  } else {
    wait_for_previous();  // the kernel before may read what y overwrites
    consume_down<T>(ring, shared, num_steps, args);
  }
}

}  // namespace fusewright::moe
