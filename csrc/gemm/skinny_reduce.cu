// The kernels of the streaming GEMMs whose results are summed over ranks.
#include "skinny_launch.cuh"

namespace fusewright::gemm {

cudaError_t launch_skinny_reduce(const SkinnyLinearArgs& args, Operands operands,
                                 const collective::Peers& peers, bool programmatic,
                                 cudaStream_t stream) {
  switch (operands) {
    case Operands::kBf16:
      return launch_tokens<Bf16, kMaxNormedTokens>(args, peers, programmatic, stream);
    case Operands::kFp8ByBf16:
      return launch_tokens<Fp8ByBf16, kMaxWideTokens>(args, peers, programmatic, stream);
    case Operands::kFp8BlocksByBf16:
      return launch_tokens<Fp8BlocksByBf16, kMaxWideTokens>(args, peers, programmatic, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace fusewright::gemm
