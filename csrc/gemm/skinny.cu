// The kernels of the streaming products for each type of operands.
#include "skinny_launch.cuh"

namespace fusewright::gemm {

cudaError_t launch_skinny_linear(const SkinnyLinearArgs& args, Operands operands,
                                 int32_t* token_ids, bool programmatic, cudaStream_t stream) {
  switch (operands) {
    case Operands::kBf16:
      return launch_skinny_linear<Bf16>(args, token_ids, programmatic, stream);
    case Operands::kFp8:
      return launch_skinny_linear<Fp8>(args, token_ids, programmatic, stream);
    default:
      return launch_skinny_linear<Fp8Blocks>(args, token_ids, programmatic, stream);
  }
}

}  // namespace fusewright::gemm
