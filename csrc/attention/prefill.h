// What the op prefill_attention and its kernels agree on. Plain C++: neither torch nor device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fusewright::attention {

constexpr int kHeadDim = 128;
constexpr int kTileRowsShift = 7;
constexpr int kTileRows = 1 << kTileRowsShift;  // queries x heads
constexpr int kMostTileHeads = 4;
constexpr int kIndexBits = 12;
constexpr int kMostSeqs = 1 << kIndexBits;

struct PrefillArgs {
  const int* block_table;  // [num_seqs, table_stride]
  const int* seq_lens;     // [num_seqs]
  const int* query_start;  // [num_seqs + 1]
  void* out;               // [tokens, heads, head_dim]
  const float* out_scale;  // [1] if out is FP8, else null
  int num_seqs, fewest;    // sequences with fewer queries are left out
  int heads, group, log2_block_size;
  int box_shift;    // log2 of the tokens of one copy
  int query_shift;  // log2 of the queries of a tile; with that many heads, the tile has 128 rows
  int64_t table_stride;
  float scale, soft_cap;
  int window;  // 0: all
};

// The facts of a call that only the host needs.
struct PrefillShape {
  const void* q;   // [tokens, heads, head_dim], tokens q_stride elements apart
  const void* kv;  // [blocks, 2, block_size, kv_heads, head_dim]
  int64_t tokens, q_stride, blocks, kv_heads;
};

// Type of q, K and V.
enum class Element { kBFloat16, kHalf };

// box_shift and query_shift of args need not be set.
cudaError_t launch_prefill(const PrefillArgs& args, const PrefillShape& shape, Element element,
                           cudaStream_t stream);

}  // namespace fusewright::attention
