// Launches of the experts' layers by weights of four bits: shared memory, the grid, and the plan.
#include <algorithm>

#include "../common/prepare.h"
#include "../gemm/skinny_launch.cuh"
#include "packed.cuh"
#include "sum.cuh"

namespace fusewright::moe {
namespace {

using Int4 = gemm::Packed<gemm::UnsignedNibbles, gemm::ScaleType::kHalf, 32, false>;
using MxFp4 = gemm::Packed<gemm::FloatNibbles, gemm::ScaleType::kE8M0, 32, false>;

constexpr int kMostBytes = 227 * 1024 - kFixedBytes;  // of dynamic memory
constexpr int kMostRowsOfOne = 4;  // of an expert on average, which eight columns of MMAs hold best

template <typename T>
cudaError_t run(const PackedArgs& args, bool programmatic, cudaStream_t stream) {
  const PackedLayout empty(args, T::Format::kScaleBytes, T::kStages, 0);
  const int capacity =
      std::min(args.num_slots, (kMostBytes - empty.bytes(T::kWarps)) / empty.pitch);
  const int tokens = args.num_slots / args.top_k;
  if (capacity < std::min(tokens, T::kMostRows)) return cudaErrorInvalidConfiguration;
  // The second layer of one token has fewer tiles than there are warps.
  const int splits = tokens == 1 && !args.gated && empty.steps >= 2 * T::kStages ? 2 : 1;
  if (empty.steps < splits * T::kStages) return cudaErrorInvalidConfiguration;
  const PackedLayout layout(args, T::Format::kScaleBytes, T::kStages, capacity);
  constexpr auto kKernel = packed_kernel<T>;
  if (const cudaError_t error = allow_shared_memory<kKernel>(kMostBytes); error != cudaSuccess) {
    return error;
  }
  const gemm::LaunchConfig config(gemm::kMultiprocessors, T::kThreads, layout.bytes(T::kWarps), 1,
                                  programmatic, stream);
  return cudaLaunchKernelEx(&config.config, kKernel, args, capacity, splits);
}

template <typename Format>
cudaError_t run_format(const PackedArgs& args, bool programmatic, cudaStream_t stream) {
  if (args.order && args.num_slots > kMostRowsOfOne * args.num_experts) {
    return run<PackedTile<Format, 2, 4>>(args, programmatic, stream);
  }
  return run<PackedTile<Format, 1, 6>>(args, programmatic, stream);
}

}  // namespace

cudaError_t launch_packed(const PackedArgs& args, PackedFormat format, bool programmatic,
                          cudaStream_t stream) {
  return format == PackedFormat::kMxFp4 ? run_format<MxFp4>(args, programmatic, stream)
                                        : run_format<Int4>(args, programmatic, stream);
}

cudaError_t launch_sum(const SumArgs& args, bool programmatic, cudaStream_t stream) {
  const int blocks = (args.num_tokens * (args.hidden / 8) + kSumThreads - 1) / kSumThreads;
  const gemm::LaunchConfig config(blocks, kSumThreads, 0, 1, programmatic, stream);
  return cudaLaunchKernelEx(&config.config, sum_kernel, args);
}

}  // namespace fusewright::moe
