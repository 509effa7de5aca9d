// The warpgroups of a grouped GEMM that compute and store.
#pragma once

#include "../common/numbers.cuh"
#include "gate.cuh"
#include "grouped_packed.cuh"
#include "grouped_tile.cuh"

namespace fusewright::moe {

template <typename T>
struct GroupedComputer {
  const GroupedArgs& args;
  GroupedShared<T>& shared;
  uint32_t ring;
  uint32_t scratch;  // of this warp
  int group;         // of the two
  RingCursor<T::kStages> at;
  float sums[T::kWeightRows / 2];

  __device__ __forceinline__ void wait() const {
    barrier_wait(shared_address(&shared.full[at.stage]), at.parity);
    // Gathered rows were not written by the copy engine, and MMAs read through its eyes.
    if constexpr (T::kGathered) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  __device__ __forceinline__ void release(int stage) const {
    barrier_arrive_warp(shared_address(&shared.empty[stage]));
  }

  // This thread has the sums of this row of the tile, and of the row 8 behind it.
  __device__ __forceinline__ int own_row() const {
    return group * kWarpgroupRows + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }

  // Starts to multiply a step with the rows of the weight from `first` on, which are twice as many
  // as d has numbers.
  template <int kCount>
  __device__ __forceinline__ void start_step(float (&d)[kCount], int first, bool fresh) {
    const int to = ring + at.stage * T::kStageBytes;
    const int rows = group * kWarpgroupRows * kLineBytes;
    const int weight_rows = T::kXBytes + first * kLineBytes;
    const uint32_t word = uniform(static_cast<int>(low_word(to, 0)));
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kLineBytes; k += 32) {
      const uint64_t a = operand<kAtomBytes>(word + (rows >> 4), k);
      const uint64_t b = operand<kAtomBytes>(word + (weight_rows >> 4), k);
      if constexpr (T::kFp8) {
        multiply<__nv_fp8_e4m3>(d, a, b, fresh && k == 0);
      } else {
        multiply(d, a, b, fresh && k == 0);
      }
    }
    wgmma_commit_group();
  }

  __device__ __forceinline__ void let_other_start() const {
    asm volatile("bar.arrive %0, %1;" ::"n"(kLeadBarrier), "n"(2 * kWarpgroupThreads) : "memory");
  }

  // Goes through the steps of a tile that has no rows for this warpgroup.
  __device__ __forceinline__ void pass(int steps) {
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
      start_step(sums, 0, step == 0);
      if (first_tile && step == lead_at) let_other_start();
      wgmma_wait_group<1>();
      if (step > 0) release(previous);
      previous = at.stage;
      at.advance();
    }
    wgmma_wait_group<0>();
    pin(sums);
    release(previous);
  }

