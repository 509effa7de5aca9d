// The kernels of decode_attention for one type of q and one of the cache; a file each compiles
// them.
#pragma once

#include "../decode.cuh"

namespace fusewright::attention {

template <typename Q, typename Kv, typename Use>
cudaError_t with_tile(const DecodeArgs& args, int head_dim, const Use& use) {
  const bool one = args.group <= 8;
  if (head_dim == 128) return one ? use(Tile<Q, Kv, 128, 1>{}) : use(Tile<Q, Kv, 128, 2>{});
  return one ? use(Tile<Q, Kv, 64, 1>{}) : use(Tile<Q, Kv, 64, 2>{});
}

template <typename Q, typename Kv>
cudaError_t plan_tiles(const DecodeArgs& args, int head_dim, DecodePlan& plan) {
  return with_tile<Q, Kv>(args, head_dim, [&](auto tile) {
    using T = decltype(tile);
    const Limits* limits = nullptr;
    if (const cudaError_t error = limits_of<T>(limits); error != cudaSuccess) return error;
    const int64_t max_tokens = static_cast<int64_t>(args.max_blocks) << args.log2_block_size;
    plan.grid = plan_grid<T>(*limits, args.num_seqs, args.kv_heads, max_tokens);
    plan.partial_float4s = partial_float4s<T>(args, plan.grid);
    return cudaSuccess;
  });
}

template <typename Q, typename Kv>
cudaError_t launch_tiles(const DecodeArgs& args, int head_dim, const DecodePlan& plan,
                         cudaStream_t stream) {
  return with_tile<Q, Kv>(args, head_dim, [&](auto tile) {
    return launch_decode<decltype(tile)>(args, plan.grid, stream);
  });
}

}  // namespace fusewright::attention
