// fw_cuda::prefill_attention: argument checks.
#include <optional>

#include "checks.h"
#include "prefill.h"

namespace fusewright::attention {
namespace {

constexpr const char* kOp = "fw_cuda::prefill_attention";

void check_sizes(const Tensor& q, const Tensor& kv_cache, const Tensor& seq_lens, int64_t fewest) {
  if (fewest < 1) fail(kOp, "fewest is ", fewest, ", expected 1 or more queries");
  const bool fp8 = kv_cache.scalar_type() == ScalarType::Float8_e4m3fn;
  const int most_seqs = fp8 && q.size(2) == 256 ? kMostSeqsFp8Of256 : kMostSeqs;
  if (seq_lens.size(0) > most_seqs) {
    fail(kOp, "seq_lens ", shape_of(seq_lens), " has ", seq_lens.size(0), " sequences, expected ",
         most_seqs, " or fewer");
  }
  const int64_t most = int64_t{1} << 31;
  const int64_t tiles = q.size(0) / kFewestTileQueries + seq_lens.size(0);
  if (kv_cache.size(0) * kv_cache.size(2) >= 4 * most || tiles * q.size(1) >= most) {
    fail(kOp, "q ", shape_of(q), " and kv_cache ", shape_of(kv_cache),
         ": expected fewer than 2^33 slots, and fewer than 2^31 pairs of a head and of ",
         kFewestTileQueries, " queries");
  }
}

using Launch = decltype(&launch_prefill<128>);

Launch launch_of(int64_t head_dim) {
  return head_dim == 64    ? launch_prefill<64>
         : head_dim == 128 ? launch_prefill<128>
                           : launch_prefill<256>;
}

const float* floats_of(const std::optional<Tensor>& t) {
  return t ? static_cast<const float*>(t->data_ptr()) : nullptr;
}

void prefill_attention(const Tensor& q, const Tensor& kv_cache, const Tensor& block_table,
                       const Tensor& seq_lens, const Tensor& query_start_loc, const Tensor& out,
                       double scale, int64_t sliding_window, double soft_cap,
                       const std::optional<Tensor>& kv_scale,
                       const std::optional<Tensor>& out_scale, const std::optional<Tensor>& sinks,
                       int64_t chunk, int64_t fewest) {
  check_devices(kOp, q, kv_cache, block_table, seq_lens, query_start_loc, out);
  check_q(kOp, q, true);
  check_cache(kOp, kv_cache, q, true, q.size(1));
  check_batch(kOp, block_table, seq_lens, query_start_loc);
  if (kv_scale) check_kv_scale(kOp, *kv_scale, kv_cache, q);
  check_out(kOp, out, q, out_scale ? &*out_scale : nullptr);
  check_numbers(kOp, scale, sliding_window, soft_cap);
  if (sinks) check_sinks(kOp, *sinks, q);
  if (chunk < 0 || chunk >= int64_t{1} << 31) {
    fail(kOp, "chunk is ", chunk, ", expected 0 or a positive number below 2^31");
  }
  if (q.size(2) == 64 && (sliding_window > 0 || chunk > 0 || soft_cap > 0)) {
    fail(kOp, "sliding_window ", sliding_window, ", chunk ", chunk, ", soft_cap ", soft_cap,
         ": expected 0 with q ", shape_of(q), ", whose head_dim is 64");
  }
  check_sizes(q, kv_cache, seq_lens, fewest);
  if (q.size(0) == 0 || seq_lens.size(0) == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  PrefillArgs args = {};
  args.block_table = static_cast<const int*>(block_table.data_ptr());
  args.seq_lens = static_cast<const int*>(seq_lens.data_ptr());
  args.query_start = static_cast<const int*>(query_start_loc.data_ptr());
  args.out = out.data_ptr();
  args.kv_scale = floats_of(kv_scale);
  args.out_scale = floats_of(out_scale);
  args.sinks = sinks ? sinks->data_ptr() : nullptr;
  args.wide_sinks = sinks && sinks->scalar_type() == ScalarType::Float;
  args.num_seqs = static_cast<int>(seq_lens.size(0));
  args.fewest = static_cast<int>(fewest);
  args.heads = static_cast<int>(q.size(1));
  args.kv_heads = static_cast<int>(kv_cache.size(3));
  args.group = args.heads / args.kv_heads;
  while (int64_t{1} << args.log2_block_size < kv_cache.size(2)) ++args.log2_block_size;
  args.table_stride = block_table.stride(0);
  args.scale = static_cast<float>(scale);
  args.soft_cap = static_cast<float>(soft_cap);
  args.window = static_cast<int>(sliding_window);
  args.chunk = static_cast<int>(chunk);
  const PrefillShape shape{q.data_ptr(), kv_cache.data_ptr(), q.size(0), q.stride(0),
                           kv_cache.size(0)};
  const cudaStream_t stream = current_stream(q.get_device_index());
  const Element element =
      q.scalar_type() == ScalarType::BFloat16 ? Element::kBFloat16 : Element::kHalf;
  const bool fp8_cache = kv_cache.scalar_type() == ScalarType::Float8_e4m3fn;
  const cudaError_t error = launch_of(q.size(2))(args, shape, element, fp8_cache, stream);
  if (error != cudaSuccess) {
    fail(kOp, "launch on q ", shape_of(q), " and kv_cache ", shape_of(kv_cache),
         " failed: ", cudaGetErrorString(error));
  }
}

}  // namespace
}  // namespace fusewright::attention

STABLE_TORCH_LIBRARY_FRAGMENT(fw_cuda, m) {
  m.def(
      "prefill_attention(Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, "
      "Tensor query_start_loc, Tensor(a!) out, float scale, int sliding_window, float soft_cap, "
      "Tensor? kv_scale, Tensor? out_scale, Tensor? sinks, int chunk, int fewest) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fw_cuda, CUDA, m) {
  m.impl("prefill_attention", TORCH_BOX(&fusewright::attention::prefill_attention));
}
