// The interface between the op fw_cuda::moe_grouped_linear and its kernels. It is plain C++,
// without torch and without device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../gemm/skinny.h"
#include "moe.h"

namespace fusewright::moe {

constexpr int kMaxGroupedExperts = 1024;
constexpr int kGroupedLine = 64;  // both features are multiples of it
using gemm::kScaleBlock;          // in_features of FP8 are multiples of it

// With kRows, each row of x and of the weight has a scale. With kBlocks, each kScaleBlock features
// of a row of x have one, and each square of as many rows and columns of the weight. In both cases
// x and the weight are FP8; with kNone they are bfloat16.
enum class Scales { kNone, kRows, kBlocks };

// Slots of an expert are order[offsets[e]] to order[offsets[e + 1] - 1]; a slot's place is where it
// is in the order.
struct GroupedArgs {
  const void* x;              // [x_rows, in_features], rows x_row_stride elements apart
  const void* weight;         // [num_experts, rows, in_features], contiguous
  const float* x_scale;       // [x_rows, groups], with the strides below
  const float* weight_scale;  // [num_experts, rows, 1] or [num_experts, blocks, blocks], contiguous
  const int* order;           // [num_slots]
  const int* offsets;         // [num_experts + 1]
  __nv_bfloat16* y;           // [num_slots, out_features]
  int num_slots, num_experts;
  int in_features, out_features;  // with gates, half of the weight's rows
  int x_rows, slots_a_row;        // a slot's row of x is slot / slots_a_row
  int64_t x_row_stride, x_scale_row, x_scale_group;
  Scales scales;
  bool gated;             // y is act(gate) * up, of weights with rows of gates, then of ups
  Activation activation;  // of the gates
  bool x_sorted;          // rows of x are places, not slots
  bool y_sorted;          // rows of y are places, not slots

  // Weights of four bits alone (packed.h), of which the weight has half as many bytes as columns.
  const uint8_t* packed_scale;  // [num_experts, rows, groups]
  int groups, log2_columns;     // of a row; columns of one
  const __nv_bfloat16* bias;    // [num_experts, rows], or nullptr
  Gate gate;
};

cudaError_t launch_grouped(const GroupedArgs& args, bool programmatic, cudaStream_t stream);
cudaError_t launch_packed_grouped(const GroupedArgs& args, bool floats, bool programmatic,
                                  cudaStream_t stream);

}  // namespace fusewright::moe
