// What both attention ops ask of their tensors; `op` is the name that an error begins with.
#pragma once

#include "../common/binding.h"

namespace fusewright::attention {

inline void check_device(const char* op, const Tensor& t, const char* name, const Tensor& q) {
  if (!t.is_cuda() || t.get_device_index() != q.get_device_index()) {
    fail(op, name, " is not on q's device, cuda:", q.get_device_index());
  }
}

inline void check_aligned(const char* op, const Tensor& t, const char* name) {
  if (reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 != 0) {
    fail(op, name, " ", shape_of(t), " lies on an address that is no multiple of 16");
  }
}

inline void check_q(const char* op, const Tensor& q, bool takes_256) {
  const bool dtype = q.scalar_type() == ScalarType::BFloat16 || q.scalar_type() == ScalarType::Half;
  const bool is_3d = q.dim() == 3;
  const int64_t head_dim = is_3d ? q.size(2) : 0;
  const bool size = head_dim == 64 || head_dim == 128 || (takes_256 && head_dim == 256);
  if (!is_3d || !dtype || !size) {
    fail(op, "q has shape ", shape_of(q), " and elements of ", q.element_size(),
         " bytes, expected [num_tokens, num_heads, 64", takes_256 ? ", 128 or 256" : " or 128",
         "] of bfloat16 or float16");
  }
  if (q.stride(2) != 1 || q.stride(1) != q.size(2) || (q.size(0) > 1 && q.stride(0) % 8 != 0)) {
    fail(op, "q ", shape_of(q), " has strides [", q.stride(0), ", ", q.stride(1), ", ", q.stride(2),
         "], expected heads without gaps, tokens a multiple of 8 elements apart");
  }
  check_aligned(op, q, "q");
}

inline void check_devices(const char* op, const Tensor& q, const Tensor& kv_cache,
                          const Tensor& block_table, const Tensor& seq_lens,
                          const Tensor& query_start_loc, const Tensor& out) {
  if (!q.is_cuda()) fail(op, "q is not on a CUDA device");
  check_device(op, kv_cache, "kv_cache", q);
  check_device(op, block_table, "block_table", q);
  check_device(op, seq_lens, "seq_lens", q);
  check_device(op, query_start_loc, "query_start_loc", q);
  check_device(op, out, "out", q);
}

// With `takes_fp8` the cache may be of float8_e4m3fn too, besides q's dtype.
inline void check_cache(const char* op, const Tensor& kv_cache, const Tensor& q, bool takes_fp8,
                        int64_t max_group) {
  const int64_t head_dim = q.size(2);
  const bool dtype = kv_cache.scalar_type() == q.scalar_type() ||
                     (takes_fp8 && kv_cache.scalar_type() == ScalarType::Float8_e4m3fn);
  if (kv_cache.dim() != 5 || kv_cache.size(1) != 2 || kv_cache.size(4) != head_dim || !dtype ||
      !kv_cache.is_contiguous()) {
    fail(op, "kv_cache has shape ", shape_of(kv_cache), " and elements of ",
         kv_cache.element_size(),
         " bytes, expected a contiguous [num_blocks, 2, block_size, num_kv_heads, ", head_dim,
         "] of q's dtype", takes_fp8 ? " or float8_e4m3fn" : "");
  }
  const int64_t block_size = kv_cache.size(2), kv_heads = kv_cache.size(3);
  if (block_size < 8 || block_size > 256 || (block_size & (block_size - 1)) != 0) {
    fail(op, "block_size of kv_cache ", shape_of(kv_cache), " is ", block_size,
         ", expected a power of two from 8 to 256");
  }
  if (kv_heads < 1 || q.size(1) % kv_heads != 0 || q.size(1) / kv_heads > max_group) {
    fail(op, "q ", shape_of(q), " and kv_cache ", shape_of(kv_cache), ": ", q.size(1),
         " heads share ", kv_heads, " KV heads, expected 1 to ", max_group, " each");
  }
  check_aligned(op, kv_cache, "kv_cache");
}

inline void check_integers(const char* op, const Tensor& t, const char* name, int64_t size) {
  if (t.dim() != 1 || t.size(0) != size || t.scalar_type() != ScalarType::Int ||
      !t.is_contiguous()) {
    fail(op, name, " has shape ", shape_of(t), ", expected a contiguous [", size, "] of int32");
  }
}

inline void check_batch(const char* op, const Tensor& block_table, const Tensor& seq_lens,
                        const Tensor& query_start_loc) {
  if (seq_lens.dim() != 1) {
    fail(op, "seq_lens has shape ", shape_of(seq_lens), ", expected [num_seqs]");
  }
  const int64_t num_seqs = seq_lens.size(0);
  if (block_table.dim() != 2 || block_table.size(0) != num_seqs || block_table.size(1) < 1 ||
      block_table.scalar_type() != ScalarType::Int ||
      (block_table.size(1) > 1 && block_table.stride(1) != 1)) {
    fail(op, "block_table has shape ", shape_of(block_table), ", expected [", num_seqs,
         ", 1 or more] of int32 without gaps in rows: seq_lens is ", shape_of(seq_lens));
  }
  check_integers(op, seq_lens, "seq_lens", num_seqs);
  check_integers(op, query_start_loc, "query_start_loc", num_seqs + 1);
}

inline void check_floats(const char* op, const Tensor& t, const char* name, int64_t rows,
                         int64_t cols) {
  if (t.dim() != 2 || t.size(0) != rows || t.size(1) != cols ||
      t.scalar_type() != ScalarType::Float || !t.is_contiguous()) {
    fail(op, name, " has shape ", shape_of(t), ", expected a contiguous [", rows, ", ", cols,
         "] of float32");
  }
}

// Scales of K and V of each head are those of an FP8 cache.
inline void check_kv_scale(const char* op, const Tensor& kv_scale, const Tensor& kv_cache,
                           const Tensor& q) {
  check_device(op, kv_scale, "kv_scale", q);
  check_floats(op, kv_scale, "kv_scale", 2, kv_cache.size(3));
  if (kv_cache.scalar_type() != ScalarType::Float8_e4m3fn) {
    fail(op, "kv_scale is given, but kv_cache ", shape_of(kv_cache), " is not float8_e4m3fn");
  }
}

// The result is FP8 with an out_scale, else of q's dtype.
inline void check_out(const char* op, const Tensor& out, const Tensor& q, const Tensor* out_scale) {
  if (out_scale) {
    check_device(op, *out_scale, "out_scale", q);
    check_floats(op, *out_scale, "out_scale", 1, 1);
  }
  const ScalarType expected = out_scale ? ScalarType::Float8_e4m3fn : q.scalar_type();
  if (out.dim() != 3 || out.size(0) != q.size(0) || out.size(1) != q.size(1) ||
      out.size(2) != q.size(2) || out.scalar_type() != expected || !out.is_contiguous()) {
    fail(op, "out has shape ", shape_of(out), " and elements of ", out.element_size(),
         " bytes, expected it contiguous, shaped as q ", shape_of(q), ", of ",
         out_scale ? "float8_e4m3fn, as there is an out_scale" : "q's dtype");
  }
}

// One logit of each head, in q's type or float32.
inline void check_sinks(const char* op, const Tensor& sinks, const Tensor& q) {
  check_device(op, sinks, "sinks", q);
  const bool dtype =
      sinks.scalar_type() == q.scalar_type() || sinks.scalar_type() == ScalarType::Float;
  if (sinks.dim() != 1 || sinks.size(0) != q.size(1) || !dtype || !sinks.is_contiguous()) {
    fail(op, "sinks has shape ", shape_of(sinks), " and elements of ", sinks.element_size(),
         " bytes, expected a contiguous [", q.size(1), "] of float32 or q's dtype");
  }
}

inline void check_numbers(const char* op, double scale, int64_t sliding_window, double soft_cap) {
  if (!(scale > 0) || sliding_window < 0 || sliding_window >= int64_t{1} << 31 || soft_cap < 0) {
    fail(op, "scale ", scale, ", sliding_window ", sliding_window, ", soft_cap ", soft_cap,
         ", expected a positive scale, the others 0 or positive, sliding_window below 2^31");
  }
}

}  // namespace fusewright::attention
