// The interface between the op fw_cuda::moe_packed_linear and its kernels. It is plain C++, without
// torch and without device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moe.h"

namespace fusewright::moe {

constexpr int kMaxPackedSlots = 8192;
constexpr int kMaxPackedExperts = 512;
constexpr int kMaxPackedEntries = 512;  // of an expert and some of its rows
constexpr int kMinPackedColumns = 704;  // a warp's ring holds no more than a tile's columns

// Numbers of four bits, two a byte, the lower column in the lower bits: unsigned integers less 8
// with scales of float16, or E2M1 with scales of E8M0.
enum class PackedFormat { kInt4, kMxFp4 };

// A slot is one choice of a token, token * top_k + place.
struct PackedArgs {
  const __nv_bfloat16* x;     // [slots / slots_a_row, in_features]
  const uint8_t* weight;      // [num_experts, rows, in_features / 2], contiguous
  const void* scale;          // [num_experts, rows, groups], contiguous
  const __nv_bfloat16* bias;  // [num_experts, rows], or nullptr
  const int* ids;        // [num_slots], of up to kMaxTokens tokens, whose experts are distinct;
                         // or nullptr, and the two below
  const int* order;      // [num_slots]: slots by expert
  const int* offsets;    // [num_experts + 1]: where each expert's begin
  const float* squares;  // of a weighted x: [tokens, num_square_groups] sums; or nullptr
  __nv_bfloat16* y;      // [num_slots, out_features]
  int num_square_groups;
  float eps;  // with squares: added to the mean square
  int num_slots, top_k, slots_a_row, num_experts;
  int in_features;           // a multiple of 64
  int out_features;          // a multiple of 16, with gates of 8: half of the weight's rows
  int groups, log2_columns;  // of a row; columns of one, 32 or more
  int64_t x_row_stride;
  bool gated;
  Gate gate;
};

// y: [num_tokens * top_k, hidden]; all contiguous, hidden a multiple of 8.
struct SumArgs {
  const __nv_bfloat16* y;
  const float* topk_weights;         // [num_tokens, top_k], complete before the kernel ahead began
  const __nv_bfloat16* shared;       // [num_tokens, hidden]: the shared experts' result; or nullptr
  const __nv_bfloat16* residual;     // likewise, complete before the kernel ahead began
  const __nv_bfloat16* norm_weight;  // [hidden], with the two results below; or nullptr
  __nv_bfloat16 *total, *weighted;   // [num_tokens, hidden]
  float* squares;                    // [num_tokens, hidden / 8]: of total
  int num_tokens, top_k, hidden;
};

cudaError_t launch_sum(const SumArgs& args, bool programmatic, cudaStream_t stream);

cudaError_t launch_packed(const PackedArgs& args, PackedFormat format, bool programmatic,
                          cudaStream_t stream);

}  // namespace fusewright::moe
