// Launches of the grouped GEMM by weights of four bits: the first layer gathers rows of x and
// leaves them in the order of places, in which the second reads them.
#include "grouped_launch.cuh"

namespace fusewright::moe {
namespace {

template <typename Numbers>
cudaError_t run_numbers(const GroupedArgs& args, bool programmatic, cudaStream_t stream) {
  if (args.gated) {
    using T = GroupedTile<Scales::kNone, true, true, true, Numbers>;
    return run_grouped<T>(args, programmatic, stream);
  }
  using T = GroupedTile<Scales::kNone, false, false, true, Numbers>;
  return run_grouped<T>(args, programmatic, stream);
}

}  // namespace

cudaError_t launch_packed_grouped(const GroupedArgs& args, bool floats, bool programmatic,
                                  cudaStream_t stream) {
  return floats ? run_numbers<gemm::FloatNibbles>(args, programmatic, stream)
                : run_numbers<gemm::UnsignedNibbles>(args, programmatic, stream);
}

}  // namespace fusewright::moe