  // Tensor cores keep 14 bits of a sum of FP8 products, so the sums of each step are added up here
  // in float32, multiplied by the step's scales if blocks have some. One warpgroup adds while the
  // other multiplies.
  __device__ __forceinline__ void compute_fp8(int steps) {
    constexpr bool kBlocks = T::kScales == Scales::kBlocks;
    constexpr int kCount = 64, kHalf = T::kWeightRows / 4;
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    for (int step = 0; step < steps; ++step) {
      wait();
      const StepScales<T>& scales = shared.scales[at.stage];
#pragma unroll
      for (int first = 0; first < T::kWeightRows / 2; first += kCount) {
        float part[kCount];
        start_step(part, 2 * first, true);
        float scale[4];  // for gates of two rows, then for their ups
        if constexpr (kBlocks) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            scale[i] = scales.weight[i / 2] * scales.x[own_row() + i % 2 * 8];
          }
          pin(scale);  // they must be read before the stage is released
        }
        wgmma_wait_group<0>();
        pin(part);
        if (kBlocks && first + kCount == T::kWeightRows / 2) release(at.stage);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          float& sum = sums[first + i];
          const int of = (first + i) / kHalf * 2 + i / 2 % 2;
          sum = kBlocks ? fmaf(part[i], scale[of], sum) : sum + part[i];
        }
      }
      if constexpr (!kBlocks) {
        if (step == steps - 1) scale_rows(scales);
        pin(sums);  // for the same reason
        release(at.stage);
      }
      at.advance();
    }
  }

  // Applies the scales of rows of x and of the weight.
  __device__ __forceinline__ void scale_rows(const StepScales<T>& scales) {
    const float of_row[2] = {scales.x[own_row()], scales.x[own_row() + 8]};
#pragma unroll
    for (int i = 0; i < T::kWeightRows / 2; i += 4) {
      const float2 w =
          *reinterpret_cast<const float2*>(&scales.weight[2 * i + threadIdx.x % 4 * 2]);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i + j] *= of_row[j / 2] * (j % 2 ? w.y : w.x);
    }
  }

  template <Activation kActivation>
  __device__ __forceinline__ static float activated(float gate, float up) {
    float exponent = gate;
    if constexpr (kActivation == Activation::kGeluTanhMul) {
      // 0.5 * (1 + tanh(u)) is the logistic function of 2u.
      exponent = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
    }
    return gate * reciprocal_approx(1.0f + exp2_approx(-kLog2E * exponent)) * up;
  }

  // The sums of a weight of four bits get their factor and biases.
  __device__ __forceinline__ void add_biases(const GroupedItem& item) {
    constexpr float kFactor = kSumFactorOf<typename T::Numbers>;
    const int rows = args.out_features;
    const __nv_bfloat16* bias =
        args.bias ? args.bias + int64_t{item.expert} * (T::kGated ? 2 * rows : rows) : nullptr;
#pragma unroll
    for (int i = 0; i < T::kWeightRows / 2; i += 4) {
      constexpr int kHalf = T::kWeightRows / 4;
      const int of_half = T::kGated ? i % kHalf : i, up = T::kGated ? i / kHalf : 0;
      const int output =
          min(item.column + 2 * of_half + static_cast<int>(threadIdx.x) % 4 * 2, rows - 2);
      float add[2] = {};
#pragma unroll
      for (int j = 0; bias && j < 2; ++j) {
        const int row = args.gate.interleaved ? 2 * (output + j) + up : output + j + up * rows;
        add[j] = __bfloat162float(bias[row]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i + j] = fmaf(sums[i + j], kFactor, add[j % 2]);
    }
  }

  // Returns two outputs of a row in bfloat16. Gates and ups are rounded to it before they are used.
  template <Activation kActivation>
  __device__ __forceinline__ uint32_t outputs(int index) const {
    const uint32_t pair = pack<__nv_bfloat16>(sums[index], sums[index + 1]);
    if constexpr (!T::kGated) return pair;
    constexpr int kHalf = T::kWeightRows / 4;
    const float2 gate = unpack_bfloat16(pair);
    const float2 up =
        unpack_bfloat16(pack<__nv_bfloat16>(sums[index + kHalf], sums[index + 1 + kHalf]));
    if constexpr (T::kPacked) {
      return pack<__nv_bfloat16>(gated_product(args.gate, gate.x, up.x),
                                 gated_product(args.gate, gate.y, up.y));
    }
    return pack<__nv_bfloat16>(activated<kActivation>(gate.x, up.x),
                               activated<kActivation>(gate.y, up.y));
  }

  // Sends a warp's outputs through shared memory, 64 columns at a time, so that the warp stores
  // whole lines.
  template <Activation kActivation>
  __device__ __forceinline__ void store(const int (&y_row)[4], int column) const {
    const int lane = threadIdx.x % 32;
    const uint32_t put = scratch + lane % 16 * kLineBytes;
    const uint32_t get = scratch + lane / 8 * kLineBytes;
    __nv_bfloat16* y = args.y + column + lane % 8 * 8;
#pragma unroll
    for (int part = 0; part < T::kOutputs / 64; ++part) {
      if (column + 64 * part >= args.out_features) break;
      __syncwarp();  // all lanes have read what was there
#pragma unroll
      for (int eight = 0; eight < 8; eight += 2) {
        const int index = 4 * (8 * part + eight);
        store_matrices(put + ((eight + lane / 16) ^ lane % 8) * 16, outputs<kActivation>(index),
                       outputs<kActivation>(index + 2), outputs<kActivation>(index + 4),
                       outputs<kActivation>(index + 6));
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 v = gemm::load_shared_16(get + 4 * i * kLineBytes +
                                             (lane % 8 ^ (4 * i + lane / 8) % 8) * 16);
        if (y_row[i] < 0) continue;
        const int64_t from_row = static_cast<int64_t>(y_row[i]) * args.out_features;
        *reinterpret_cast<uint4*>(y + from_row + 64 * part) = v;
      }
    }
  }

  // Finds the rows of y that this thread stores: every fourth row of its warp. A row that is not
  // there is -1.
  __device__ __forceinline__ void find_rows(const GroupedItem& item, int (&y_row)[4]) const {
    const int first = group * kWarpgroupRows + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + 4 * i, place = item.first + row;
      y_row[i] = row >= item.rows ? -1 : args.y_sorted ? place : __ldcg(args.order + place);
    }
  }

  __device__ __forceinline__ void run(Walk& walk) {
    const int steps = args.in_features / T::kLine, tiles = walk.num_tiles();
    const int first_tile = blockIdx.x;
    if (!T::kFp8 && group == 1 && first_tile < tiles) {
      asm volatile("bar.sync %0, %1;" ::"n"(kLeadBarrier), "n"(2 * kWarpgroupThreads) : "memory");
    }
    for (int tile = first_tile; tile < tiles; tile += gridDim.x) {
      const GroupedItem item = walk.find(tile);
      if (group * kWarpgroupRows >= item.rows) {
        pass(steps);
        continue;
      }
      int y_row[4];
      find_rows(item, y_row);
      if constexpr (T::kFp8) {
        compute_fp8(steps);
      } else {
        compute(steps, group == 0 && tile == first_tile);
      }
      if constexpr (T::kPacked) add_biases(item);
      if (!T::kGated || T::kPacked || args.activation == Activation::kSiluMul) {
        store<Activation::kSiluMul>(y_row, item.column);
      } else {
        store<Activation::kGeluTanhMul>(y_row, item.column);
      }
    }
  }
};

}  // namespace fusewright::moe
