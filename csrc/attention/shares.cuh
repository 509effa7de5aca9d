// How decode attention divides a batch into equal shares, from its lengths.
#pragma once

#include "attend.cuh"

namespace fusewright::attention {

// Tokens: sequences up to the first are never cut; a cut leaves at least the second on both sides.
constexpr int kUncutTokens = 256;
constexpr int kLeastCutTokens = 64;

template <typename T>
__device__ __forceinline__ int chunks_of(const DecodeArgs& args, int seq) {
  const int queries = args.query_start[seq + 1] - args.query_start[seq];
  const int seq_len = args.seq_lens[seq];
  if (queries != 1 || seq_len <= 0) return 0;
  const Visible seen = visible(seq_len, args.window);
  return (seen.end + T::kChunk - 1) / T::kChunk - seen.begin / T::kChunk;
}

// All sequences' chunks in one row: sequence i has [starts[i], starts[i + 1]).
template <typename T>
struct Row {
  const int* starts;
  int num_seqs, num_shares;
  bool whole = false;  // no sequence is cut

  __device__ __forceinline__ int total() const { return starts[num_seqs]; }

  __device__ __forceinline__ int sequence_at(int x) const {
    int low = 0, high = num_seqs;  // starts[low] <= x < starts[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (starts[middle] <= x)
        low = middle;
      else
        high = middle;
    }
    return low;
  }

  // Where share s begins.
  __device__ __forceinline__ int cut(int s) const {
    const int x = static_cast<int>(static_cast<int64_t>(total()) * s / num_shares);
    if (x <= 0 || x >= total()) return x;
    const int seq = sequence_at(x), begin = starts[seq], end = starts[seq + 1];
    const bool keep = !whole && (end - begin) * T::kChunk > kUncutTokens &&
                      min(x - begin, end - x) * T::kChunk >= kLeastCutTokens;
    if (keep) return x;
    return 2 * (x - begin) <= end - begin ? begin : end;
  }

  // The share that holds chunk x.
  __device__ __forceinline__ int share_of(int x) const {
    int s = static_cast<int>(static_cast<int64_t>(x) * num_shares / total());
    while (s > 0 && cut(s) > x) --s;
    while (s + 1 < num_shares && cut(s + 1) <= x) ++s;
    return s;
  }
};

// The warps of a block tell each other these numbers while they divide a batch.
struct Notes {
  int sums[kWarps], longest[kWarps];
};

// The whole block: prefix sums of the sequences' chunks. Returns how many the longest has.
template <typename T>
__device__ __forceinline__ int lay_out(const DecodeArgs& args, int* starts, Notes& notes) {
  const int per_thread = (args.num_seqs + kThreads - 1) / kThreads;
  const int first = min(static_cast<int>(threadIdx.x) * per_thread, args.num_seqs);
  const int last = min(first + per_thread, args.num_seqs);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int sum = 0, longest = 0;
  for (int seq = first; seq < last; ++seq) {
    const int chunks = chunks_of<T>(args, seq);
    starts[seq] = sum;
    sum += chunks;
    longest = max(longest, chunks);
  }
  longest = __reduce_max_sync(kAllLanes, longest);
  int to_here = sum;
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int below = __shfl_up_sync(kAllLanes, to_here, offset);
    if (lane >= offset) to_here += below;
  }
  if (lane == kWarpSize - 1) {
    notes.sums[warp] = to_here;
    notes.longest[warp] = longest;
  }
  __syncthreads();
  int before = to_here - sum;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += notes.sums[w];
    longest = max(longest, notes.longest[w]);
  }
  for (int seq = first; seq < last; ++seq) starts[seq] += before;
  if (threadIdx.x == kThreads - 1) starts[args.num_seqs] = before + sum;
  __syncthreads();
  return longest;
}

// The whole block: how many chunks the longest share has.
template <typename T>
__device__ __forceinline__ int longest_share(const Row<T>& row, Notes& notes) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int longest = 0;
  for (int s = threadIdx.x; s < row.num_shares; s += kThreads) {
    longest = max(longest, row.cut(s + 1) - row.cut(s));
  }
  longest = __reduce_max_sync(kAllLanes, longest);
  __syncthreads();
  if (lane == 0) notes.longest[warp] = longest;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) longest = max(longest, notes.longest[w]);
  return longest;
}

}  // namespace fusewright::attention
