// The persistent GEMM of bfloat16.
#include "persistent_launch.cuh"

namespace fusewright::gemm {

cudaError_t launch_persistent_linear(const SkinnyLinearArgs& args, Operands operands,
                                     bool programmatic, cudaStream_t stream) {
  if (operands == Operands::kFp8) return launch_persistent_fp8(args, programmatic, stream);
  if (operands != Operands::kBf16) return cudaErrorInvalidValue;
  return run_persistent_widths<Operands::kBf16>(args, programmatic, stream);
}

}  // namespace fusewright::gemm
