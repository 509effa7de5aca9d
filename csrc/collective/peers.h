// The interface between the ops fw_cuda::peer_* and their kernels. Plain C++: neither torch nor
// device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fusewright::collective {

constexpr int kMaxRanks = 8;
constexpr int kPacketElements = 8;  // of two bytes: a store of 16 bytes
constexpr int kMaxHidden = 16384;
constexpr int kScaleGroup = 128;  // columns that share a scale

// A rank needs this to exchange data with the others. Each rank owns an inbox, to which
// the others write: [2, world, packets] packets, the first index being the parity of the epoch, the
// second the rank that writes. An epoch is one collective.
//
// Behind its inbox a rank has a window, which it fills and the others copy from, and `arrived`,
// where each of them counts what it has posted. Who posts counts in `posted`, who waits in `taken`.
struct Peers {
  int rank, world;
  int64_t packets;  // room for what one rank sends in an epoch
  int64_t window_bytes;
  uint4* inbox[kMaxRanks];           // of each rank, at this process's addresses
  char* window[kMaxRanks];           // likewise
  unsigned* arrived[kMaxRanks];      // [world], likewise
  unsigned *posted, *taken;          // [world], in device memory
  unsigned* state;                   // {epoch, blocks that have finished it}, in device memory
  const volatile unsigned* aborted;  // in host memory: nonzero ends all waits
};

enum class Element { kBFloat16, kHalf };
enum class Quantize { kNone, kStatic, kToken, kGroup };

// The sum over the ranks; then, with a weight, the sum with a residual, RMSNorm and quantization.
// Without a weight x is any contiguous tensor, cut into rows as the kernel likes.
struct SumArgs {
  Peers peers;
  const void* x;          // [rows, hidden], rows x_row_stride elements apart
  const void* residual;   // [rows, hidden], contiguous; or nullptr
  const void* weight;     // [hidden]; or nullptr
  void* total;            // [rows, hidden]: the last sum
  void* total_copy;       // the same again, of parts alone
  void* y;                // [rows, hidden]: the norm, or its FP8 values
  float* scales;          // dynamic: [groups, rows]
  const float* scale;     // static: one
  int64_t num_packets;    // of all rows
  int rows, row_packets;  // hidden / 8
  int64_t x_row_stride;
  float eps, weight_offset;
  bool has_offset;  // the norm is rounded once, after the weight and this are applied
  bool two_shots;   // a row travels to its owner, and its sum from there
  Quantize quantize;
  Element element;
};

// The columns of all ranks side by side.
struct GatherArgs {
  Peers peers;
  const uint4* x;       // [rows, row_packets]
  uint4* y;             // [rows, world, row_packets]
  int64_t num_packets;  // of x
  int64_t row_packets;
};

cudaError_t launch_sum(const SumArgs& args, bool programmatic, cudaStream_t stream);
cudaError_t launch_gather(const GatherArgs& args, bool programmatic, cudaStream_t stream);

// As launch_sum with a weight, of parts that are here already: x is [world, rows, hidden], the
// matrices x_row_stride elements apart.
cudaError_t launch_sum_parts(const SumArgs& args, bool programmatic, cudaStream_t stream);

// Tells a peer that what this stream has written so far may be copied from the window.
cudaError_t launch_post(const Peers& peers, int to, cudaStream_t stream);

// Has the stream wait for the next post of a peer.
cudaError_t launch_wait(const Peers& peers, int source, cudaStream_t stream);

// Marks every packet of an inbox as not yet written.
cudaError_t launch_clear(uint4* inbox, int64_t packets, cudaStream_t stream);

}  // namespace fusewright::collective
