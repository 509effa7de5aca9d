// What the op decode_attention and its kernels agree on. Plain C++: neither torch nor device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fusewright::attention {

constexpr int kMaxSeqs = 4096;
constexpr int kMaxGroup = 16;
constexpr int kMaxRows = 16;        // queries of one sequence that are one item
constexpr int kMaxItems = 1 << 16;  // (sequence, KV head) pairs
constexpr int kWarps = 4;           // of a block

// Rows are taken together if they save so many bytes of K and V, and so many positions beside those
// of the sequences: as measured on an H200
// (docs/decisions/rows-of-a-sequence-are-found-by-attention.md).
constexpr float kLeastSavedBytes = 300e6f, kLeastSavedShare = 2.0f;

struct DecodeArgs {
  const void* q;           // [num_tokens, kv_heads * group, head_dim], rows q_stride apart
  const void* kv;          // [num_blocks, 2, block_size, kv_heads, head_dim], contiguous
  const int* block_table;  // [num_seqs, max_blocks], rows table_stride apart
  const int* seq_lens;     // [num_seqs]
  const int* query_start;  // [num_seqs + 1]; sequences that have not one query are left out
  void* out;               // [num_tokens, kv_heads * group, head_dim], contiguous
  const float* kv_scale;   // [2, kv_heads], or nullptr: 1
  const float* out_scale;  // [1], then out is e4m3; or nullptr: out is of q's type
  const void* sinks;       // [kv_heads * group] of q's type or float32; or nullptr: none
  float4* partials;        // as many as the plan says
  int num_seqs, max_blocks, kv_heads, group;
  int log2_block_size;  // log2 of block_size, 3 to 8
  bool wide_sinks;      // float32
  bool one_slot;  // the kernel ahead stores but the last slot of each sequence that has a query
  int64_t q_stride, table_stride;  // elements
  float scale;
  int window;         // 0: all
  float soft_cap;     // 0: none
  float least_saved;  // positions, of kLeastSavedBytes; set by launch_decode
};

// The facts of a call that choose the kernel, besides the size of the KV group.
struct DecodeTypes {
  bool bfloat16;   // q and, unless FP8, the cache; else float16
  bool fp8_cache;  // e4m3
  int head_dim;    // 64 or 128
};

struct Grid {
  int blocks, cluster, parts;  // blocks: of one row; the others as decode_kernel takes them
};

struct DecodePlan {
  Grid grid;
  int64_t partial_float4s;  // of partial sums that the call may need
};

// All of args but partials must be set.
cudaError_t plan_decode(const DecodeArgs& args, const DecodeTypes& types, DecodePlan& plan);

// Requires 1 <= num_seqs <= kMaxSeqs, num_seqs * kv_heads <= kMaxItems, kv_heads <= grid.blocks *
// kWarps; q rows, kv and partials on addresses that are multiples of 16. Nothing is read before
// the kernel ahead has finished, so the launch is always programmatic.
cudaError_t launch_decode(const DecodeArgs& args, const DecodeTypes& types, const DecodePlan& plan,
                          cudaStream_t stream);

}  // namespace fusewright::attention
