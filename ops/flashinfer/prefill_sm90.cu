// FlashInfer's Hopper prefill (FlashAttention 3 over a paged cache) behind a C entry point that
// needs no plan: its tile scheduler here reads lengths and block table where paged_attention has
// them, on the device.  So nothing waits for the host, and one captured graph serves any lengths.
//
// compiler/emit/flashinfer_modules.py builds it once for each head dimension, from the headers that
// the package flashinfer-python brings: FW_HEAD_DIM, FW_TILE_Q, FW_TILE_KV and FW_STAGES are set.

// FlashInfer's own version of this header includes CUTLASS's test utilities, which need curand.
#define FLASHINFER_CUTLASS_UTILS_CUH_
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <flashinfer/attention/hopper/prefill_sm90.cuh>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/numeric_types.h"

namespace {

using Element = cutlass::bfloat16_t;
constexpr int kHeadDim = FW_HEAD_DIM, kTileQ = FW_TILE_Q, kTileKV = FW_TILE_KV;
constexpr int kStages = FW_STAGES;  // of K and V in shared memory

struct Logits {
  float sm_scale;
};

// Blocks take (query tile, head) pairs from the last tiles, which see the most keys, to the first,
// there and back over the grid, so that each gets long and short ones.  Sequences with fewer queries
// than `fewest` have no tiles: the decode kernel serves them.
struct LengthsScheduler {
  struct Params {
    int const* seq_lens;
    int const* query_start;
    int num_seqs, table_stride, num_heads, group, fewest;
  };

  struct WorkTileInfo {
    int round = 0;
    bool valid = false;
    int head = 0;
    int q_tile = 0, query_start = 0, table_start = 0, query_len = 0, seq_len = 0, seq = 0;

    CUTLASS_DEVICE bool is_valid(Params const&) const { return valid; }

    CUTLASS_DEVICE auto get_block_coord(Params const& params) const {
      return cute::tuple{q_tile,  head, head / params.group, query_start, table_start, query_len,
                         seq_len, seq};
    }
  };

  CUTLASS_DEVICE static int tiles(Params const& params, int query_len, int seq_len) {
    return query_len >= params.fewest && seq_len > 0 ? (query_len + kTileQ - 1) / kTileQ : 0;
  }

  // The item-th (tile, head) pair.  Every lane of a warp calls it and gets the same answer.
  CUTLASS_DEVICE static WorkTileInfo find(Params const& params, int round) {
    int const block = blockIdx.x, blocks = gridDim.x;
    int const item = round * blocks + (round % 2 ? blocks - 1 - block : block);
    WorkTileInfo work;
    work.round = round;
    work.head = item % params.num_heads;
    int left = item / params.num_heads;  // tiles to pass over, from the last sequence's last tile
    int const lane = threadIdx.x % 32;
    for (int last = params.num_seqs - 1; last >= 0; last -= 32) {
      int const seq = last - lane;
      int start = 0, query_len = 0, seq_len = 0;
      if (seq >= 0) {
        start = params.query_start[seq];
        query_len = params.query_start[seq + 1] - start;
        seq_len = params.seq_lens[seq];
      }
      int const own = tiles(params, query_len, seq_len);
      int to_here = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        int const other = __shfl_up_sync(0xffffffffu, to_here, step);
        if (lane >= step) to_here += other;
      }
      unsigned const holds = __ballot_sync(0xffffffffu, to_here > left);
      if (holds) {
        int const owner = __ffs(holds) - 1;
        work.valid = true;
        work.q_tile = __shfl_sync(0xffffffffu, to_here - 1 - left, owner);
        work.query_start = __shfl_sync(0xffffffffu, start, owner);
        work.query_len = __shfl_sync(0xffffffffu, query_len, owner);
        work.seq_len = __shfl_sync(0xffffffffu, seq_len, owner);
        work.seq = last - owner;
        work.table_start = work.seq * params.table_stride;
        return work;
      }
      left -= __shfl_sync(0xffffffffu, to_here, 31);
    }
    return work;
  }

  CUTLASS_DEVICE WorkTileInfo get_initial_work(Params const& params) const {
    return find(params, 0);
  }

  template <bool is_producer = false>
  CUTLASS_DEVICE WorkTileInfo get_next_work(Params const& params, WorkTileInfo const& work) const {
    return find(params, work.round + 1);
  }

  CUTLASS_DEVICE void init_consumer() const {}
  CUTLASS_DEVICE void prefetch_next_work(Params const&, WorkTileInfo&) const {}
  CUTLASS_DEVICE void broadcast_next_work(WorkTileInfo&) const {}
};

}  // namespace

// One call of paged_attention's prefill part; the fields are its arguments, strides in elements.
extern "C" struct FwPrefill {
  void const* q;
  void const* kv_cache;
  int const* block_table;
  int const* seq_lens;
  int const* query_start_loc;
  void* out;
  int64_t q_stride, table_stride;
  int32_t num_tokens, num_seqs, num_heads, kv_heads, page, fewest, blocks;
  float scale;
};

extern "C" int fw_prefill(FwPrefill const* call, cudaStream_t stream) {
  using namespace flashinfer;
  using Traits =
      AttentionKernelTraits</*USE_TMA_LOAD_KV=*/false, kHeadDim, kHeadDim, kTileQ, kTileKV, kStages,
                            Element, Element, Element, int32_t, StandardAttention>;
  using Mainloop = SparseCollectiveMainloop<Logits, Traits, /*CAUSAL=*/true>;
  using Epilogue = CollectiveEpilogue<Traits>;
  auto const* q = static_cast<Element const*>(call->q);
  auto const* k = static_cast<Element const*>(call->kv_cache);
  int64_t const token = int64_t(call->kv_heads) * kHeadDim, plane = call->page * token;
  auto const keys = get_gmem_layout(0, call->kv_heads, kHeadDim, token, kHeadDim);
  auto const mainloop = Mainloop::to_underlying_arguments(
      {q, get_gmem_layout(call->num_tokens, call->num_heads, kHeadDim, call->q_stride, kHeadDim), k,
       keys, k + plane, keys, call->block_table, /*window_left=*/-1, 2 * plane, 2 * plane,
       uint32_t(call->page), Logits{call->scale}});
  auto const epilogue = Epilogue::to_underlying_arguments(
      {static_cast<Element*>(call->out),
       get_gmem_layout(call->num_tokens, call->num_heads, kHeadDim,
                       int64_t(call->num_heads) * kHeadDim, kHeadDim),
       nullptr, get_lse_gmem_layout(call->num_tokens, call->num_heads)});
  LengthsScheduler::Params const schedule{call->seq_lens,  call->query_start_loc,
                                          call->num_seqs,  int(call->table_stride),
                                          call->num_heads, call->num_heads / call->kv_heads,
                                          call->fewest};
  auto const kernel =
      PrefillWithKVCacheKernel<Mainloop, Epilogue, Traits, /*LEFT_SLIDING_WINDOW=*/false,
                               /*CAUSAL=*/true, LengthsScheduler>;
  int const smem_bytes = sizeof(typename Traits::SharedStorage);
  cudaError_t const allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (allowed != cudaSuccess) return allowed;
  kernel<<<call->blocks, Traits::NUM_THREADS, smem_bytes, stream>>>(mainloop, epilogue, schedule);
  return cudaGetLastError();
}
