// The warpgroups of the persistent GEMM that compute and store.
#pragma once

#include "../common/numbers.cuh"
#include "persistent_scales.cuh"

namespace fusewright::gemm {

template <typename T>
struct PersistentComputer {
  const SkinnyLinearArgs& args;
  PersistentShared<T>& shared;
  uint32_t ring;
  uint32_t scratch;  // of this warp
  int group;         // of the two
  PersistentCursor<T::kStages> at;
  float sums[T::kSums];

  // Tells who fills that this warp has read a stage.
  __device__ __forceinline__ void release(int stage) const {
    barrier_arrive_warp(shared_address(&shared.empty[stage]));
  }

  __device__ __forceinline__ void wait() const {
    barrier_wait(shared_address(&shared.full[at.stage]), at.parity);
  }

  // The first row of x, and of the stage's weight, that this warpgroup multiplies.
  __device__ __forceinline__ int first_row() const { return T::kShareRows ? group * kMmaRows : 0; }
  __device__ __forceinline__ int first_weight_row() const {
    return T::kShareRows ? 0 : group * T::kGroupWeightRows;
  }

  // The first output of this warpgroup in a tile.
  __device__ __forceinline__ int first_output() const {
    return T::kShareRows ? 0 : group * T::kGroupOutputs;
  }

  __device__ __forceinline__ void start_step(bool fresh) {
    const int to = ring + at.stage * T::kStageBytes;
    const uint32_t word = uniform(static_cast<int>(low_word(to, 0)));
    const int rows = first_row() * kLineBytes;
    const int weight_rows = T::kXBytes + first_weight_row() * kLineBytes;
    pin(sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kLineBytes; k += 32) {
      multiply_wide(sums, operand<kAtomBytes>(word + (rows >> 4), k),
                    operand<kAtomBytes>(word + (weight_rows >> 4), k), fresh && k == 0);
    }
    wgmma_commit_group();
  }

  __device__ __forceinline__ void let_other_start() const {
    asm volatile("bar.arrive %0, %1;" ::"n"(kLeadBarrier), "n"(2 * kWarpgroupThreads) : "memory");
  }

  // Goes through the steps of a tile that has no rows for this warpgroup.
  __device__ __forceinline__ void pass(int steps, bool first_tile) {
    if (first_tile && group == 0) let_other_start();
    for (int step = 0; step < steps; ++step) {
      wait();
      release(at.stage);
      at.advance();
    }
  }

  // `first_tile`: the other warpgroup waits for the first steps of this one.
  __device__ __forceinline__ void compute(int steps, bool first_tile) {
    const int lead_at = min(kLead, steps) - 1;
    int previous = 0;
    for (int step = 0; step < steps; ++step) {
      wait();
      start_step(step == 0);
      if (first_tile && group == 0 && step == lead_at) let_other_start();
      wgmma_wait_group<1>();
      if (step > 0) release(previous);
      previous = at.stage;
      at.advance();
    }
    wgmma_wait_group<0>();
    pin(sums);
    release(previous);
  }

  // This thread has the sums of this row of x, and of the one 8 behind it. Rows behind the last are
  // taken to be the last.
  __device__ __forceinline__ int own_row(const PersistentItem& item, int lower) const {
    const int row = item.row + first_row() + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    return min(row + 8 * lower, args.num_tokens - 1);
  }

  // Starts to multiply a step of FP8 with the rows of the weight from `first` on.
  __device__ __forceinline__ void start_part(float (&part)[T::kPart], int first) {
    const int to = ring + at.stage * T::kStageBytes;
    const uint32_t word = uniform(static_cast<int>(low_word(to, 0)));
    const int rows = first_row() * kLineBytes;
    const int weight_rows = T::kXBytes + (first_weight_row() + first) * kLineBytes;
    pin(part);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kLineBytes; k += 32) {
      multiply_fp8(part, operand<kAtomBytes>(word + (rows >> 4), k),
                   operand<kAtomBytes>(word + (weight_rows >> 4), k), k == 0);
    }
    wgmma_commit_group();
  }

  // Tensor cores keep 14 bits of a sum of FP8 products, so the sums of each step are added up here
  // in float32. One warpgroup adds while the other multiplies.
  __device__ __forceinline__ void compute_fp8(const PersistentItem& item, int steps) {
    const PersistentScales<T> scales(args, item.column + first_output(), own_row(item, 0),
                                     own_row(item, 1));
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    for (int step = 0; step < steps; ++step) {
      wait();
#pragma unroll
      for (int first = 0; first < T::kSums; first += T::kPart) {
        float part[T::kPart];
        start_part(part, 2 * first);
        wgmma_wait_group<0>();
        pin(part);
        if (first + T::kPart == T::kSums) release(at.stage);
#pragma unroll
        for (int i = 0; i < T::kPart; ++i) sums[first + i] += part[i];
      }
      at.advance();
    }
    scale_sums(scales);
  }

