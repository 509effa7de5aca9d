// fw_cuda::prefill_attention: argument checks.
#include <optional>

#include "checks.h"
#include "prefill.h"

namespace fusewright::attention {
namespace {

constexpr const char* kOp = "fw_cuda::prefill_attention";

void check_sizes(const Tensor& q, const Tensor& kv_cache, const Tensor& seq_lens, int64_t fewest) {
  if (q.size(2) != kHeadDim) {
    fail(kOp, "q has shape ", shape_of(q), ", expected a head_dim of ", kHeadDim);
  }
  if (fewest < 1) fail(kOp, "fewest is ", fewest, ", expected 1 or more queries");
  if (seq_lens.size(0) > kMostSeqs) {
    fail(kOp, "seq_lens ", shape_of(seq_lens), " has ", seq_lens.size(0), " sequences, expected ",
         kMostSeqs, " or fewer");
  }
  const int64_t most = int64_t{1} << 31;
  const int64_t tiles = q.size(0) / (kTileRows / kMostTileHeads) + seq_lens.size(0);
  if (kv_cache.size(0) * kv_cache.size(2) >= 4 * most || tiles * q.size(1) >= most) {
    fail(kOp, "q ", shape_of(q), " and kv_cache ", shape_of(kv_cache),
         ": expected fewer than 2^33 slots, and fewer than 2^31 pairs of a head and of 32 queries");
  }
}

void prefill_attention(const Tensor& q, const Tensor& kv_cache, const Tensor& block_table,
                       const Tensor& seq_lens, const Tensor& query_start_loc, const Tensor& out,
                       double scale, int64_t sliding_window, double soft_cap,
                       const std::optional<Tensor>& out_scale, int64_t fewest) {
  check_devices(kOp, q, kv_cache, block_table, seq_lens, query_start_loc, out);
  check_q(kOp, q);
  check_cache(kOp, kv_cache, q, false, q.size(1));
  check_batch(kOp, block_table, seq_lens, query_start_loc);
  check_out(kOp, out, q, out_scale ? &*out_scale : nullptr);
  check_numbers(kOp, scale, sliding_window, soft_cap);
  check_sizes(q, kv_cache, seq_lens, fewest);
  if (q.size(0) == 0 || seq_lens.size(0) == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  PrefillArgs args = {};
  args.block_table = static_cast<const int*>(block_table.data_ptr());
  args.seq_lens = static_cast<const int*>(seq_lens.data_ptr());
  args.query_start = static_cast<const int*>(query_start_loc.data_ptr());
  args.out = out.data_ptr();
  args.out_scale = out_scale ? static_cast<const float*>(out_scale->data_ptr()) : nullptr;
  args.num_seqs = static_cast<int>(seq_lens.size(0));
  args.fewest = static_cast<int>(fewest);
  args.heads = static_cast<int>(q.size(1));
  args.group = static_cast<int>(q.size(1) / kv_cache.size(3));
  while (int64_t{1} << args.log2_block_size < kv_cache.size(2)) ++args.log2_block_size;
  args.table_stride = block_table.stride(0);
  args.scale = static_cast<float>(scale);
  args.soft_cap = static_cast<float>(soft_cap);
  args.window = static_cast<int>(sliding_window);
  const PrefillShape shape{q.data_ptr(), kv_cache.data_ptr(), q.size(0),
                           q.stride(0),  kv_cache.size(0),    kv_cache.size(3)};
  const cudaStream_t stream = current_stream(q.get_device_index());
  const Element element =
      q.scalar_type() == ScalarType::BFloat16 ? Element::kBFloat16 : Element::kHalf;
  const cudaError_t error = launch_prefill(args, shape, element, stream);
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
      "Tensor? out_scale, int fewest) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fw_cuda, CUDA, m) {
  m.impl("prefill_attention", TORCH_BOX(&fusewright::attention::prefill_attention));
}
