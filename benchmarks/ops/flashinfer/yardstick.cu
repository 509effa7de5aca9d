// FlashInfer's own planned kernels behind a C interface, as the yardstick of ours: plan() on the
// host as its wrappers call it, run() on the device.  One of KIND_DECODE, KIND_FA2, KIND_FA3 a
// library, and FW_HEAD_DIM; bf16, pages as in kv_cache.

#define FLASHINFER_CUTLASS_UTILS_CUH_  // includes CUTLASS's test utilities, which need curand
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <flashinfer/utils.cuh>
#undef DISPATCH_GQA_GROUP_SIZE  // the shapes measured here
#define DISPATCH_GQA_GROUP_SIZE(group_size, GROUP_SIZE, ...) \
  if (group_size == 4) {                                     \
    constexpr size_t GROUP_SIZE = 4;                         \
    __VA_ARGS__                                              \
  } else {                                                   \
    throw std::runtime_error("yardstick: group size not 4"); \
  }
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/layout.cuh>
#include <flashinfer/math.cuh>
#include <flashinfer/page.cuh>

#ifdef KIND_FA3
#include <flashinfer/attention/hopper/default_params.cuh>
#include <flashinfer/attention/hopper/prefill_sm90.cuh>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/numeric_types.h"
#elif defined(KIND_FA2)
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/variants.cuh>
#else
#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/variants.cuh>
#endif

using namespace flashinfer;

#ifndef FW_KV
#define FW_KV nv_bfloat16  // type of K and V
#endif

constexpr uint32_t kHeadDim = FW_HEAD_DIM;
using KV = FW_KV;

extern "C" struct FiCall {
  void *q, *kv_cache, *out;                                // device
  int32_t *qo_indptr, *kv_indptr, *indices, *last_page;    // device
  int32_t *qo_indptr_host, *kv_indptr_host, *kv_len_host;  // host; kv_indptr counts pages
  void *float_ws, *int_ws, *pinned_ws;
  int64_t float_bytes, int_bytes, q_stride;
  int32_t num_tokens, num_seqs, num_heads, kv_heads, page, pdl, graph, causal;
  float scale;
  int64_t info[16];
};

