// Chooses the kernels of decode_attention by the types of q and of the cache.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "decode.h"

namespace fusewright::attention {

// decode/tiles.cuh
template <typename Q, typename Kv>
cudaError_t plan_tiles(const DecodeArgs& args, int head_dim, DecodePlan& plan);
template <typename Q, typename Kv>
cudaError_t launch_tiles(const DecodeArgs& args, int head_dim, const DecodePlan& plan,
                         cudaStream_t stream);

cudaError_t plan_decode(const DecodeArgs& args, const DecodeTypes& types, DecodePlan& plan) {
  const int dim = types.head_dim;
  if (types.bfloat16) {
    return types.fp8_cache ? plan_tiles<__nv_bfloat16, __nv_fp8_e4m3>(args, dim, plan)
                           : plan_tiles<__nv_bfloat16, __nv_bfloat16>(args, dim, plan);
  }
  return types.fp8_cache ? plan_tiles<__half, __nv_fp8_e4m3>(args, dim, plan)
                         : plan_tiles<__half, __half>(args, dim, plan);
}

cudaError_t launch_decode(const DecodeArgs& args, const DecodeTypes& types, const DecodePlan& plan,
                          cudaStream_t stream) {
  const int dim = types.head_dim;
  if (types.bfloat16) {
    return types.fp8_cache ? launch_tiles<__nv_bfloat16, __nv_fp8_e4m3>(args, dim, plan, stream)
                           : launch_tiles<__nv_bfloat16, __nv_bfloat16>(args, dim, plan, stream);
  }
  return types.fp8_cache ? launch_tiles<__half, __nv_fp8_e4m3>(args, dim, plan, stream)
                         : launch_tiles<__half, __half>(args, dim, plan, stream);
}

}  // namespace fusewright::attention
