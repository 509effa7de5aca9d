// The kernels of decode_attention for each type of q and of the cache, head_dim and size of a
// group.
#include "decode.cuh"

namespace fusewright::attention {

template <typename Q, typename Kv, typename Use>
cudaError_t with_tile(const DecodeArgs& args, const DecodeTypes& types, const Use& use) {
  const bool one = args.group <= 8;
  if (types.head_dim == 128) {
    return one ? use(Tile<Q, Kv, 128, 1>{}) : use(Tile<Q, Kv, 128, 2>{});
  }
  return one ? use(Tile<Q, Kv, 64, 1>{}) : use(Tile<Q, Kv, 64, 2>{});
}

template <typename Q, typename Use>
cudaError_t with_cache(const DecodeArgs& args, const DecodeTypes& types, const Use& use) {
  return types.fp8_cache ? with_tile<Q, __nv_fp8_e4m3>(args, types, use)
                         : with_tile<Q, Q>(args, types, use);
}

template <typename Use>
cudaError_t with_types(const DecodeArgs& args, const DecodeTypes& types, const Use& use) {
  return types.bfloat16 ? with_cache<__nv_bfloat16>(args, types, use)
                        : with_cache<__half>(args, types, use);
}

cudaError_t plan_decode(const DecodeArgs& args, const DecodeTypes& types, DecodePlan& plan) {
  return with_types(args, types, [&](auto tile) {
    using T = decltype(tile);
    const Limits* limits = nullptr;
    if (const cudaError_t error = limits_of<T>(limits); error != cudaSuccess) return error;
    const int64_t max_tokens = static_cast<int64_t>(args.max_blocks) << args.log2_block_size;
    plan.grid = plan_grid<T>(*limits, args.num_seqs, args.kv_heads, max_tokens);
    plan.partial_float4s = partial_float4s<T>(plan.grid, args.kv_heads);
    return cudaSuccess;
  });
}

cudaError_t launch_decode(const DecodeArgs& args, const DecodeTypes& types, const DecodePlan& plan,
                          cudaStream_t stream) {
  return with_types(args, types, [&](auto tile) {
    return launch_decode<decltype(tile)>(args, plan.grid, stream);
  });
}

}  // namespace fusewright::attention
