// fw_cuda::decode_attention: argument checks and scratch.
#include <optional>

#include "checks.h"
#include "decode.h"

namespace fusewright::attention {
namespace {

constexpr const char* kOp = "fw_cuda::decode_attention";

struct Call {
  const Tensor& q;
  const Tensor& kv_cache;
  const Tensor& out;
  const std::optional<Tensor>& kv_scale;
  const std::optional<Tensor>& out_scale;
};

void check_counts(const Tensor& kv_cache, const Tensor& seq_lens) {
  const int64_t num_seqs = seq_lens.size(0), kv_heads = kv_cache.size(3);
  if (num_seqs > kMaxSeqs || num_seqs * kv_heads > kMaxItems) {
    fail(kOp, "seq_lens ", shape_of(seq_lens), " has ", num_seqs, " sequences of ", kv_heads,
         " KV heads, expected ", kMaxSeqs, " sequences or fewer and ", kMaxItems,
         " pairs of a sequence and a KV head or fewer");
  }
}

void check_scales(const Call& call) {
  const Tensor& q = call.q;
  if (call.kv_scale) check_kv_scale(kOp, *call.kv_scale, call.kv_cache, q);
  check_out(kOp, call.out, q, call.out_scale ? &*call.out_scale : nullptr);
}

void run(const Call& call, DecodeArgs& args) {
  const DecodeTypes types{call.q.scalar_type() == ScalarType::BFloat16,
                          call.kv_cache.scalar_type() == ScalarType::Float8_e4m3fn,
                          static_cast<int>(call.q.size(2))};
  DecodePlan plan;
  cudaError_t error = plan_decode(args, types, plan);
  if (error != cudaSuccess) fail(kOp, "no limits of the device: ", cudaGetErrorString(error));
  if (args.kv_heads > plan.grid.blocks * kWarps) {
    fail(kOp, "kv_cache ", shape_of(call.kv_cache), " has ", args.kv_heads, " KV heads, expected ",
         plan.grid.blocks * kWarps, " or fewer");
  }
  // Freed on return: what the allocator hands it to next runs on this stream, after this kernel.
  const Tensor partials = empty({4 * plan.partial_float4s}, aoti_torch_dtype_float32(), call.q);
  args.partials = static_cast<float4*>(partials.data_ptr());
  error = launch_decode(args, types, plan, current_stream(call.q.get_device_index()));
  if (error != cudaSuccess) {
    fail(kOp, "launch on q ", shape_of(call.q), " and kv_cache ", shape_of(call.kv_cache),
         " failed: ", cudaGetErrorString(error));
  }
}

void decode_attention(const Tensor& q, const Tensor& kv_cache, const Tensor& block_table,
                      const Tensor& seq_lens, const Tensor& query_start_loc, const Tensor& out,
                      double scale, int64_t sliding_window, double soft_cap,
                      const std::optional<Tensor>& kv_scale, const std::optional<Tensor>& out_scale,
                      const std::optional<Tensor>& sinks) {
  check_devices(kOp, q, kv_cache, block_table, seq_lens, query_start_loc, out);
  const Call call{q, kv_cache, out, kv_scale, out_scale};
  check_q(kOp, q, false);
  check_cache(kOp, kv_cache, q, true, kMaxGroup);
  check_batch(kOp, block_table, seq_lens, query_start_loc);
  check_counts(kv_cache, seq_lens);
  check_scales(call);
  check_numbers(kOp, scale, sliding_window, soft_cap);
  if (sinks) check_sinks(kOp, *sinks, q);
  if (q.size(0) == 0 || seq_lens.size(0) == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  DecodeArgs args;
  args.q = q.data_ptr();
  args.kv = kv_cache.data_ptr();
  args.block_table = static_cast<const int*>(block_table.data_ptr());
  args.seq_lens = static_cast<const int*>(seq_lens.data_ptr());
  args.query_start = static_cast<const int*>(query_start_loc.data_ptr());
  args.out = out.data_ptr();
  args.kv_scale = kv_scale ? static_cast<const float*>(kv_scale->data_ptr()) : nullptr;
  args.out_scale = out_scale ? static_cast<const float*>(out_scale->data_ptr()) : nullptr;
  args.sinks = sinks ? sinks->data_ptr() : nullptr;
  args.wide_sinks = sinks && sinks->scalar_type() == ScalarType::Float;
  args.num_seqs = static_cast<int>(seq_lens.size(0));
  args.one_slot = q.size(0) == seq_lens.size(0);
  args.max_blocks = static_cast<int>(block_table.size(1));
  args.kv_heads = static_cast<int>(kv_cache.size(3));
  args.group = static_cast<int>(q.size(1) / kv_cache.size(3));
  args.log2_block_size = 0;
  while ((int64_t{1} << args.log2_block_size) < kv_cache.size(2)) ++args.log2_block_size;
  args.q_stride = q.stride(0);
  args.table_stride = block_table.stride(0);
  args.scale = static_cast<float>(scale);
  args.window = static_cast<int>(sliding_window);
  args.soft_cap = static_cast<float>(soft_cap);
  run(call, args);
}

}  // namespace
}  // namespace fusewright::attention

STABLE_TORCH_LIBRARY_FRAGMENT(fw_cuda, m) {
  m.def(
      "decode_attention(Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, "
      "Tensor query_start_loc, Tensor(a!) out, float scale, int sliding_window, float soft_cap, "
      "Tensor? kv_scale, Tensor? out_scale, Tensor? sinks) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fw_cuda, CUDA, m) {
  m.impl("decode_attention", TORCH_BOX(&fusewright::attention::decode_attention));
}