namespace yardstick {
#ifdef KIND_FA3
using Params =
    BatchPrefillPagedParams<cutlass::bfloat16_t, cutlass::bfloat16_t, cutlass::bfloat16_t, int32_t>;

void plan(FiCall* c, cudaStream_t stream) {
  PrefillPlanSM90Info info;
  FLASHINFER_CHECK(
      PrefillSM90Plan(c->float_ws, c->float_bytes, c->int_ws, c->pinned_ws, c->int_bytes, info,
                      c->qo_indptr_host, c->kv_indptr_host, c->kv_len_host, c->num_tokens,
                      c->num_seqs, c->num_heads, c->kv_heads, kHeadDim, kHeadDim, c->page,
                      c->causal, c->graph, 2, stream) == cudaSuccess,
      "plan");
  auto const all = info.ToVector();
  std::copy(all.begin(), all.end(), c->info);
}

cudaError_t run(FiCall* c, cudaStream_t stream) {
  PrefillPlanSM90Info info;
  info.FromVector(std::vector<int64_t>(c->info, c->info + 9));
  Params p{};
  using T = cutlass::bfloat16_t;
  int64_t const token = int64_t(c->kv_heads) * kHeadDim, plane = c->page * token;
  p.q_ptr = (T*)c->q;
  p.k_ptr = (T*)c->kv_cache;
  p.v_ptr = (T*)c->kv_cache + plane;
  p.o_ptr = (T*)c->out;
  p.q_stride_n = c->q_stride;
  p.o_stride_n = int64_t(c->num_heads) * kHeadDim;
  p.k_stride_n = p.v_stride_n = token;
  p.q_stride_h = p.k_stride_h = p.v_stride_h = p.o_stride_h = kHeadDim;
  p.k_page_stride = p.v_page_stride = 2 * plane;
  p.nnz_qo = c->num_tokens;
  p.num_qo_heads = c->num_heads;
  p.num_kv_heads = c->kv_heads;
  p.group_size = c->num_heads / c->kv_heads;
  p.page_size = c->page;
  p.window_left = -1;
  p.causal = c->causal;
  p.additional_params.sm_scale = c->scale;
  p.kv_indices = c->indices;
  auto at = [&](int64_t offset) { return GetPtrFromBaseOffset<int32_t>(c->int_ws, offset); };
  p.qo_tile_indices = at(info.qo_tile_indices_offset);
  p.qo_indptr = at(info.qo_indptr_offset);
  p.kv_indptr = at(info.kv_indptr_offset);
  p.qo_lens = at(info.qo_len_offset);
  p.kv_lens = at(info.kv_len_offset);
  p.head_indices = at(info.head_indices_offset);
  p.work_indptr = at(info.work_indptr_offset);
  p.batch_indices = at(info.batch_indices_offset);
  FLASHINFER_CHECK(!info.same_schedule_for_all_heads, "one schedule for all heads: not built");
  return BatchPrefillWithPagedKVCacheDispatched<kHeadDim, kHeadDim, MaskMode::kCausal, false, false,
                                                StandardAttention>(p, c->pdl, stream);
}

#else
paged_kv_t<KV, int32_t> cache(FiCall const* c) {
  int64_t const token = int64_t(c->kv_heads) * kHeadDim, plane = c->page * token;
  int64_t const strides[3] = {2 * plane, token, kHeadDim};
  return {uint32_t(c->kv_heads),
          uint32_t(c->page),
          kHeadDim,
          uint32_t(c->num_seqs),
          QKVLayout::kNHD,
          (KV*)c->kv_cache,
          (KV*)c->kv_cache + plane,
          strides,
          c->indices,
          c->kv_indptr,
          c->last_page};
}

template <typename P>
void assign(P& p, FiCall const* c) {
  p.q = (nv_bfloat16*)c->q;
  p.paged_kv = cache(c);
  p.o = (nv_bfloat16*)c->out;
  p.lse = nullptr;
  p.num_qo_heads = c->num_heads;
  p.q_stride_n = c->q_stride;
  p.q_stride_h = kHeadDim;
  p.window_left = -1;
  p.sm_scale = c->scale;
}

// Partials point to the partial results of a plan that splits the KV; other plans have none.
struct Partials {
  nv_bfloat16* v = nullptr;
  float* s = nullptr;
};

// Sets what both kinds of kernels read from a plan's workspaces.
template <typename P, typename Info>
Partials assign_plan(P& p, Info const& info, FiCall const* c) {
  auto at = [&](int64_t offset) { return GetPtrFromBaseOffset<int32_t>(c->int_ws, offset); };
  p.request_indices = at(info.request_indices_offset);
  p.kv_tile_indices = at(info.kv_tile_indices_offset);
  p.o_indptr = at(info.o_indptr_offset);
  p.kv_chunk_size_ptr = at(info.kv_chunk_size_ptr_offset);
  p.padded_batch_size = info.padded_batch_size;
  if (!info.split_kv) return {};
  return {GetPtrFromBaseOffset<nv_bfloat16>(c->float_ws, info.v_offset),
          GetPtrFromBaseOffset<float>(c->float_ws, info.s_offset)};
}

using Variant = DefaultAttention<false, false, false, false>;
#endif

#ifdef KIND_FA2
using Params = BatchPrefillPagedParams<nv_bfloat16, KV, nv_bfloat16, int32_t>;

void plan(FiCall* c, cudaStream_t stream) {
  PrefillPlanInfo info;
  FLASHINFER_CHECK(
      PrefillPlan<int32_t>(c->float_ws, c->float_bytes, c->int_ws, c->pinned_ws, c->int_bytes, info,
                           c->qo_indptr_host, c->kv_indptr_host, c->num_tokens, c->num_seqs,
                           c->num_heads, c->kv_heads, kHeadDim, kHeadDim, c->page, c->graph, 2, -1,
                           -1, false, 0, 0, stream, 2) == cudaSuccess,
      "plan");
  auto const all = info.ToVector();
  std::copy(all.begin(), all.end(), c->info);
}

template <uint32_t TILE>
cudaError_t launch(Params const& p, nv_bfloat16* v, float* s, FiCall const* c,
                   cudaStream_t stream) {
  return BatchPrefillWithPagedKVCacheDispatched<
      true, TILE, kHeadDim, kHeadDim, PosEncodingMode::kNone, false, MaskMode::kCausal, Variant>(
      p, v, s, c->pdl, stream);
}

cudaError_t run(FiCall* c, cudaStream_t stream) {
  PrefillPlanInfo info;
  info.FromVector(std::vector<int64_t>(c->info, c->info + 15));
  Params p;
  assign(p, c);
  p.q_indptr = c->qo_indptr;
  p.group_size = uint_fastdiv(c->num_heads / c->kv_heads);
  auto const [v, s] = assign_plan(p, info, c);
  auto at = [&](int64_t offset) { return GetPtrFromBaseOffset<int32_t>(c->int_ws, offset); };
  p.qo_tile_indices = at(info.qo_tile_indices_offset);
  if (info.split_kv) p.merge_indptr = at(info.merge_indptr_offset);
  p.max_total_num_rows = info.total_num_rows;
  if (info.enable_cuda_graph) {
    p.block_valid_mask = GetPtrFromBaseOffset<bool>(c->int_ws, info.block_valid_mask_offset);
    p.total_num_rows = GetPtrFromBaseOffset<uint32_t>(c->int_ws, info.total_num_rows_offset);
  }
  if (info.cta_tile_q == 128) return launch<128>(p, v, s, c, stream);
  if (info.cta_tile_q == 64) return launch<64>(p, v, s, c, stream);
  return launch<16>(p, v, s, c, stream);
}
#elif defined(KIND_DECODE)
using Params = BatchDecodeParams<nv_bfloat16, nv_bfloat16, nv_bfloat16, int32_t>;

void plan(FiCall* c, cudaStream_t stream) {
  DecodePlanInfo info;
  auto work =
      BatchDecodeWithPagedKVCacheWorkEstimationDispatched<4, kHeadDim, PosEncodingMode::kNone,
                                                          Variant, Params>;
  auto const status = DecodePlan<kHeadDim, PosEncodingMode::kNone, Variant, Params>(
      c->float_ws, c->float_bytes, c->int_ws, c->pinned_ws, c->int_bytes, info, c->kv_indptr_host,
      c->num_seqs, c->num_heads, c->page, c->graph, stream, work);
  FLASHINFER_CHECK(status == cudaSuccess, "plan");
  auto const all = info.ToVector();
  std::copy(all.begin(), all.end(), c->info);
}

cudaError_t run(FiCall* c, cudaStream_t stream) {
  DecodePlanInfo info;
  info.FromVector(std::vector<int64_t>(c->info, c->info + 10));
  Params p;
  assign(p, c);
  auto const [v, s] = assign_plan(p, info, c);
  if (info.split_kv && info.enable_cuda_graph)
    p.block_valid_mask = GetPtrFromBaseOffset<bool>(c->int_ws, info.block_valid_mask_offset);
  return BatchDecodeWithPagedKVCacheDispatched<kHeadDim, PosEncodingMode::kNone, Variant>(
      p, v, s, c->pdl, stream);
}
#endif

int guarded(void (*body)(FiCall*, cudaStream_t), FiCall* call, cudaStream_t stream) {
  try {
    body(call, stream);
    return 0;
  } catch (std::exception const& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
}  // namespace yardstick

extern "C" int fi_plan(FiCall* call, cudaStream_t stream) {
  return yardstick::guarded(yardstick::plan, call, stream);
}

extern "C" int fi_run(FiCall* call, cudaStream_t stream) {
  auto const run = [](FiCall* c, cudaStream_t s) {
    FLASHINFER_CHECK(yardstick::run(c, s) == cudaSuccess, "run");
  };
  return yardstick::guarded(run, call, stream);
}
