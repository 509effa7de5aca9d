// Launches of the GEMM for some tokens: tensor maps, shared memory, how many blocks share a tile.
#include <algorithm>

#include "cluster_linear.cuh"
#include "skinny_launch.cuh"

namespace fusewright::gemm {
namespace {

// How many clusters of so many blocks run at once, a block a multiprocessor, as an H200 says. It is
// a constant, so that results follow from shapes alone.
constexpr int kClustersAtOnce[] = {0, 0, 66, 39, 30, 22, 17, 15, 15};
static_assert(kMaxClusterFeatures == kClustersAtOnce[2] * kMostTileRows);

// Chooses the plan with the least bytes a block, of those with one round. Tokens come from L2, and
// count half. Blocks without a cluster cannot send, not even to themselves.
ClusterPlan plan_cluster(int out_features, int lines) {
  constexpr int kCountedTokens = kMaxClusterTokens / 2;
  ClusterPlan best = {};
  int least = 0;
  for (int splits = 2; splits <= std::min(kMostClusterSplits, lines); ++splits) {
    const int clusters = kClustersAtOnce[splits];
    const int units = (out_features + kUnitRows * clusters - 1) / (kUnitRows * clusters);
    if (units > kMostUnits) continue;
    const int cost = (units * kUnitRows + kCountedTokens) * ((lines + splits - 1) / splits);
    if (least == 0 || cost < least) {
      least = cost;
      best = {units * kUnitRows, splits, 0};
    }
  }
  return best;
}

template <Operands kOperands, int kTokens>
cudaError_t run(const SkinnyLinearArgs& args, bool programmatic, cudaStream_t stream) {
  using T = ClusterTile<kOperands, kTokens>;
  using Format = std::conditional_t<T::kFp8, Fp8, Bf16>;
  ClusterPlan plan = plan_cluster(args.out_features, args.in_features / T::kLine);
  const int lines = (args.in_features / T::kLine + plan.splits - 1) / plan.splits;
  const int inbox = (plan.rows / kUnitRows + plan.splits - 1) * T::kUnitBytes;
  const int stage = plan.rows * kLineBytes + T::kXBytes, fixed = kAtomBytes + inbox;
  plan.stages = std::min({lines, kMostStages, (T::kMostBytes - fixed) / stage});
  // MMAs read 64 rows a warpgroup, also of a last stage that has fewer.
  const int bytes = std::max(fixed + plan.stages * stage, kAtomBytes + (plan.stages - 1) * stage +
                                                              kComputeGroups * 64 * kLineBytes);
  CUtensorMap weight_map, x_map;
  cudaError_t error =
      describe_matrix<Format>(&weight_map, args.weight, args.out_features, args.in_features,
                              args.weight_row_stride, plan.rows, 1);
  if (error != cudaSuccess) return error;
  error = describe_matrix<Format>(&x_map, args.x, args.num_tokens, args.in_features,
                                  args.x_row_stride, kTokens, 1);
  if (error != cudaSuccess) return error;
  constexpr auto kKernel = cluster_linear_kernel<T>;
  error = allow_shared_memory<kKernel>(T::kMostBytes);
  if (error != cudaSuccess) return error;
  const int tiles = (args.out_features + plan.rows - 1) / plan.rows;
  const LaunchConfig config(tiles * plan.splits, kClusterThreads, bytes, plan.splits, programmatic,
                            stream);
  return cudaLaunchKernelEx(&config.config, kKernel, weight_map, x_map, args, plan);
}

template <Operands kOperands>
cudaError_t run_tokens(const SkinnyLinearArgs& args, bool programmatic, cudaStream_t stream) {
  if (args.num_tokens <= 16) return run<kOperands, 16>(args, programmatic, stream);
  if (args.num_tokens <= 32) return run<kOperands, 32>(args, programmatic, stream);
  if (args.num_tokens <= kMaxClusterTokens)
    return run<kOperands, kMaxClusterTokens>(args, programmatic, stream);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_cluster_linear(const SkinnyLinearArgs& args, Operands operands,
                                  bool programmatic, cudaStream_t stream) {
  switch (operands) {
    case Operands::kBf16:
      return run_tokens<Operands::kBf16>(args, programmatic, stream);
    case Operands::kFp8:
      return run_tokens<Operands::kFp8>(args, programmatic, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace fusewright::gemm
