// What the ops fw_cuda::skinny_* and their kernels agree on. Plain C++: neither torch nor device
// code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../collective/peers.h"

struct __nv_bfloat16;

namespace fusewright::gemm {

constexpr int kMaxSkinnyTokens = 32;
constexpr int kMaxNormedTokens = 16;   // between linears that share a norm
constexpr int kMaxWideTokens = 8;      // in bfloat16, for a weight of FP8 or four bits
constexpr int kMaxPackedTokens = 256;  // for a weight of kInt4 or kMxFp4
constexpr int kMaxClusterTokens = 64;
constexpr int kMaxClusterFeatures = 112 * 66;  // in one round of clusters
constexpr int kMinClusterLines = 2;            // of 128 bytes: one for each of two blocks
constexpr int kConsumerWarps = 4;

// A stage holds 512 bytes of each row, as kConsumerWarps lines of 128 bytes, the width of the
// swizzle; consumer warp w multiplies line w.
constexpr int kLineBytes = 128;
constexpr int kRowBytes = kLineBytes * kConsumerWarps;

// A scale is for this many columns of a row of x, or rows and columns of the weight.
constexpr int kScaleBlock = 128;

// The multiprocessors that rounds are planned for.  A constant: results follow from shapes alone.
constexpr int kMultiprocessors = 132;

// Outputs of the add that share a sum of squares: a half warp's, which no tile divides.
constexpr int kNormGroup = 16;

enum class Element { kBFloat16, kHalf, kFloat, kE4M3 };

// What becomes of the sums.  Gated: the weight's rows are a gate half, then an up half, and y is
// act(gate) * up, of gate and up rounded as element is; with an out_scale that product, rounded
// again, becomes FP8.
//
// kRelu to kGeluNew: y is the activation of the sum, rounded as element is.
//
// Add: y is the rounded sum, times a factor and rounded again, plus the residual, rounded; and
// weighted is y times a norm's weight, to which an offset is added: the norm of y but for a
// token's scale, which no block knows, as none has a whole row.  So groups of kNormGroup outputs
// leave their sum of squares, and the next linear, of weighted, multiplies its sums by the scale
// that it makes of these.  Nothing is read twice, and y * weight is rounded once, where a norm that
// scales first rounds twice.
//
// A layer norm is centered: groups leave the sum too, and weighted has two rows more, the norm's
// weight and its bias.  With its scale s and mean m of a token, W of the next linear and v, the
// token's row of weighted, that linear is s (W v - m W weight) + W bias.
enum class Epilogue { kLinear, kSiluMul, kGeluTanhMul, kAdd, kRelu, kRelu2, kGelu, kGeluNew };

// Scales of a weight of four bits, and its zero points.
enum class ScaleType { kFloat, kHalf, kE8M0, kE4M3 };

struct GroupScales {
  const void* scale;  // [rows, count] of the format's type
  const void* zero;   // likewise, or nullptr
  int count;          // groups of a row
  int log2_columns;   // of a group; 31 for whole rows
};

struct SkinnyLinearArgs {
  const void* x;              // [num_tokens, in_features] of the format's elements
  const void* weight;         // [rows, in_features]; rows: out_features, gated twice that
  const float* x_scale;       // FP8: one, or one a token; blocks: [in_features / 128, num_tokens];
                              // nullptr where x is bfloat16
  const float* weight_scale;  // FP8: one, or one a row; blocks: [rows / 128, in_features / 128],
                              // not with a gate
  const void* bias;           // [rows] of element, or nullptr
  const float* out_scale;     // of y, which is then FP8; or nullptr
  const float* squares;       // of a weighted x: [num_tokens, num_groups] sums; or nullptr.
                              // Centered: the sums of x follow those of its squares
  int num_groups;             // then: a multiple of 4
  float eps;                  // then: added to the mean square
  bool centered;              // add, or squares: the norm is a layer norm
  const __nv_bfloat16* residual;     // add: [num_tokens, out_features], contiguous
  const __nv_bfloat16* norm_weight;  // add: [out_features]
  const __nv_bfloat16* norm_bias;    // add, centered: likewise, or nullptr
  float factor, norm_offset;         // add
  __nv_bfloat16* weighted;           // add: [num_tokens, out_features], contiguous; centered: two
                                     // rows more
  float* squares_out;                // add: [num_tokens, out_features / kNormGroup]; centered: two
  void* y;                           // [num_tokens, out_features], contiguous
  Element element;                   // of bias, and of y without an out_scale
  Epilogue epilogue;
  int num_tokens;  // 1 to kMaxSkinnyTokens
  int out_features;
  int in_features;                          // a multiple of 128 bytes; of 512 with block scales
  int x_scale_stride, weight_scale_stride;  // 0 or 1: one for all, or one each
  int64_t x_row_stride;       // elements; a multiple of 16 bytes, as the addresses are
  int64_t weight_row_stride;  // likewise; bytes, of a weight of four bits
  GroupScales group;          // of a weight of four bits

  __host__ __device__ bool gated() const {
    return epilogue == Epilogue::kSiluMul || epilogue == Epilogue::kGeluTanhMul;
  }
  // Rows of x: behind the tokens, a layer norm's weight and its bias.
  __host__ __device__ int x_rows() const { return num_tokens + (squares && centered ? 2 : 0); }
};

// The types of weight and x. FP8 has a scale a row, or one for all, or scales of blocks. ByBf16:
// the weight alone is FP8, beside kMaxWideTokens or fewer; so are weights of four bits: integers
// in groups of a multiple of 128 columns or in smaller ones of 32 or more, and E2M1 in groups of 32
// or more, or of 16 and with a weight_scale a row.
enum class Operands {
  kBf16,
  kFp8,
  kFp8Blocks,
  kFp8ByBf16,
  kFp8BlocksByBf16,
  kInt4,
  kInt4Channel,
  kInt4SmallGroups,
  kMxFp4,
  kNvFp4
};

// `programmatic`: start before the kernel ahead has finished. The weight and its scales are then
// read before that one's results are waited for: they must not be among them.
cudaError_t launch_skinny_linear(const SkinnyLinearArgs& args, Operands operands, bool programmatic,
                                 cudaStream_t stream);

// A layer of a weight of four bits: up to kMaxWideTokens as launch_skinny_linear, up to
// kMaxPackedTokens a bias and an activation alone (packed_linear.cuh).
cudaError_t launch_packed_linear(const SkinnyLinearArgs& args, Operands operands, bool programmatic,
                                 cudaStream_t stream);

// How a layer is divided: tiles of `rows` rows of the weight, each for `splits` blocks, which have
// rings of `stages` lines.
struct ClusterPlan {
  int rows, splits, stages;
};

// Runs a layer of kBf16 or kFp8 with the epilogue kLinear and results of bfloat16, up to
// kMaxClusterTokens, rows of kMinClusterLines or more, and a multiple of 8 out_features up to
// kMaxClusterFeatures (cluster_linear.cuh).
cudaError_t launch_cluster_linear(const SkinnyLinearArgs& args, Operands operands,
                                  bool programmatic, cudaStream_t stream);

// As launch_skinny_linear with the epilogue kAdd and x of bfloat16, with a sum over ranks in it:
// each rank pushes its sums to the others from the block that has them, and adds up those of all.
// x, weight and bias are a rank's own. A weight of four bits is none of its operands.
cudaError_t launch_skinny_reduce(const SkinnyLinearArgs& args, Operands operands,
                                 const collective::Peers& peers, bool programmatic,
                                 cudaStream_t stream);

}  // namespace fusewright::gemm
