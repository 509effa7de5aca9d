// What the op draw_tokens and its kernel agree on. Plain C++: neither torch nor device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fusewright::sampling {

constexpr int kMostBlocks = 8;  // a row; larger clusters are not portable

enum class Element { kBFloat16, kHalf, kFloat };

struct SampleArgs {
  const void* logits;  // [num_rows, vocab]
  int64_t row_stride;  // elements
  int vocab;
  int num_rows;
  const float* temperature;  // [num_rows], as all below
  const int* top_k;          // nullptr: off; likewise the next two
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int* positions;
  int* token_ids;
  float* thresholds;  // nullptr, or the smallest logit that each row that draws keeps
  int slice;          // keys a block holds; a multiple of 16 bytes
};

// The widest rows that a cluster holds.
int max_vocab(Element element);

// All of args but the slice must be set.
cudaError_t launch_sample(const SampleArgs& args, Element element, cudaStream_t stream);

}  // namespace fusewright::sampling
