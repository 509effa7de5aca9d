// Launches of the mixture-of-experts kernels: tensor maps, shared memory, the grid.
#include <algorithm>

#include "../common/prepare.h"
#include "../gemm/skinny_launch.cuh"
#include "down.cuh"
#include "gate_up.cuh"
#include "route.cuh"

namespace fusewright::moe {
namespace {

template <bool kWide>
cudaError_t run_route(const RouteArgs& args, int block_experts, int cluster, bool programmatic,
                      cudaStream_t stream) {
  constexpr auto kKernel = route_kernel<kWide>;
  const cudaError_t error = prepare_once<Identity<kKernel>>([&] {
    return cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  });
  if (error != cudaSuccess) return error;
  const int clusters = (args.num_tokens + kMaxTokens - 1) / kMaxTokens;
  const int warps = kRouteWarps + (args.squares ? kNormWarps : 0);
  const gemm::LaunchConfig config(clusters * cluster, warps * kWarpSize, 0, cluster, programmatic,
                                  stream);
  int log2_sharers = 0;  // threads of a warp that compare one expert with the others
  while (log2_sharers < 5 && (2 << log2_sharers) * args.num_experts <= warps * kWarpSize) {
    ++log2_sharers;
  }
  return cudaLaunchKernelEx(&config.config, kKernel, args, block_experts, cluster, log2_sharers);
}

struct Maps {
  CUtensorMap weight, x;
};

// The weight is [experts, matrices of an expert, rows, lines, line], of which the first two are
// one: a box has the same rows of both matrices of gate_up.
template <typename T>
cudaError_t describe(Maps* maps, const ExpertsArgs& args, int64_t x_rows) {
  using Weight = typename T::Operands::Weight;
  constexpr cuuint32_t kLine = gemm::kLineBytes / Weight::kBytes;
  constexpr cuuint32_t kMatrices = T::kRows / kTileRows;
  const auto columns = static_cast<cuuint64_t>(args.in_features);
  const auto rows = static_cast<cuuint64_t>(args.out_features);
  const cudaError_t error = gemm::describe_lines<Weight, 4>(
      &maps->weight, args.weight,
      {kLine, columns / kLine, rows, static_cast<cuuint64_t>(args.num_experts) * kMatrices},
      {gemm::kLineBytes, columns * Weight::kBytes, rows * columns * Weight::kBytes},
      {kLine, T::kLines, kTileRows, kMatrices});
  if (error != cudaSuccess) return error;
  return gemm::describe_matrix<gemm::Bf16>(&maps->x, args.x, x_rows, args.in_features,
                                           args.x_row_stride, 1, T::kXLines);
}

template <typename T, template <typename> typename S>
constexpr int kSharedBytes = T::kRingBytes + static_cast<int>(sizeof(S<T>));

// Blocks of gate_up a multiprocessor, and the ring of each: what keeps memory busy, and no more, so
// that down's blocks start beside them. One block a multiprocessor takes more than half of its
// memory, and leaves what down's two take: where two fit, two share one while another has none.
struct GateUpPlan {
  int blocks, lines, stages, bytes;  // bytes: 0 for what is needed
};
constexpr GateUpPlan kFewTokens = {1, 8, 6, 114 * 1024}, kManyTokens = {3, 4, 4, 0};

template <typename W, int kXRows>
cudaError_t run_gate_up(const ExpertsArgs& args, bool programmatic, cudaStream_t stream) {
  constexpr GateUpPlan kPlan = kXRows <= 2 ? kFewTokens : kManyTokens;
  using One = Tile<W, 2 * kTileRows, kXRows, kPlan.lines, 1>;
  constexpr int kRoom = kPlan.bytes - static_cast<int>(sizeof(GateUpShared<One>));
  constexpr int kFit = kPlan.bytes ? kRoom / One::kRingBytes : kPlan.stages;
  using T = Tile<W, 2 * kTileRows, kXRows, kPlan.lines, std::min(kPlan.stages, kFit)>;
  Maps maps;
  cudaError_t error = describe<T>(&maps, args, args.num_tokens);
  if (error != cudaSuccess) return error;
  constexpr int kBytes = std::max(kSharedBytes<T, GateUpShared>, kPlan.bytes);
  error = allow_shared_memory<gate_up_kernel<T>>(kBytes);
  if (error != cudaSuccess) return error;
  const int most_chosen = std::min(args.num_tokens * args.top_k, args.num_experts);
  // This many blocks get equal numbers of tiles, if all chosen experts differ.
  const int tiles = args.out_features / kTileRows * most_chosen;
  const int most_blocks = gemm::kMultiprocessors * kPlan.blocks;
  const int tiles_each = (tiles + most_blocks - 1) / most_blocks;
  const int blocks = (tiles + tiles_each - 1) / tiles_each;
  const gemm::LaunchConfig config(blocks, kGateUpThreads<T>, kBytes, 1, programmatic, stream);
  return cudaLaunchKernelEx(&config.config, gate_up_kernel<T>, maps.weight, maps.x, args);
}

// Two blocks of down share a multiprocessor; for few tokens, both start beside gate_up's one.
template <typename W, int kXRows, int kLines>
cudaError_t run_down(const ExpertsArgs& args, bool programmatic, cudaStream_t stream) {
  constexpr int kMaxBytes = (kXRows <= 2 ? 55 : 111) * 1024;
  using One = Tile<W, kTileRows, kXRows, kLines, 1>;  // what lies beside a ring is the same for all
  constexpr int kStages = (kMaxBytes - static_cast<int>(sizeof(DownShared<One>))) / One::kRingBytes;
  using T = Tile<W, kTileRows, kXRows, kLines, kStages>;
  Maps maps;
  cudaError_t error = describe<T>(&maps, args, static_cast<int64_t>(args.num_tokens) * args.top_k);
  if (error != cudaSuccess) return error;
  constexpr int kBytes = kSharedBytes<T, DownShared>;
  error = allow_shared_memory<down_kernel<T>>(kBytes);
  if (error != cudaSuccess) return error;
  const gemm::LaunchConfig config(args.out_features / kTileRows, kDownThreads<T>, kBytes, 1,
                                  programmatic, stream);
  return cudaLaunchKernelEx(&config.config, down_kernel<T>, maps.weight, maps.x, args);
}

// Calls use<weights, rows of x>().
template <typename Use>
cudaError_t with_weights(const ExpertsArgs& args, Operands operands, const Use& use) {
  const auto with = [&]<typename W>() {
    if (args.num_tokens == 1) return use.template operator()<W, 1>();
    return args.num_tokens == 2 ? use.template operator()<W, 2>() : use.template operator()<W, 8>();
  };
  switch (operands) {
    case Operands::kBf16:
      return with.template operator()<Bf16>();
    case Operands::kFp8Rows:
      return with.template operator()<Fp8Rows>();
    default:
      return with.template operator()<Fp8Blocks>();
  }
}

}  // namespace

cudaError_t launch_route(const RouteArgs& args, bool programmatic, cudaStream_t stream) {
  constexpr int kCluster = 16;  // not portable, but every H100 and H200 runs it
  const int cluster = args.num_experts <= kCluster / 2 * 8 ? kCluster / 2 : kCluster;
  const int block_experts = (args.num_experts + cluster - 1) / cluster;
  const auto run = block_experts > 8 ? run_route<true> : run_route<false>;
  return run(args, block_experts, cluster, programmatic, stream);
}

cudaError_t launch_gate_up(const ExpertsArgs& args, Operands operands, bool programmatic,
                           cudaStream_t stream) {
  return with_weights(args, operands, [&]<typename W, int kXRows>() {
    return run_gate_up<W, kXRows>(args, programmatic, stream);
  });
}

cudaError_t launch_down(const ExpertsArgs& args, Operands operands, bool programmatic,
                        cudaStream_t stream) {
  return with_weights(args, operands, [&]<typename W, int kXRows>() {
    // A step has as many lines as a row fills better; the longer of two equals is chosen.
    constexpr int kOther = W::Weight::kBytes == 1 ? 6 : 12;
    const auto filled = [&](int step) {
      const int lines = args.in_features * W::Weight::kBytes / gemm::kLineBytes;
      return (lines + step - 1) / step * step;
    };
    const bool better = filled(kOther) < filled(8) + (kOther > 8);
    return better ? run_down<W, kXRows, kOther>(args, programmatic, stream)
                  : run_down<W, kXRows, 8>(args, programmatic, stream);
  });
}

}  // namespace fusewright::moe
