// Launches of prefill attention: what the copy engine is told of q and the cache, and the grid.
#pragma once

#include <algorithm>
#include <atomic>

#include "prefill.cuh"

namespace fusewright::attention {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time: linking libcuda would keep the library from loading on
// machines without a driver.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
    const bool ok = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return ok ? reinterpret_cast<EncodeTiled>(function) : nullptr;
  }();
  return found;
}

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
  int64_t tokens, q_stride, blocks, kv_heads, multiprocessors;
};

// fewest and the shapes bound what there is to do: blocks beyond it end at once.
template <typename T>
cudaError_t launch_prefill(PrefillArgs args, const PrefillShape& shape, cudaStream_t stream) {
  constexpr int64_t kLine = 128;
  const int64_t page = int64_t{1} << args.page_shift;
  const int box_tokens = static_cast<int>(std::min<int64_t>(page, kTileKeys));
  args.box_shift = 0;
  while (1 << args.box_shift < box_tokens) ++args.box_shift;
  CUtensorMap q_map, kv_map;
  cudaError_t error = describe_lines<2>(&q_map, shape.q, {shape.tokens, args.heads * T::kHalves},
                                        {shape.q_stride * 2, kLine}, {kTileQueries, 1});
  if (error != cudaSuccess) return error;
  const int64_t token = shape.kv_heads * T::kHeadDim * 2;
  error = describe_lines<3>(&kv_map, shape.kv,
                            {8, shape.kv_heads * T::kHalves, shape.blocks * 2 * page / 8},
                            {token, kLine, 8 * token}, {8, T::kHalves, box_tokens / 8});
  if (error != cudaSuccess) return error;
  const int64_t max_seqs = std::min<int64_t>(args.num_seqs, shape.tokens / args.fewest);
  const int64_t tiles = std::min(shape.tokens / kTileQueries + max_seqs, shape.tokens);
  const int64_t items = tiles * args.heads;
  if (items == 0) return cudaSuccess;
  const int shared = T::kBytes + kAtomBytes + static_cast<int>(max_seqs) * 12;
  const auto kernel = prefill_kernel<T>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min(items, shape.multiprocessors)));
  config.blockDim = dim3(kPrefillThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args, q_map, kv_map, static_cast<int>(max_seqs));
}

}  // namespace fusewright::attention
