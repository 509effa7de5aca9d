// What a warp copies ahead of what it computes: a ring of chunks over its part of a batch.
#pragma once

#include "shares.cuh"

namespace fusewright::attention {

// What a warp has still to copy: chunks of a sequence, then those of the next in its share.
template <typename T>
struct Stream {
  const DecodeArgs& args;
  Copier<T> copier;
  const Row<T>* row;  // nullptr: only the one sequence
  Neighbors<T> neighbors;
  int seq, first, step, left;
  int x, x_end;  // chunks of the row that follow
  Batch<T> now, next;
  int index = 0;

  __device__ Stream(const DecodeArgs& args_, int head, const Row<T>* row_,
                    const Neighbors<T>& neighbors_)
      : args(args_), copier(args_, head), row(row_), neighbors(neighbors_) {}

  __device__ __forceinline__ void take_batch() {
    if (left == 0 && row && x < x_end) {
      seq = row->sequence_at(x);
      const int begin = args.window > 0 ? neighbors.seen(args, seq).begin : 0;
      first = begin / T::kChunk + x - row->starts[seq];
      step = 1;
      left = min(row->starts[seq + 1], x_end) - x;
      x += left;
    }
    next.count = 0;
    if (left == 0) return;
    next = find_blocks<T>(args, seq, neighbors.rows(seq), first, step, left);
    first += next.count * step;
    left -= next.count;
  }

  // The next chunk, if there is one, into a stage.
  __device__ __forceinline__ void copy_next(uint32_t stage) {
    if (index == now.count && next.count > 0) {
      now = next;
      index = 0;
      take_batch();
    }
    if (index < now.count) copier.copy(stage, now, index++);
    copy_async_commit();
  }
};

template <typename T>
struct Ring {
  uint32_t base;
  int at = 0;
  __device__ __forceinline__ uint32_t stage() const { return base + at * T::kStageBytes; }
  __device__ __forceinline__ uint32_t end() const { return base + T::kStages * T::kStageBytes; }
  __device__ __forceinline__ void advance() { at = at + 1 == T::kStages ? 0 : at + 1; }
};

// Which of a batch's chunks hold a token that this step stores: only those may the kernel ahead
// still be writing. Bit i: chunk i; beyond a warp's width of sequences, all.
template <typename T>
__device__ __forceinline__ unsigned fresh_chunks(const DecodeArgs& args, const Batch<T>& batch) {
  using B = Batch<T>;
  if (args.num_seqs > kWarpSize || !args.one_slot) return ~0u;
  if (args.num_seqs == 1) {  // no look into the block table: the last chunk
    const int behind = (batch.seen.end - 1) / T::kChunk - batch.first;
    const int index = behind / batch.step;
    return behind == index * batch.step && behind >= 0 && index < B::kChunks ? 1u << index : 0;
  }
  const int lane = threadIdx.x % kWarpSize, in_block = (1 << args.log2_block_size) - 1;
  const auto group_of = [&](int block_id, int token) {  // eight slots of the cache
    return (static_cast<unsigned>(block_id) << (args.log2_block_size - 3)) +
           ((token & in_block) >> 3);
  };
  const int token = (batch.first + lane / B::kGroups * batch.step) * T::kChunk;
  const unsigned group = group_of(batch.block_id, token + lane % B::kGroups * 8);
  unsigned newest = 0;
  const int last = lane < args.num_seqs ? args.seq_lens[lane] - 1 : -1;
  if (last >= 0)
    newest =
        group_of(args.block_table[lane * args.table_stride + (last >> args.log2_block_size)], last);
  const unsigned known = __ballot_sync(kAllLanes, last >= 0);
  bool fresh = false;
  for (int seq = 0; seq < args.num_seqs; ++seq) {
    fresh |= (known >> seq & 1) && group == __shfl_sync(kAllLanes, newest, seq);
  }
  const unsigned lanes = __ballot_sync(kAllLanes, fresh);
  unsigned chunks = 0;
#pragma unroll
  for (int i = 0; i < B::kChunks; ++i) {
    if (lanes >> (i * B::kGroups) & ((1u << B::kGroups) - 1)) chunks |= 1u << i;
  }
  return chunks;
}

// `count` chunks, `step` apart from `first` on, of the sequence whose queries these are.
template <typename T>
__device__ __forceinline__ void attend_chunks(Stream<T>& stream, Ring<T>& ring, int first, int step,
                                              int count, const Visible& seen, const Query<T>& q,
                                              Sums<T>& sums) {
  const MatrixRows<T> rows;
  for (int i = 0; i < count; ++i) {
    copy_async_wait<T::kStages - 1>();
    __syncwarp();
    attend<T>(rows, ring.stage(), (first + i * step) * T::kChunk, seen, stream.args.soft_cap, q,
              sums);
    __syncwarp();
    stream.copy_next(ring.stage());
    ring.advance();
  }
}

}  // namespace fusewright::attention
