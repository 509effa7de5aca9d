// Launches of prefill attention: what the copy engine is told of q and the cache, and the grid.
#pragma once

#include <algorithm>
#include <atomic>

#include "../common/tensor_map.h"
#include "prefill.cuh"

namespace fusewright::attention {

// Lines of 128 bytes of 16-bit elements: sizes and box in lines from the second dimension on,
// strides in bytes. Outside the tensor they are zero.
template <int kDims>
cudaError_t describe_lines(CUtensorMap* map, const void* data, const int64_t (&sizes)[kDims],
                           const int64_t (&strides)[kDims], const int (&box)[kDims]) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  cuuint64_t all_sizes[kDims + 1] = {64}, all_strides[kDims];
  cuuint32_t all_box[kDims + 1] = {64}, steps[kDims + 1] = {1};
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

// What of a call only the host needs.
struct PrefillShape {
  const void* q;   // [tokens, heads, head_dim], tokens q_stride elements apart
  const void* kv;  // [blocks, 2, page, kv_heads, head_dim]
  int64_t tokens, q_stride, blocks, kv_heads;
};

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
                               T::kBytes + kAtomBytes + kMostSeqs * sizeof(int2));
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) known.store(multiprocessors);
  return error;
}

// Tokens of one copy, at most a page.
inline void set_tiles(PrefillArgs& args) {
  args.box_shift = args.page_shift < kTileRowsShift ? args.page_shift : kTileRowsShift;
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
  error = describe_lines<2>(&q_map, shape.q, {shape.tokens, args.heads * T::kHalves},
                            {shape.q_stride * 2, kLineBytes}, {1 << args.query_shift, 1});
  if (error != cudaSuccess) return error;
  const int64_t token = shape.kv_heads * T::kHeadDim * 2;
  const int64_t groups = shape.blocks * 2 << args.page_shift >> 3;
  error = describe_lines<3>(&kv_map, shape.kv, {8, shape.kv_heads * T::kHalves, groups},
                            {token, kLineBytes, 8 * token}, {8, T::kHalves, 1 << args.box_shift >> 3});
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
  config.dynamicSmemBytes = T::kBytes + kAtomBytes + max_seqs * sizeof(int2);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, prefill_kernel<T>, args, q_map, kv_map);
}

}  // namespace fusewright::attention
