// The kernels of prefill_attention for each element type, with and without a window or a soft cap.
#include "prefill.cuh"

namespace fusewright::attention {

template <typename E>
cudaError_t launch_of(const PrefillArgs& args, const PrefillShape& shape, cudaStream_t stream) {
  return args.window > 0 || args.soft_cap > 0
             ? launch_prefill<PrefillTile<E, true>>(args, shape, stream)
             : launch_prefill<PrefillTile<E, false>>(args, shape, stream);
}

cudaError_t launch_prefill(const PrefillArgs& args, const PrefillShape& shape, Element element,
                           cudaStream_t stream) {
  return element == Element::kBFloat16 ? launch_of<__nv_bfloat16>(args, shape, stream)
                                       : launch_of<__half>(args, shape, stream);
}

}  // namespace fusewright::attention
