// What the op prefill_attention and its kernels agree on. Plain C++: neither torch nor device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fusewright::attention {

constexpr int kMostTileHeads = 4;
constexpr int kFewestTileQueries = 32;  // of a tile that has the most heads
constexpr int kIndexBits = 12;
constexpr int kMostSeqs = 1 << kIndexBits;
constexpr int kMostSeqsFp8Of256 = 64;  // K and V as stored, and widened, leave no room for more

struct PrefillArgs {
  const int* block_table;  // [num_seqs, table_stride]
  const int* seq_lens;     // [num_seqs]
  const int* query_start;  // [num_seqs + 1]
  void* out;               // [tokens, heads, head_dim]
  const float* kv_scale;   // [2, kv_heads], or null: 1
  const float* out_scale;  // [1] if out is FP8, else null
  const void* sinks;       // [heads] in q's type or float32, or null
  bool wide_sinks;         // float32
  int num_seqs, fewest;    // sequences with fewer queries are left out
  int heads, kv_heads, group, log2_block_size;
  int box_shift;                 // log2 of the tokens of one copy
  int tile_heads, tile_queries;  // of a tile: its rows
  int64_t table_stride;
  float scale, soft_cap;
  int window, chunk;  // 0: all
};

// The facts of a call that only the host needs.
struct PrefillShape {
  const void* q;   // [tokens, heads, head_dim], tokens q_stride elements apart
  const void* kv;  // [blocks, 2, block_size, kv_heads, head_dim]
  int64_t tokens, q_stride, blocks;
};

// Type of q, and of K and V unless they are FP8.
enum class Element { kBFloat16, kHalf };

// The kernels of one head_dim; that of 64 has neither windows, chunks nor a soft cap. What tiles
// and copies have need not be set in args.
template <int kHeadDim>
cudaError_t launch_prefill(PrefillArgs args, const PrefillShape& shape, Element element,
                           bool fp8_cache, cudaStream_t stream);

}  // namespace fusewright::attention
