#include "tiles.cuh"

namespace fusewright::attention {

template cudaError_t plan_tiles<__half, __nv_fp8_e4m3>(const DecodeArgs&, int, DecodePlan&);
template cudaError_t launch_tiles<__half, __nv_fp8_e4m3>(const DecodeArgs&, int, const DecodePlan&,
                                                         cudaStream_t);

}  // namespace fusewright::attention
