// The persistent GEMM of FP8.
#include "persistent_launch.cuh"

namespace fusewright::gemm {

cudaError_t launch_persistent_fp8(const SkinnyLinearArgs& args, bool programmatic,
                                  cudaStream_t stream) {
  return run_persistent_widths<Operands::kFp8>(args, programmatic, stream);
}

}  // namespace fusewright::gemm
