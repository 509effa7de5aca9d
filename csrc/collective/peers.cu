// Launches of the collectives over peer memory.
#include <algorithm>
#include <type_traits>

#include "../gemm/skinny_launch.cuh"
#include "sum.cuh"

namespace fusewright::collective {
namespace {

constexpr int kBlocks = 2 * gemm::kMultiprocessors;
constexpr int kGatherThreads = 512, kGatherPackets = 4;

template <typename T, int kWorld>
cudaError_t run_sum_parts(const SumArgs& args, bool programmatic, cudaStream_t stream) {
  constexpr int kBlocksEach = 4;
  const int rounded = (args.row_packets + kWarpSize - 1) / kWarpSize * kWarpSize;
  const bool twice = rounded > kMaxThreads;
  const int blocks = std::min(args.rows, kBlocksEach * gemm::kMultiprocessors);
  const gemm::LaunchConfig config(blocks, twice ? kMaxThreads : rounded, 0, 1, programmatic,
                                  stream);
  const auto kernel = twice ? sum_parts_kernel<T, kWorld, 2> : sum_parts_kernel<T, kWorld, 1>;
  return cudaLaunchKernelEx(&config.config, kernel, args);
}

template <typename T, int kWorld, bool kNorm, bool kTwoShots>
cudaError_t run_sum(const SumArgs& args, bool programmatic, cudaStream_t stream) {
  const int rounded = (args.row_packets + kWarpSize - 1) / kWarpSize * kWarpSize;
  const bool twice = rounded > kMaxThreads;
  const int threads = twice ? kMaxThreads : rounded;
  const gemm::LaunchConfig config(std::min(args.rows, kBlocks), threads, 0, 1, programmatic,
                                  stream);
  const auto kernel = twice ? sum_kernel<T, kWorld, 2, kNorm, kTwoShots>
                            : sum_kernel<T, kWorld, 1, kNorm, kTwoShots>;
  return cudaLaunchKernelEx(&config.config, kernel, args);
}

// Whether sum_row_kernel serves.
bool has_row_a_block(const SumArgs& args) {
  return args.weight != nullptr && args.residual != nullptr && !args.has_offset &&
         args.quantize == Quantize::kNone && !args.two_shots && args.rows <= kBlocks &&
         args.row_packets % kWarpSize == 0 && args.row_packets <= kMaxThreads;
}

template <int kWorld, typename T, bool kNorm>
cudaError_t run_sum(const SumArgs& args, bool programmatic, cudaStream_t stream) {
  if (has_row_a_block(args)) {
    const gemm::LaunchConfig config(args.rows, args.row_packets, 0, 1, programmatic, stream);
    return cudaLaunchKernelEx(&config.config, sum_row_kernel<T, kWorld>, args);
  }
  return args.two_shots ? run_sum<T, kWorld, kNorm, true>(args, programmatic, stream)
                        : run_sum<T, kWorld, kNorm, false>(args, programmatic, stream);
}

template <int kWorld>
cudaError_t run_sum(const SumArgs& args, bool programmatic, cudaStream_t stream) {
  const bool norm = args.weight != nullptr;
  if (args.element == Element::kHalf) {
    return norm ? run_sum<kWorld, __half, true>(args, programmatic, stream)
                : run_sum<kWorld, __half, false>(args, programmatic, stream);
  }
  return norm ? run_sum<kWorld, __nv_bfloat16, true>(args, programmatic, stream)
              : run_sum<kWorld, __nv_bfloat16, false>(args, programmatic, stream);
}

template <int kWorld>
__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(const __grid_constant__ GatherArgs a) {
  start_next();
  wait_for_previous();
  const Exchange<kWorld> exchange(a.peers, epoch_of(a.peers));
  constexpr int kChunk = kGatherThreads * kGatherPackets;
  for (int64_t first = int64_t{blockIdx.x} * kChunk; first < a.num_packets;
       first += int64_t{gridDim.x} * kChunk) {
    uint4 own[kGatherPackets];
#pragma unroll
    for (int i = 0; i < kGatherPackets; ++i) {
      const int64_t packet = first + threadIdx.x + i * kGatherThreads;
      if (packet >= a.num_packets) break;
      own[i] = sendable(a.x[packet]);
      exchange.push(packet, own[i]);
    }
#pragma unroll
    for (int i = 0; i < kGatherPackets; ++i) {
      const int64_t packet = first + threadIdx.x + i * kGatherThreads;
      if (packet >= a.num_packets) break;
      uint4 found[kWorld];
      exchange.pull(packet, own[i], found);
      const int64_t row = packet / a.row_packets, column = packet % a.row_packets;
#pragma unroll
      for (int source = 0; source < kWorld; ++source) {
        a.y[(row * kWorld + source) * a.row_packets + column] = found[source];
      }
    }
  }
  exchange.count_block();
}

template <int kWorld>
cudaError_t run_gather(const GatherArgs& args, bool programmatic, cudaStream_t stream) {
  constexpr int kChunk = kGatherThreads * kGatherPackets;
  const int64_t chunks = (args.num_packets + kChunk - 1) / kChunk;
  const int blocks = static_cast<int>(std::min<int64_t>(chunks, kBlocks));
  const gemm::LaunchConfig config(blocks, kGatherThreads, 0, 1, programmatic, stream);
  return cudaLaunchKernelEx(&config.config, gather_kernel<kWorld>, args);
}

__global__ void clear_kernel(uint4* inbox, int64_t packets) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < packets; i += stride) {
    inbox[i] = unwritten();
  }
}

