// Attention of many queries a sequence over a paged KV cache, for the tensor cores of sm_90a: the
// forward pass of FlashAttention-3 (Shah et al., 2024).
//
// Limit: matrix multiplication. What it takes to stay near that:
// - A block has 128 rows of q, queries of one sequence in some heads of one KV head. Two warpgroups
//   compute 64 rows each; a warp keeps shared memory filled, two tiles of 128 keys ahead. Blocks
//   come by the copy engine: one copy brings what a block has of a head, in the layout that the
//   MMAs read; where nothing is to be read it brings zeros.
// - The warpgroups issue their MMAs in turns, so that the softmax of one runs beside those of
//   the other. Running it beside its own last MMA too, as in the paper, was slower here.
// - A block a multiprocessor takes item after item, the longest first: while one ends, q, K and V
//   of the next are on their way.
//
// A query's result depends on its own context alone: tiles of keys begin at multiples of 128.
//
// Free of any framework: pointers, strides and a stream.
#pragma once

#include <algorithm>
#include <atomic>

#include "../common/tensor_map.h"
#include "prefill_compute.cuh"
#include "prefill_fill.cuh"

namespace fusewright::attention {

constexpr int kPrefillThreads = 3 * kWarpgroupThreads;

template <typename T>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    prefill_kernel(const __grid_constant__ PrefillArgs args,
                   const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap kv_map) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ Mailbox box;
  const uint32_t queries = (shared_address(memory) + kAtomBytes - 1) / kAtomBytes * kAtomBytes;
  const uint32_t rings = queries + kStages * kQueryBytes;
  const int warp = uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3 * kStages; ++i) {
      barrier_init(shared_address(&box.full[i / kStages][i % kStages]), 1);
      barrier_init(shared_address(&box.empty[i / kStages][i % kStages]), kComputeWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  // Registers move from those who fill to those who compute.
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0) {
      Filler filler{args, kv_map, queries, rings, &box};
      const uint32_t list = queries + kTileBytes - shared_address(memory);
      filler.run(q_map, reinterpret_cast<int2*>(memory + list));
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Computer<T> computer{args, queries, rings, &box, warp / 4 - 1};
    computer.run();
  }
}

// ---- launch

// A tensor of lines of 128 bytes of 16-bit elements: sizes and box in lines, strides in bytes.
// Outside it, copies bring zeros.
template <int kDims>
cudaError_t describe_lines(CUtensorMap* map, const void* data, const int64_t (&sizes)[kDims],
                           const int64_t (&strides)[kDims], const int (&box)[kDims]) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  cuuint64_t all_sizes[kDims + 1] = {kLineBytes / 2}, all_strides[kDims];
  cuuint32_t all_box[kDims + 1] = {kLineBytes / 2}, steps[kDims + 1] = {1};
  for (int d = 0; d < kDims; ++d) {
    all_sizes[d + 1] = static_cast<cuuint64_t>(sizes[d]);
    all_strides[d] = static_cast<cuuint64_t>(strides[d]);
    all_box[d + 1] = static_cast<cuuint32_t>(box[d]);
    steps[d + 1] = 1;
  }
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kDims + 1, const_cast<void*>(data), all_sizes,
             all_strides, all_box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Shared memory beyond 48 KB, once a device and kernel; the device's multiprocessors.
template <typename T>
cudaError_t prepare(int& multiprocessors) {
  static std::atomic<int> found[64];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  std::atomic<int>& known = found[device % 64];
  multiprocessors = known.load();
  if (multiprocessors > 0) return cudaSuccess;
  error = cudaFuncSetAttribute(prefill_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kTileBytes + kAtomBytes + kMostSeqs * sizeof(int2));
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) known.store(multiprocessors);
  return error;
}

// A copy brings a KV block, or of a larger one a tile's keys. A tile has up to four heads, so that
// short prompts fill it.
inline void set_tiles(PrefillArgs& args) {
  args.box_shift = std::min(args.log2_block_size, kTileKeysShift);
  args.query_shift = kTileRowsShift;
  for (int heads = 2; heads <= kMostTileHeads && args.group % heads == 0; heads *= 2) {
    --args.query_shift;
  }
}

// Nothing is read but lengths before the kernel ahead has finished, so the launch is programmatic.
template <typename T>
cudaError_t launch_prefill(PrefillArgs args, const PrefillShape& shape, cudaStream_t stream) {
  int multiprocessors = 0;
  cudaError_t error = prepare<T>(multiprocessors);
  if (error != cudaSuccess) return error;
  set_tiles(args);
  CUtensorMap q_map, kv_map;
  error = describe_lines<2>(&q_map, shape.q, {shape.tokens, args.heads * kHalves},
                            {shape.q_stride * 2, kLineBytes}, {1 << args.query_shift, 1});
  if (error != cudaSuccess) return error;
  const int64_t token = shape.kv_heads * kHeadDim * 2;
  const int64_t groups = shape.blocks * 2 << args.log2_block_size >> 3;
  error = describe_lines<3>(&kv_map, shape.kv, {8, shape.kv_heads * kHalves, groups},
                            {token, kLineBytes, 8 * token}, {8, kHalves, 1 << args.box_shift >> 3});
  if (error != cudaSuccess) return error;
  const int64_t max_seqs = std::min<int64_t>(args.num_seqs, shape.tokens / args.fewest);
  const int64_t tiles = (shape.tokens >> args.query_shift) + max_seqs;
  const int64_t items = tiles * args.heads >> (kTileRowsShift - args.query_shift);
  if (max_seqs == 0) return cudaSuccess;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(items, multiprocessors)));
  config.blockDim = dim3(kPrefillThreads);
  config.dynamicSmemBytes = kTileBytes + kAtomBytes + max_seqs * sizeof(int2);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, prefill_kernel<T>, args, q_map, kv_map);
}

}  // namespace fusewright::attention
