// The kernels of the streaming GEMMs for each type of operands.
#include "skinny_launch.cuh"

namespace fusewright::gemm {

cudaError_t launch_skinny_linear(const SkinnyLinearArgs& args, Operands operands, bool programmatic,
                                 cudaStream_t stream) {
  switch (operands) {
    case Operands::kBf16:
      return launch_skinny_linear<Bf16>(args, programmatic, stream);
    case Operands::kFp8:
      return launch_skinny_linear<Fp8>(args, programmatic, stream);
    case Operands::kFp8ByBf16:
      return launch_skinny_linear<Fp8ByBf16>(args, programmatic, stream);
    default:
      return launch_skinny_linear<Fp8Blocks>(args, programmatic, stream);
  }
}

}  // namespace fusewright::gemm