  // Multiplies by the scales of rows of x and of the weight.
  __device__ __forceinline__ void scale_sums(const PersistentScales<T>& scales) {
    float* of_weight = shared.weight_scales[group];
    scales.share(of_weight, group);
#pragma unroll
    for (int i = 0; i < T::kSums; i += 4) {
      const float2 w = *reinterpret_cast<const float2*>(of_weight + 2 * i + threadIdx.x % 4 * 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i + j] *= scales.x[j / 2] * (j % 2 ? w.y : w.x);
    }
  }

  // Adds the bias of two neighbouring rows of the weight, and rounds.
  __device__ __forceinline__ uint32_t rounded(int index, const __nv_bfloat16* bias) const {
    float2 pair = {sums[index], sums[index + 1]};
    if (bias) {
      const float2 v = unpack_bfloat16(*reinterpret_cast<const uint32_t*>(bias));
      pair.x += v.x, pair.y += v.y;
    }
    return pack<__nv_bfloat16>(pair.x, pair.y);
  }

  template <Epilogue kEpilogue>
  __device__ __forceinline__ static float activated(float gate, float up) {
    float exponent = gate;
    if constexpr (kEpilogue == Epilogue::kGeluTanhMul) {
      // 0.5 * (1 + tanh(u)) is the logistic function of 2u.
      exponent = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
    }
    return gate * reciprocal_approx(1.0f + exp2_approx(-kLog2E * exponent)) * up;
  }

  // Two neighbouring outputs of a row: of the eighth of columns `eight`, of row 0 or 8. `column` is
  // the first of the warpgroup.
  template <Epilogue kEpilogue>
  __device__ __forceinline__ uint32_t outputs(int eight, int lower, int column) const {
    if (eight * 8 >= T::kGroupOutputs) return 0;
    const int index = 4 * eight + 2 * lower;
    const int n = column + eight * 8 + threadIdx.x % 4 * 2;
    const auto* bias = static_cast<const __nv_bfloat16*>(args.bias);
    if (bias) bias = n < args.out_features ? bias + n : nullptr;
    // Gates and ups are rounded before they are used.
    const float2 gate = unpack_bfloat16(rounded(index, bias));
    const float2 up =
        unpack_bfloat16(rounded(index + T::kSums / 2, bias ? bias + args.out_features : nullptr));
    return pack<__nv_bfloat16>(activated<kEpilogue>(gate.x, up.x),
                               activated<kEpilogue>(gate.y, up.y));
  }

  // Sends a warp's outputs through shared memory, 64 columns at a time, so that the warp stores
  // whole lines.
  template <Epilogue kEpilogue>
  __device__ __forceinline__ void store(const PersistentItem& item) const {
    const int lane = threadIdx.x % 32, chunk = lane % 8;
    const int first = item.row + first_row() + threadIdx.x / 32 % 4 * kScratchRows + lane / 8;
    const int column = item.column + first_output();
    const uint32_t put = scratch + lane % 16 * kLineBytes, get = scratch + lane / 8 * kLineBytes;
    auto* y = static_cast<__nv_bfloat16*>(args.y) + chunk * 8;
#pragma unroll
    for (int part = 0; part < T::kGroupOutputs; part += 64) {
      __syncwarp();  // all lanes have read what was there
#pragma unroll
      for (int eight = 0; eight < 8; eight += 2) {
        const int of = part / 8 + eight;
        if (of * 8 >= T::kGroupOutputs) break;
        store_matrices(put + ((eight + lane / 16) ^ lane % 8) * 16,
                       outputs<kEpilogue>(of, 0, column), outputs<kEpilogue>(of, 1, column),
                       outputs<kEpilogue>(of + 1, 0, column),
                       outputs<kEpilogue>(of + 1, 1, column));
      }
      __syncwarp();
      const int to = column + part;
      if (part + chunk * 8 >= T::kGroupOutputs || to + chunk * 8 >= args.out_features) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + 4 * i >= args.num_tokens) break;
        const uint4 v =
            load_shared_16(get + 4 * i * kLineBytes + (chunk ^ (4 * i + lane / 8) % 8) * 16);
        *reinterpret_cast<uint4*>(y + int64_t{first + 4 * i} * args.out_features + to) = v;
      }
    }
  }

  __device__ __forceinline__ void run(const PersistentWalk<T>& walk) {
    const int tiles = walk.num_tiles();
    if (!T::kFp8 && group == 1) {
      asm volatile("bar.sync %0, %1;" ::"n"(kLeadBarrier), "n"(2 * kWarpgroupThreads) : "memory");
    }
    for (int tile = walk.first(); tile < tiles; tile += walk.stride()) {
      const PersistentItem item = walk.find(tile);
      const bool first_tile = !T::kFp8 && tile == walk.first();
      if (item.row + first_row() >= args.num_tokens) {
        pass(walk.steps, first_tile);
        continue;
      }
      if constexpr (T::kFp8) {
        compute_fp8(item, walk.steps);
      } else {
        compute(walk.steps, first_tile);
      }
      if (args.epilogue == Epilogue::kSiluMul) {
        store<Epilogue::kSiluMul>(item);
      } else {
        store<Epilogue::kGeluTanhMul>(item);
      }
    }
  }
};

}  // namespace fusewright::gemm
