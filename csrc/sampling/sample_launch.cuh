// The launch of a sampling step: how many blocks a row, and their shared memory.
#pragma once

#include "../common/prepare.h"
#include "sample.cuh"

namespace fusewright::sampling {

constexpr int kStaticBytes = 1024;
static_assert(sizeof(BlockState) <= kStaticBytes);
constexpr int kMaxSharedBytes = 232448 - kStaticBytes;  // of a block of sm_90, dynamic
// Clusters of 8 and of 4 do not fill the multiprocessors: 96 of 132 always run at once.
constexpr int kBlocksAtOnce = 96;

constexpr int shared_bytes(int blocks) {
  return kCounters * 4 + 2 * blocks * kBins * static_cast<int>(sizeof(Sum));
}

// Keys that a block can hold.
template <typename F>
constexpr int max_slice(int blocks) {
  return (kMaxSharedBytes - shared_bytes(blocks)) / 16 * 16 / sizeof(typename F::Raw);
}

template <typename F>
constexpr int kMaxVocab = max_slice<F>(kMostBlocks) * kMostBlocks;

// As many blocks a row as all run at once, else as few as hold it, at least the two of a cluster.
// No result depends on it.
template <typename F>
int blocks_for(const SampleArgs& args) {
  int blocks = kMostBlocks;
  while (blocks > 2 && args.num_rows * blocks > kBlocksAtOnce &&
         args.vocab <= max_slice<F>(blocks / 2) * (blocks / 2)) {
    blocks /= 2;
  }
  return blocks;
}

// All of args but the slice must be set.
template <typename F>
cudaError_t launch_sample(SampleArgs args, cudaStream_t stream) {
  constexpr int kUnit = 16 / sizeof(typename F::Raw);
  const cudaError_t error = prepare_once<Identity<sample_kernel<F>>>([] {  // for more than 48 KB
    return cudaFuncSetAttribute(sample_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                kMaxSharedBytes);
  });
  if (error != cudaSuccess) return error;
  const int blocks = blocks_for<F>(args);
  args.slice = (args.vocab + blocks * kUnit - 1) / (blocks * kUnit) * kUnit;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = blocks;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(args.num_rows * blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes(blocks) + args.slice * sizeof(typename F::Raw);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, sample_kernel<F>, args);
}

}  // namespace fusewright::sampling
