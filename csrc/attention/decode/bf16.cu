#include "tiles.cuh"

namespace fusewright::attention {

template cudaError_t plan_tiles<__nv_bfloat16, __nv_bfloat16>(const DecodeArgs&, int, DecodePlan&);
template cudaError_t launch_tiles<__nv_bfloat16, __nv_bfloat16>(const DecodeArgs&, int,
                                                                const DecodePlan&, cudaStream_t);

}  // namespace fusewright::attention
