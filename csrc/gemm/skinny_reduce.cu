// The kernels of the streaming GEMMs whose results are summed over ranks.
#include "skinny_launch.cuh"

namespace fusewright::gemm {

cudaError_t launch_skinny_reduce(const SkinnyLinearArgs& args, const collective::Peers& peers,
                                 bool programmatic, cudaStream_t stream) {
  return launch_tokens<Bf16, kMaxNormedTokens>(args, peers, programmatic, stream);
}

}  // namespace fusewright::gemm
