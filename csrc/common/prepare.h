// What is set up once a device and kernel before its first launch.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace fusewright {

// Runs `prepare` once a device for each type `Kernel`.
template <typename Kernel, typename Prepare>
cudaError_t prepare_once(const Prepare& prepare) {
  static std::atomic<uint64_t> done{0};
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (done.load() & bit) return cudaSuccess;
  const cudaError_t error = prepare();
  if (error == cudaSuccess) done.fetch_or(bit);
  return error;
}

template <auto kKernel>
struct Identity {};

// Shared memory beyond 48 KB; and all of it, not what one block needs: two kernels' blocks are to
// share a multiprocessor.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes) {
  return prepare_once<Identity<kKernel>>([&] {
    const cudaError_t error =
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
  });
}

}  // namespace fusewright
