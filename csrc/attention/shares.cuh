// How decode attention divides a batch into equal shares, from its lengths.
#pragma once

#include "attend.cuh"

namespace fusewright::attention {

// ---- rows of one sequence: drafts that a step verifies are sequences of one query each, which lie
// beside each other. Their K and V are the last one's, so a few of them are one item.

__device__ __forceinline__ bool has_one_query(const DecodeArgs& args, int seq) {
  return args.query_start[seq + 1] - args.query_start[seq] == 1 && args.seq_lens[seq] > 0;
}

// Whether a query follows that of the sequence before it in one and the same: their lengths differ
// by one, and the block is shared that holds the position of the former, which this step stores.
__device__ __forceinline__ bool follows(const DecodeArgs& args, int seq) {
  if (seq <= 0 || seq >= args.num_seqs) return false;
  // Loaded side by side: what is not needed costs less than another wait.
  const int before = args.seq_lens[seq - 1], own = args.seq_lens[seq];
  const int first = args.query_start[seq - 1], start = args.query_start[seq];
  const int stop = args.query_start[seq + 1];
  if (before <= 0 || own != before + 1 || start - first != 1 || stop - start != 1) return false;
  const int* block =
      args.block_table + seq * args.table_stride + ((before - 1) >> args.log2_block_size);
  return block[0] == block[-args.table_stride];
}

// A warp: whether rows that are taken together save so many positions, in all and beside those of
// the sequences, that the batch is worth being divided anew, and more sums being merged.
__device__ __forceinline__ bool rows_save(const DecodeArgs& args) {
  float saved = 0.0f, rest = 0.0f;
  for (int seq = threadIdx.x % kWarpSize; seq < args.num_seqs; seq += kWarpSize) {
    const Visible seen = visible(args.seq_lens[seq], args.window);
    (follows(args, seq) ? saved : rest) += static_cast<float>(seen.end - seen.begin);
  }
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    saved += __shfl_xor_sync(kAllLanes, saved, offset);
    rest += __shfl_xor_sync(kAllLanes, rest, offset);
  }
  return saved >= args.least_saved && saved >= kLeastSavedShare * rest;
}

constexpr int kFollowWords = kMaxSeqs / kWarpSize + 1;

// Which sequences are an item: each, or the last one of up to `most` that follow each other. A run
// is divided from its begin on.
template <typename T, bool = T::kRows>
struct Neighbors {
  __device__ __forceinline__ bool ends(int) const { return true; }
  __device__ __forceinline__ int rows(int) const { return 1; }
  __device__ __forceinline__ Visible seen(const DecodeArgs& args, int seq) const {
    return visible(args.seq_lens[seq], args.window);
  }
};

template <typename T>
struct Neighbors<T, true> {
  const unsigned* words;  // a bit a sequence: whether it follows; one beyond the last is clear
  int most;

  __device__ __forceinline__ bool bit(int seq) const {
    return words[seq / kWarpSize] >> (seq % kWarpSize) & 1;
  }
  // Number of queries before a sequence's in its run.
  __device__ __forceinline__ int before(int seq) const {
    int word = seq / kWarpSize;
    unsigned clear = ~words[word] & (~0u >> (kWarpSize - 1 - seq % kWarpSize));
    while (clear == 0) clear = ~words[--word];  // the first sequence follows none
    return seq - (word * kWarpSize + kWarpSize - 1 - __clz(clear));
  }
  __device__ __forceinline__ bool ends(int seq) const {
    return !bit(seq + 1) || before(seq) % most == most - 1;
  }
  __device__ __forceinline__ int rows(int seq) const { return before(seq) % most + 1; }
  __device__ __forceinline__ Visible seen(const DecodeArgs& args, int seq) const {
    return visible_of_rows(args.seq_lens[seq], args.window, rows(seq));
  }
};

// The whole block: writes the words of Neighbors.
__device__ __forceinline__ void note_neighbors(const DecodeArgs& args, unsigned* words) {
  const int lane = threadIdx.x % kWarpSize;
  for (int word = threadIdx.x / kWarpSize; word <= args.num_seqs / kWarpSize; word += kWarps) {
    const unsigned bits = __ballot_sync(kAllLanes, follows(args, word * kWarpSize + lane));
    if (lane == 0) words[word] = bits;
  }
  __syncthreads();
}

// ---- shares

// Tokens: sequences up to the first are never cut; a cut leaves at least the second on both sides.
constexpr int kUncutTokens = 256;
constexpr int kLeastCutTokens = 64;

template <typename T>
__device__ __forceinline__ int chunks_of(const DecodeArgs& args, const Neighbors<T>& neighbors,
                                         int seq) {
  if (!has_one_query(args, seq) || !neighbors.ends(seq)) return 0;
  const Visible seen = neighbors.seen(args, seq);
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
  int sums[kWarps], longest[kWarps], counts[kWarps];
};

// Facts of a batch: the most that a sequence weighs, and how many weigh something.
struct Weights {
  int most, count;
};

// The whole block: prefix sums of what `size_of` each sequence is.
template <typename SizeOf>
__device__ __forceinline__ Weights lay_out(int num_seqs, int* starts, Notes& notes,
                                           const SizeOf& size_of) {
  const int per_thread = (num_seqs + kThreads - 1) / kThreads;
  const int first = min(static_cast<int>(threadIdx.x) * per_thread, num_seqs);
  const int last = min(first + per_thread, num_seqs);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int sum = 0, most = 0, count = 0;
  for (int seq = first; seq < last; ++seq) {
    const int size = size_of(seq);
    starts[seq] = sum;
    sum += size;
    most = max(most, size);
    count += size > 0;
  }
  most = __reduce_max_sync(kAllLanes, most);
  count = __reduce_add_sync(kAllLanes, count);
  int to_here = sum;
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int below = __shfl_up_sync(kAllLanes, to_here, offset);
    if (lane >= offset) to_here += below;
  }
  __syncthreads();  // all have read what was noted before
  if (lane == kWarpSize - 1) {
    notes.sums[warp] = to_here;
    notes.longest[warp] = most;
    notes.counts[warp] = count;
  }
  __syncthreads();
  int before = to_here - sum;
  count = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += notes.sums[w];
    most = max(most, notes.longest[w]);
    count += notes.counts[w];
  }
  for (int seq = first; seq < last; ++seq) starts[seq] += before;
  if (threadIdx.x == kThreads - 1) starts[num_seqs] = before + sum;
  __syncthreads();
  return {most, count};
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
