// The first layer of the chosen experts of a few tokens: gates, ups, and the product of the two.
#pragma once

#include "experts.cuh"

namespace fusewright::moe {

// A block keeps this beside its ring.
template <typename T>
struct GateUpShared {
  // Two tiles take turns: one warp writes the outputs of one while the others add up the next.
  typename T::Sums sums[2];
  uint64_t full[2], empty[2];  // barriers of the two
  float norm_scale[kMaxTokens];
  Plan plan;
};

// Tiles of gate_up: a block takes consecutive ones, which share pages of memory.
struct GateUpTiles {
  int stripes, first, last;

  static __device__ GateUpTiles of(const ExpertsArgs& args, const Plan& plan) {
    const int stripes = args.out_features / kTileRows;
    const int64_t num_tiles = stripes * plan.num_chosen, block = blockIdx.x;
    return {stripes, static_cast<int>(num_tiles * block / gridDim.x),
            static_cast<int>(num_tiles * (block + 1) / gridDim.x)};
  }

  __device__ Segment segment(const Plan& plan, int tile) const {
    const int chosen = tile / stripes;
    return {chosen, plan.expert[chosen], tile % stripes * kTileRows};
  }
};

// Runs in one warp. Its first lane copies the weights of all tiles, each of the next a row of x.
template <typename T>
__device__ __forceinline__ void copy_gate_up(const CUtensorMap& weight_map,
                                             const CUtensorMap& x_map, const Ring<T>& ring,
                                             const Plan& plan, const GateUpTiles& tiles,
                                             int num_steps) {
  const int lane = threadIdx.x % kWarpSize, column = lane - 1;
  RingPlace place;
  int fill = 0;
  for (int tile = tiles.first; tile < tiles.last; ++tile) {
    const Segment segment = tiles.segment(plan, tile);
    const int count = min(plan.count(segment.chosen), T::kXRows);
    const bool has_row = column >= 0 && column < count;
    const int row = has_row ? plan.token[plan.begin[segment.chosen] + column] : 0;
    for (int step = 0; step < num_steps; ++step, ++fill, place.advance(T::kStages)) {
      wait_until_empty<T>(ring, place, fill);
      if (lane == 0) copy_weight<T>(ring, place.stage, weight_map, segment, step, count);
      __syncwarp();
      if (has_row) copy_x_row<T>(ring, place.stage, x_map, step, row, column);
    }
  }
}

// Runs in another warp, and copies the tiles' scales.
template <typename T>
__device__ __forceinline__ void copy_gate_up_scales(const Ring<T>& ring, const Plan& plan,
                                                    const GateUpTiles& tiles, int num_steps,
                                                    const ExpertsArgs& args) {
  RingPlace place;
  int fill = 0;
  for (int tile = tiles.first; tile < tiles.last; ++tile) {
    const Segment segment = tiles.segment(plan, tile);
    for (int step = 0; step < num_steps; ++step, ++fill, place.advance(T::kStages)) {
      wait_until_empty<T>(ring, place, fill);
      copy_scales<T>(ring, place.stage, args, segment, step);
    }
  }
}

__device__ __forceinline__ gemm::Epilogue epilogue_of(Activation activation) {
  return activation == Activation::kSiluMul ? gemm::Epilogue::kSiluMul
                                            : gemm::Epilogue::kGeluTanhMul;
}

// Whether gate_up has a warp that only writes outputs. A tile's take as long as one or two steps of
// the ring, in which the warps that multiply would wait. One token in bfloat16 is faster without.
template <typename T>
constexpr bool kHasWriter = T::kXRows > 1 || T::kWeightBytes == 1;

// Runs in one warp, and finds the scales of the norm with eight lanes a token.
template <typename T>
__device__ __forceinline__ void find_norm_scales(GateUpShared<T>& shared, const ExpertsArgs& args) {
  if (!args.squares) return;
  for (int i = threadIdx.x % kWarpSize; i < kMaxTokens * 8; i += kWarpSize) {
    const float scale = gemm::norm_scale(i, args.squares, args.num_square_groups, args.num_tokens,
                                         args.in_features, args.eps);
    if (i % 8 == 0) shared.norm_scale[i / 8] = scale;
  }
  __syncwarp();
}

// Runs in one warp. A tile's gates and ups are rounded, gates activated, both multiplied.
template <typename T>
__device__ __forceinline__ void write_tile(const ExpertsArgs& args, const GateUpShared<T>& shared,
                                           const typename T::Sums& sums, const Segment& segment) {
  const Plan& plan = shared.plan;
  const int lane = threadIdx.x % kWarpSize, row = lane % kTileRows;
  const int count = min(plan.count(segment.chosen), T::kXRows);
  for (int column = lane / kTileRows; column < count; column += kWarpSize / kTileRows) {
    const int at = plan.begin[segment.chosen] + column;
    const float norm = args.squares ? shared.norm_scale[plan.token[at]] : 1.0f;
    const auto sum = [&](int r) {
      return gemm::rounded(add_warps<T>(sums, column, r) * norm, gemm::Element::kBFloat16);
    };
    const float gate = gemm::activated(sum(row), epilogue_of(args.activation));
    args.y[static_cast<int64_t>(plan.pair[at]) * args.out_features + segment.row + row] =
        __float2bfloat16_rn(gate * sum(row + kTileRows));
  }
}

// Runs in the writer.
template <typename T>
__device__ __forceinline__ void write_gate_up(GateUpShared<T>& shared, const GateUpTiles& tiles,
                                              const ExpertsArgs& args) {
  find_norm_scales<T>(shared, args);
  for (int tile = tiles.first; tile < tiles.last; ++tile) {
    const int i = tile - tiles.first, buffer = i % 2;
    barrier_wait(shared_address(&shared.full[buffer]), i / 2 % 2);
    write_tile<T>(args, shared, shared.sums[buffer], tiles.segment(shared.plan, tile));
    barrier_arrive_warp(shared_address(&shared.empty[buffer]));
  }
}

// Runs in the warps that multiply. Without a writer, the first of them writes.
template <typename T>
__device__ __forceinline__ void add_gate_up(const Ring<T>& ring, GateUpShared<T>& shared,
                                            const GateUpTiles& tiles, int num_steps,
                                            const ExpertsArgs& args) {
  const bool writes = !kHasWriter<T> && threadIdx.x < kWarpSize;
  if (writes) find_norm_scales<T>(shared, args);
  RingPlace place;
  const auto line_place = LinePlace<T>::of();
  for (int tile = tiles.first; tile < tiles.last; ++tile) {
    const int i = tile - tiles.first, buffer = i % 2;
    float sums[4] = {};
    add_segment<T>(ring, place, line_place, num_steps, sums);
    if (kHasWriter<T> && i >= 2) {
      barrier_wait(shared_address(&shared.empty[buffer]), (i / 2 - 1) % 2);
    }
    store_sums<T>(shared.sums[buffer], sums);
    if constexpr (kHasWriter<T>) {
      barrier_arrive_warp(shared_address(&shared.full[buffer]));
    } else {
      sync_consumers<T>();
      if (writes) {
        write_tile<T>(args, shared, shared.sums[buffer], tiles.segment(shared.plan, tile));
      }
    }
  }
}

template <typename T>
constexpr int kGateUpThreads =
    T::kConsumers + (T::kCopyWarps + (kHasWriter<T> ? 1 : 0)) * kWarpSize;

template <typename T>
__global__ void __launch_bounds__(kGateUpThreads<T>)
    gate_up_kernel(const __grid_constant__ CUtensorMap weight_map,
                   const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ ExpertsArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Ring<T> ring{shared_address(memory)};
  auto& shared = *reinterpret_cast<GateUpShared<T>*>(memory + T::kRingBytes);
  if (kHasWriter<T> && threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&shared.full[i]), T::kLines);
      barrier_init(shared_address(&shared.empty[i]), 1);
    }
  }
  init_ring<T>(ring, weight_map, x_map);
#pragma unroll 1
  for (int real = 0; real < 2; ++real) {
    if (real) wait_for_previous();
    make_plan(shared.plan, args, real);
  }
  start_next();  // which may rely on what this kernel has waited for
  const GateUpTiles tiles = GateUpTiles::of(args, shared.plan);
  const int num_steps = steps_of<T>(args), warp = threadIdx.x / kWarpSize;
  if (warp < T::kCopyWarp) {
    add_gate_up<T>(ring, shared, tiles, num_steps, args);
  } else if (warp == T::kCopyWarp) {
    copy_gate_up<T>(weight_map, x_map, ring, shared.plan, tiles, num_steps);
  } else if (T::kScales > 0 && warp == T::kScaleWarp) {
    copy_gate_up_scales<T>(ring, shared.plan, tiles, num_steps, args);
  } else if constexpr (kHasWriter<T>) {
    write_gate_up<T>(shared, tiles, args);
  }
}

}  // namespace fusewright::moe
