// Launches of the experts' layers by weights of four bits: shared memory and the grid.
#include <algorithm>

#include "../common/prepare.h"
#include "../gemm/skinny_launch.cuh"
#include "packed.cuh"
#include "sum.cuh"

namespace fusewright::moe {
namespace {

using Int4 = gemm::Packed<gemm::UnsignedNibbles, gemm::ScaleType::kHalf, 32, false>;
using MxFp4 = gemm::Packed<gemm::FloatNibbles, gemm::ScaleType::kE8M0, 32, false>;

// Of dynamic memory: blocks share a multiprocessor's, less what each has besides.
template <typename T>
constexpr int kMostBytes = (T::kBlocks == 1 ? 227 : 113) * 1024 - kFixedBytes;

template <typename T>
cudaError_t run(const PackedArgs& args, int most_splits, bool programmatic, cudaStream_t stream) {
  const int steps = (args.in_features + kStepColumns - 1) / kStepColumns;
  int splits = most_splits;
  while (splits > steps) splits /= 2;
  const PackedLayout empty(args, T::Format::kScaleBytes, T::kStages, splits, 0);
  const int capacity =
      std::min(args.num_slots, (kMostBytes<T> - empty.bytes(T::kWarps)) / empty.pitch);
  const int tokens = args.num_slots / args.top_k;
  if (capacity < std::min(tokens, T::kMostRows)) return cudaErrorInvalidConfiguration;
  const PackedLayout layout(args, T::Format::kScaleBytes, T::kStages, splits, capacity);
  constexpr auto kKernel = packed_kernel<T>;
  if (const cudaError_t error = allow_shared_memory<kKernel>(kMostBytes<T>); error != cudaSuccess) {
    return error;
  }
  const gemm::LaunchConfig config(gemm::kMultiprocessors * T::kBlocks, T::kThreads,
                                  layout.bytes(T::kWarps), 1, programmatic, stream);
  return cudaLaunchKernelEx(&config.config, kKernel, args, capacity, splits);
}

PackedPlan measured_plan(const PackedArgs& args) {
  constexpr int kMostRowsOfOne = 4;  // of an expert, on average
  if (args.order && args.num_slots > kMostRowsOfOne * args.num_experts) return {2, 1, 1};
  // For one or two tokens there are fewer tiles of the second layer than warps.
  return {1, args.num_slots <= 2 * args.top_k && !args.gated ? 2 : 1, 1};
}

template <typename Format>
cudaError_t run_format(const PackedArgs& args, const PackedPlan& plan, bool programmatic,
                       cudaStream_t stream) {
  const auto with = [&](auto tile) {
    return run<decltype(tile)>(args, plan.splits, programmatic, stream);
  };
  if (plan.eights == 2) return with(PackedTile<Format, 2, 16, 4, 1>{});
  return plan.blocks == 2 ? with(PackedTile<Format, 1, 8, 6, 2>{})
                          : with(PackedTile<Format, 1, 16, 6, 1>{});
}

}  // namespace

cudaError_t launch_packed(const PackedArgs& args, PackedFormat format, const PackedPlan& forced,
                          bool programmatic, cudaStream_t stream) {
  const PackedPlan plan = forced.eights ? forced : measured_plan(args);
  return format == PackedFormat::kMxFp4 ? run_format<MxFp4>(args, plan, programmatic, stream)
                                        : run_format<Int4>(args, plan, programmatic, stream);
}

cudaError_t launch_sum(const SumArgs& args, bool programmatic, cudaStream_t stream) {
  const int blocks = (args.num_tokens * (args.hidden / 8) + kSumThreads - 1) / kSumThreads;
  const gemm::LaunchConfig config(blocks, kSumThreads, 0, 1, programmatic, stream);
  return cudaLaunchKernelEx(&config.config, sum_kernel, args);
}

}  // namespace fusewright::moe
