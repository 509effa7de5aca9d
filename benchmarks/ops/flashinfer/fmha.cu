// FlashInfer's FMHA v2 for Hopper, which comes from TensorRT-LLM, behind a C interface: bf16, pages
// as in kv_cache, no plan. FW_RUN is the launcher of the generated kernels beside which this is
// compiled, FW_HEAD_DIM their head_dim.

#include <fused_multihead_attention.h>
#include <fused_multihead_attention_utils.h>

#include <climits>
#include <cmath>

using Params = bert::Fused_multihead_attention_params_v2;
using LaunchParams = bert::Fused_multihead_attention_launch_params;

void FW_RUN(Params&, const LaunchParams&, cudaStream_t);

extern "C" struct FmhaCall {
  void *q, *kv_cache, *out;
  int32_t *cu_q, *cu_kv, *block_table;
  float* sinks;
  uint32_t* counter;  // of tiles; set by each call
  int64_t q_stride;
  int32_t num_tokens, num_seqs, num_heads, kv_heads, page, max_blocks, max_queries, window, chunk;
  float scale, soft_cap;
};

extern "C" int fmha_run(FmhaCall const* c, cudaStream_t stream) {
  static cudaDeviceProp device;
  if (device.multiProcessorCount == 0) cudaGetDeviceProperties(&device, 0);
  constexpr int64_t row = FW_HEAD_DIM * 2;  // bytes
  LaunchParams launch{};
  launch.force_fp32_acc = launch.flash_attention = true;
  launch.warp_specialization = launch.use_tma = true;
  launch.attention_mask_type = c->window || c->chunk
                                   ? fmha::Attention_mask_type::SLIDING_OR_CHUNKED_CAUSAL
                                   : fmha::Attention_mask_type::CAUSAL;
  launch.attention_input_layout = fmha::Attention_input_layout::Q_PAGED_KV;
  launch.multi_processor_count = device.multiProcessorCount;
  launch.device_l2_cache_size = device.l2CacheSize;
  launch.total_q_seqlen = c->num_tokens;
  launch.enable_attn_logit_softcapping = c->soft_cap != 0;
  Params p;
  memset(&p, 0, sizeof p);
  p.q_ptr = c->q;
  p.q_stride_in_bytes = c->q_stride * 2;
  p.o_ptr = c->out;
  p.o_stride_in_bytes = c->num_heads * row;
  p.paged_kv_cache = fmha::Kv_block_array(c->num_seqs, c->max_blocks, c->page,
                                          c->page * c->kv_heads * row, c->kv_cache);
  p.paged_kv_cache.mBlockOffsets = c->block_table;
  p.paged_kv_cache.mUsesSharedPagedKvIdx = true;
  p.k_stride_in_bytes = p.v_stride_in_bytes = c->kv_heads * row;
  p.k_stride_in_bytes_2 = p.v_stride_in_bytes_2 = row;
  p.attention_sinks = c->sinks;
  p.b = c->num_seqs;
  p.h = c->num_heads;
  p.h_kv = c->kv_heads;
  p.h_q_per_kv = c->num_heads / c->kv_heads;
  p.s = c->max_queries;
  p.d = p.dv = FW_HEAD_DIM;
  p.num_grouped_heads = 1;
  p.sliding_window_size = c->window ? c->window : INT_MAX;
  p.log2_chunked_attention_size = c->chunk ? static_cast<int>(std::log2(c->chunk)) : 0;
  p.cu_q_seqlens = c->cu_q;
  p.cu_kv_seqlens = c->cu_kv;
  p.softcapping_scale_bmm1 = c->soft_cap;
  float const factor = c->soft_cap ? c->scale / c->soft_cap : c->scale * float(M_LOG2E);
  set_alpha(p.scale_bmm1, factor, DATA_TYPE_FP32);
  set_alpha(p.scale_softmax, 1.0f, DATA_TYPE_FP32);
  set_alpha(p.scale_bmm2, 1.0f, DATA_TYPE_BF16);
  p.tile_id_counter_ptr = c->counter;
  FW_RUN(p, launch, stream);
  return cudaGetLastError();
}
