// Launches of the grouped GEMM of bfloat16 and FP8: the tile of a call.
#include "grouped_launch.cuh"

namespace fusewright::moe {
namespace {

// FP8 takes wide tiles when experts have at least this many rows on average
// (docs/decisions/many-tokens-use-a-grouped-gemm.md).
constexpr int kLeastWideRows = 64;

template <Scales kScales, bool kWide>
cudaError_t run_tile(const GroupedArgs& args, bool programmatic, cudaStream_t stream) {
  if (args.gated) {
    return args.x_sorted
               ? run_grouped<GroupedTile<kScales, false, true, kWide>>(args, programmatic, stream)
               : run_grouped<GroupedTile<kScales, true, true, kWide>>(args, programmatic, stream);
  }
  return args.x_sorted
             ? run_grouped<GroupedTile<kScales, false, false, kWide>>(args, programmatic, stream)
             : run_grouped<GroupedTile<kScales, true, false, kWide>>(args, programmatic, stream);
}

}  // namespace

cudaError_t launch_grouped(const GroupedArgs& args, bool programmatic, cudaStream_t stream) {
  const bool wide = args.num_slots >= int64_t{kLeastWideRows} * args.num_experts;
  switch (args.scales) {
    case Scales::kNone:
      return run_tile<Scales::kNone, true>(args, programmatic, stream);
    case Scales::kRows:
      return wide ? run_tile<Scales::kRows, true>(args, programmatic, stream)
                  : run_tile<Scales::kRows, false>(args, programmatic, stream);
    case Scales::kBlocks:
      return wide ? run_tile<Scales::kBlocks, true>(args, programmatic, stream)
                  : run_tile<Scales::kBlocks, false>(args, programmatic, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fusewright::moe