// The stores before are those of earlier kernels of the stream.
__global__ void post_kernel(const __grid_constant__ Peers peers, int to) {
  const unsigned count = peers.posted[to] + 1;
  peers.posted[to] = count;
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(peers.arrived[to] + peers.rank),
               "r"(count)
               : "memory");
}

__global__ void wait_kernel(const __grid_constant__ Peers peers, int source) {
  const unsigned count = peers.taken[source] + 1;
  peers.taken[source] = count;
  const unsigned* const from = peers.arrived[peers.rank] + source;
  unsigned found = 0;
  for (int polls = 1;; ++polls) {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(from) : "memory");
    if (static_cast<int>(found - count) >= 0) break;
    if (polls % kPollsAnAbortCheck == 0 && *peers.aborted) break;
  }
}

// The kernels are compiled for these numbers of ranks.
template <typename Run>
cudaError_t for_world(int world, const Run& run) {
  switch (world) {
    case 2:
      return run(std::integral_constant<int, 2>{});
    case 4:
      return run(std::integral_constant<int, 4>{});
    case 8:
      return run(std::integral_constant<int, 8>{});
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_sum(const SumArgs& args, bool programmatic, cudaStream_t stream) {
  return for_world(args.peers.world, [&](auto world) {
    return run_sum<decltype(world)::value>(args, programmatic, stream);
  });
}

cudaError_t launch_gather(const GatherArgs& args, bool programmatic, cudaStream_t stream) {
  return for_world(args.peers.world, [&](auto world) {
    return run_gather<decltype(world)::value>(args, programmatic, stream);
  });
}

cudaError_t launch_sum_parts(const SumArgs& args, bool programmatic, cudaStream_t stream) {
  return for_world(args.peers.world, [&](auto world) {
    constexpr int kWorld = decltype(world)::value;
    return args.element == Element::kHalf
               ? run_sum_parts<__half, kWorld>(args, programmatic, stream)
               : run_sum_parts<__nv_bfloat16, kWorld>(args, programmatic, stream);
  });
}

cudaError_t launch_post(const Peers& peers, int to, cudaStream_t stream) {
  post_kernel<<<1, 1, 0, stream>>>(peers, to);
  return cudaGetLastError();
}

cudaError_t launch_wait(const Peers& peers, int source, cudaStream_t stream) {
  wait_kernel<<<1, 1, 0, stream>>>(peers, source);
  return cudaGetLastError();
}

cudaError_t launch_clear(uint4* inbox, int64_t packets, cudaStream_t stream) {
  clear_kernel<<<gemm::kMultiprocessors, 256, 0, stream>>>(inbox, packets);
  return cudaGetLastError();
}

}  // namespace fusewright::collective
