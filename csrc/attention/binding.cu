// fw_cuda::decode_attention: argument checks, scratch and the choice of types; the work is in the
// headers.
#include <optional>

#include "../common/binding.h"
#include "decode.cuh"

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

void check_device(const Tensor& t, const char* name, const Tensor& q) {
  if (!t.is_cuda() || t.get_device_index() != q.get_device_index()) {
    fail(kOp, name, " is not on q's device, cuda:", q.get_device_index());
  }
}

void check_aligned(const Tensor& t, const char* name) {
  if (reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 != 0) {
    fail(kOp, name, " ", shape_of(t), " lies on an address that is no multiple of 16");
  }
}

void check_q(const Tensor& q) {
  const bool dtype = q.scalar_type() == ScalarType::BFloat16 || q.scalar_type() == ScalarType::Half;
  if (q.dim() != 3 || !dtype || (q.size(2) != 64 && q.size(2) != 128)) {
    fail(kOp, "q has shape ", shape_of(q), " and elements of ", q.element_size(),
         " bytes, expected [num_tokens, num_heads, 64 or 128] of bfloat16 or float16");
  }
  if (q.stride(2) != 1 || q.stride(1) != q.size(2) || (q.size(0) > 1 && q.stride(0) % 8 != 0)) {
    fail(kOp, "q ", shape_of(q), " has strides [", q.stride(0), ", ", q.stride(1), ", ",
         q.stride(2), "], expected heads without gaps, tokens a multiple of 8 elements apart");
  }
  check_aligned(q, "q");
}

void check_cache(const Tensor& kv_cache, const Tensor& q) {
  const int64_t head_dim = q.size(2);
  const bool dtype = kv_cache.scalar_type() == q.scalar_type() ||
                     kv_cache.scalar_type() == ScalarType::Float8_e4m3fn;
  if (kv_cache.dim() != 5 || kv_cache.size(1) != 2 || kv_cache.size(4) != head_dim || !dtype ||
      !kv_cache.is_contiguous()) {
    fail(kOp, "kv_cache has shape ", shape_of(kv_cache), " and elements of ",
         kv_cache.element_size(),
         " bytes, expected a contiguous [num_blocks, 2, block_size, num_kv_heads, ", head_dim,
         "] of q's dtype or float8_e4m3fn");
  }
  const int64_t page = kv_cache.size(2), kv_heads = kv_cache.size(3);
  if (page < 8 || page > 256 || (page & (page - 1)) != 0) {
    fail(kOp, "block_size of kv_cache ", shape_of(kv_cache), " is ", page,
         ", expected a power of two from 8 to 256");
  }
  if (kv_heads < 1 || q.size(1) % kv_heads != 0 || q.size(1) / kv_heads > kMaxGroup) {
    fail(kOp, "q ", shape_of(q), " and kv_cache ", shape_of(kv_cache), ": ", q.size(1),
         " heads share ", kv_heads, " KV heads, expected 1 to ", kMaxGroup, " each");
  }
  check_aligned(kv_cache, "kv_cache");
}

void check_integers(const Tensor& t, const char* name, int64_t size) {
  if (t.dim() != 1 || t.size(0) != size || t.scalar_type() != ScalarType::Int ||
      !t.is_contiguous()) {
    fail(kOp, name, " has shape ", shape_of(t), ", expected a contiguous [", size, "] of int32");
  }
}

void check_batch(const Tensor& kv_cache, const Tensor& block_table, const Tensor& seq_lens,
                 const Tensor& query_start_loc) {
  if (seq_lens.dim() != 1) {
    fail(kOp, "seq_lens has shape ", shape_of(seq_lens), ", expected [num_seqs]");
  }
  const int64_t num_seqs = seq_lens.size(0), kv_heads = kv_cache.size(3);
  if (num_seqs > kMaxSeqs || num_seqs * kv_heads > kMaxItems) {
    fail(kOp, "seq_lens ", shape_of(seq_lens), " has ", num_seqs, " sequences of ", kv_heads,
         " KV heads, expected ", kMaxSeqs, " sequences or fewer and ", kMaxItems,
         " pairs of a sequence and a KV head or fewer");
  }
  if (block_table.dim() != 2 || block_table.size(0) != num_seqs || block_table.size(1) < 1 ||
      block_table.scalar_type() != ScalarType::Int ||
      (block_table.size(1) > 1 && block_table.stride(1) != 1)) {
    fail(kOp, "block_table has shape ", shape_of(block_table), ", expected [", num_seqs,
         ", 1 or more] of int32 without gaps in rows: seq_lens is ", shape_of(seq_lens));
  }
  check_integers(seq_lens, "seq_lens", num_seqs);
  check_integers(query_start_loc, "query_start_loc", num_seqs + 1);
}

void check_floats(const Tensor& t, const char* name, int64_t rows, int64_t cols) {
  if (t.dim() != 2 || t.size(0) != rows || t.size(1) != cols ||
      t.scalar_type() != ScalarType::Float || !t.is_contiguous()) {
    fail(kOp, name, " has shape ", shape_of(t), ", expected a contiguous [", rows, ", ", cols,
         "] of float32");
  }
}

