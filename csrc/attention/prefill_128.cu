// The kernels of prefill_attention for a head_dim of 128.
#include "prefill.cuh"

namespace fusewright::attention {

template cudaError_t launch_prefill<128>(PrefillArgs, const PrefillShape&, Element, bool,
                                         cudaStream_t);

}  // namespace fusewright::attention