void check_scales(const Call& call) {
  const Tensor& q = call.q;
  if (call.kv_scale) {
    check_device(*call.kv_scale, "kv_scale", q);
    check_floats(*call.kv_scale, "kv_scale", 2, call.kv_cache.size(3));
    if (call.kv_cache.scalar_type() != ScalarType::Float8_e4m3fn) {
      fail(kOp, "kv_scale is given, but kv_cache ", shape_of(call.kv_cache),
           " is not float8_e4m3fn");
    }
  }
  if (call.out_scale) {
    check_device(*call.out_scale, "out_scale", q);
    check_floats(*call.out_scale, "out_scale", 1, 1);
  }
  const Tensor& out = call.out;
  const ScalarType expected = call.out_scale ? ScalarType::Float8_e4m3fn : q.scalar_type();
  if (out.dim() != 3 || out.size(0) != q.size(0) || out.size(1) != q.size(1) ||
      out.size(2) != q.size(2) || out.scalar_type() != expected || !out.is_contiguous()) {
    fail(kOp, "out has shape ", shape_of(out), " and elements of ", out.element_size(),
         " bytes, expected it contiguous, shaped as q ", shape_of(q), ", of ",
         call.out_scale ? "float8_e4m3fn, as there is an out_scale" : "q's dtype");
  }
}

Tensor empty_floats(int64_t count, const Tensor& like) {
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(1, &count, &stride, aoti_torch_dtype_float32(),
                               aoti_torch_device_type_cuda(), like.get_device_index(), &handle));
  return Tensor(handle);
}

template <typename Q, typename Kv, int kHeadDim, int kHeadTiles>
void run(const Call& call, DecodeArgs& args) {
  using T = Tile<Q, Kv, kHeadDim, kHeadTiles>;
  const Limits* limits = nullptr;
  cudaError_t error = limits_of<T>(limits);
  if (error != cudaSuccess) fail(kOp, "no limits of the device: ", cudaGetErrorString(error));
  const Grid grid = plan_grid(*limits, args.num_seqs, args.kv_heads);
  if (args.kv_heads > grid.blocks * kWarps) {
    fail(kOp, "kv_cache ", shape_of(call.kv_cache), " has ", args.kv_heads, " KV heads, expected ",
         grid.blocks * kWarps, " or fewer");
  }
  // Freed on return: what the allocator hands it to next runs on this stream, after this kernel.
  const Tensor partials = empty_floats(4 * partial_float4s<T>(grid, args.kv_heads), call.q);
  args.partials = static_cast<float4*>(partials.data_ptr());
  error = launch_decode<T>(args, grid, current_stream(call.q.get_device_index()));
  if (error != cudaSuccess) {
    fail(kOp, "launch on q ", shape_of(call.q), " and kv_cache ", shape_of(call.kv_cache),
         " failed: ", cudaGetErrorString(error));
  }
}

template <typename Q, typename Kv>
void run_tile(const Call& call, DecodeArgs& args) {
  const bool one = args.group <= 8;
  if (call.q.size(2) == 128) {
    one ? run<Q, Kv, 128, 1>(call, args) : run<Q, Kv, 128, 2>(call, args);
  } else {
    one ? run<Q, Kv, 64, 1>(call, args) : run<Q, Kv, 64, 2>(call, args);
  }
}

template <typename Q>
void run_cache(const Call& call, DecodeArgs& args) {
  const bool fp8 = call.kv_cache.scalar_type() == ScalarType::Float8_e4m3fn;
  fp8 ? run_tile<Q, __nv_fp8_e4m3>(call, args) : run_tile<Q, Q>(call, args);
}

void decode_attention(const Tensor& q, const Tensor& kv_cache, const Tensor& block_table,
                      const Tensor& seq_lens, const Tensor& query_start_loc, const Tensor& out,
                      double scale, int64_t sliding_window, double soft_cap,
                      const std::optional<Tensor>& kv_scale,
                      const std::optional<Tensor>& out_scale) {
  if (!q.is_cuda()) fail(kOp, "q is not on a CUDA device");
  check_device(kv_cache, "kv_cache", q);
  check_device(block_table, "block_table", q);
  check_device(seq_lens, "seq_lens", q);
  check_device(query_start_loc, "query_start_loc", q);
  check_device(out, "out", q);
  const Call call{q, kv_cache, out, kv_scale, out_scale};
  check_q(q);
  check_cache(kv_cache, q);
  check_batch(kv_cache, block_table, seq_lens, query_start_loc);
  check_scales(call);
  if (!(scale > 0) || sliding_window < 0 || sliding_window >= int64_t{1} << 31 || soft_cap < 0) {
    fail(kOp, "scale ", scale, ", sliding_window ", sliding_window, ", soft_cap ", soft_cap,
         ", expected a positive scale, the others 0 or positive, sliding_window below 2^31");
  }
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
  args.num_seqs = static_cast<int>(seq_lens.size(0));
  args.one_slot = q.size(0) == seq_lens.size(0);
  args.max_blocks = static_cast<int>(block_table.size(1));
  args.kv_heads = static_cast<int>(kv_cache.size(3));
  args.group = static_cast<int>(q.size(1) / kv_cache.size(3));
  args.page_shift = 0;
  while ((int64_t{1} << args.page_shift) < kv_cache.size(2)) ++args.page_shift;
  args.q_stride = q.stride(0);
  args.table_stride = block_table.stride(0);
  args.scale = static_cast<float>(scale);
  args.window = static_cast<int>(sliding_window);
  args.soft_cap = static_cast<float>(soft_cap);
  q.scalar_type() == ScalarType::BFloat16 ? run_cache<__nv_bfloat16>(call, args)
                                          : run_cache<__half>(call, args);
}

}  // namespace
}  // namespace fusewright::attention

STABLE_TORCH_LIBRARY_FRAGMENT(fw_cuda, m) {
  m.def(
      "decode_attention(Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, "
      "Tensor query_start_loc, Tensor(a!) out, float scale, int sliding_window, float soft_cap, "
      "Tensor? kv_scale, Tensor? out_scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fw_cuda, CUDA, m) {
  m.impl("decode_attention", TORCH_BOX(&fusewright::attention::decode_attention));
}
