// Attention of many queries a sequence over a paged KV cache, for the tensor cores of sm_90a: the
// forward pass of FlashAttention-3 (Shah et al., 2024).
//
// Limit: matrix multiplication. What it takes to stay near that:
// - A block has 128 or 192 rows of q, queries of one sequence in some heads of one KV head. Two or
//   three warpgroups compute 64 rows each; a warp keeps shared memory filled, two tiles of keys
//   ahead. Blocks come by the copy engine: one copy brings what a block has of a head, in the
//   layout that the MMAs read; where nothing is to be read it brings zeros.
// - K and V in FP8 come as they are; three warps widen them beside those that compute, exactly.
//   Scales go into logits and results.
// - The warpgroups issue their MMAs in turns, so that the softmax of one runs beside those of
//   the other. Running it beside its own last MMA too, as in the paper, was slower here.
// - A block a multiprocessor takes item after item, the longest first: while one ends, q, K and V
//   of the next are on their way.
//
// A query's result depends on its own context alone: tiles of keys begin at multiples of their
// size.
//
// Free of any framework: pointers, strides and a stream.
#pragma once

#include <algorithm>
#include <atomic>

#include "../common/tensor_map.h"
#include "prefill_compute.cuh"
#include "prefill_convert.cuh"
#include "prefill_fill.cuh"

namespace fusewright::attention {

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    prefill_kernel(const __grid_constant__ PrefillArgs args,
                   const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap kv_map) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ Mailbox<T> box;
  const uint32_t memory = (shared_address(shared) + kAtomBytes - 1) / kAtomBytes * kAtomBytes;
  const int warp = uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  if (threadIdx.x == 0) box.init();
  __syncthreads();
  // Registers move from those who fill to those who compute.
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(T::kFillRegisters));
    if (warp == 0) {
      Filler<T> filler{args, kv_map, memory, &box};
      const uint32_t list = memory + T::kBytes - shared_address(shared);
      filler.run(q_map, reinterpret_cast<int2*>(shared + list));
    } else if constexpr (T::kFp8) {
      Converter<T> converter{memory, &box, warp - 1};
      converter.run();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(T::kComputeRegisters));
    Computer<T> computer(args, memory, &box, warp / 4 - 1);
    computer.run();
  }
}

// ---- launch

// A tensor of lines: of 128 bytes of 16-bit elements, which are swizzled, or of bytes. Sizes and
// box are in lines, strides in bytes. Outside it, copies bring zeros.
template <int kDims>
cudaError_t describe_lines(CUtensorMap* map, const void* data, int bytes,
                           const int64_t (&sizes)[kDims], const int64_t (&strides)[kDims],
                           const int (&box)[kDims]) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  const cuuint32_t line = bytes > 0 ? bytes : kLineBytes / 2;
  cuuint64_t all_sizes[kDims + 1] = {line}, all_strides[kDims];
  cuuint32_t all_box[kDims + 1] = {line}, steps[kDims + 1] = {1};
  for (int d = 0; d < kDims; ++d) {
    all_sizes[d + 1] = static_cast<cuuint64_t>(sizes[d]);
    all_strides[d] = static_cast<cuuint64_t>(strides[d]);
    all_box[d + 1] = static_cast<cuuint32_t>(box[d]);
    steps[d + 1] = 1;
  }
  const CUresult result =
      encode(map, bytes > 0 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             kDims + 1, const_cast<void*>(data), all_sizes, all_strides, all_box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             bytes > 0 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename T>
cudaError_t describe(CUtensorMap* q_map, CUtensorMap* kv_map, const PrefillArgs& args,
                     const PrefillShape& shape) {
  const cudaError_t error =
      describe_lines<2>(q_map, shape.q, 0, {shape.tokens, args.heads * T::kLines},
                        {shape.q_stride * 2, kLineBytes}, {args.tile_queries, 1});
  if (error != cudaSuccess) return error;
  const int64_t groups = shape.blocks * 2 << args.log2_block_size >> 3;
  const int64_t token = int64_t{args.kv_heads} * T::kHeadDim * (T::kFp8 ? 1 : 2);
  const int lines = T::kFp8 ? 1 : T::kLines, bytes = T::kFp8 ? T::kHeadDim : 0;
  return describe_lines<3>(kv_map, shape.kv, bytes, {8, args.kv_heads * lines, groups},
                           {token, T::kFp8 ? T::kHeadDim : kLineBytes, 8 * token},
                           {8, lines, 1 << args.box_shift >> 3});
}

// Sequences for which a block's shared memory has room.
template <typename T>
constexpr int most_seqs() {
  // To which the compiler pads the static memory ahead of the dynamic.
  constexpr int kStatic = (sizeof(Mailbox<T>) + kAtomBytes - 1) / kAtomBytes * kAtomBytes;
  constexpr int kRoom =
      (227 * 1024 - kStatic - kAtomBytes - T::kBytes) / static_cast<int>(sizeof(int2));
  static_assert(kRoom >= (T::kFp8 && T::kHeadDim == 256 ? kMostSeqsFp8Of256 : kMostSeqs));
  return kRoom < kMostSeqs ? kRoom : kMostSeqs;
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
                               T::kBytes + kAtomBytes + most_seqs<T>() * sizeof(int2));
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) known.store(multiprocessors);
  return error;
}

// A copy brings a KV block, or of a larger one a tile's keys.
template <typename T>
void set_tiles(PrefillArgs& args) {
  args.box_shift = args.log2_block_size;
  while (1 << args.box_shift > T::kTileKeys) --args.box_shift;
  args.tile_queries = T::kRows / args.tile_heads;
}

// Nothing is read but lengths before the kernel ahead has finished, so the launch is programmatic.
template <typename T>
cudaError_t launch_tile(PrefillArgs args, const PrefillShape& shape, cudaStream_t stream) {
  static_assert(T::kRows / kMostTileHeads >= kFewestTileQueries);
  int multiprocessors = 0;
  cudaError_t error = prepare<T>(multiprocessors);
  if (error != cudaSuccess) return error;
  set_tiles<T>(args);
  CUtensorMap q_map, kv_map;
  error = describe<T>(&q_map, &kv_map, args, shape);
  if (error != cudaSuccess) return error;
  const int64_t max_seqs = std::min<int64_t>(args.num_seqs, shape.tokens / args.fewest);
  if (max_seqs > most_seqs<T>()) return cudaErrorInvalidValue;
  const int64_t tiles = shape.tokens / args.tile_queries + max_seqs;
  const int64_t items = tiles * (args.heads / args.tile_heads);
  if (max_seqs == 0) return cudaSuccess;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(items, multiprocessors)));
  config.blockDim = dim3(T::kThreads);
  config.dynamicSmemBytes = T::kBytes + kAtomBytes + max_seqs * sizeof(int2);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, prefill_kernel<T>, args, q_map, kv_map);
}

// Whether three warpgroups are to serve a head_dim of 64. Their tile of half as many rows more
// takes 1.27 times as long, but tiles are fewer, and may leave more of the device idle. They are
// counted as if each sequence but one left half of a tile empty.
inline bool takes_three(const PrefillArgs& args, const PrefillShape& shape, int multiprocessors) {
  const int64_t seqs = std::min<int64_t>(args.num_seqs, shape.tokens / args.fewest);
  const auto rounds = [&](int64_t rows) {
    const int64_t queries = rows / args.tile_heads;
    const int64_t tiles =
        (shape.tokens + queries - 1) / queries + std::max<int64_t>(seqs - 1, 0) / 2;
    return (tiles * (args.heads / args.tile_heads) + multiprocessors - 1) / multiprocessors;
  };
  return 127 * rounds(192) <= 100 * rounds(128);
}

template <int kHeadDim, typename E, typename C>
cudaError_t launch_of(const PrefillArgs& args, const PrefillShape& shape, cudaStream_t stream) {
  const bool general = args.window > 0 || args.chunk > 0 || args.soft_cap > 0;
  if constexpr (kHeadDim == 64) {
    if (general) return cudaErrorInvalidValue;
    using Three = PrefillTile<E, C, kHeadDim, false, 3>;
    int multiprocessors = 0;
    if (const cudaError_t error = prepare<Three>(multiprocessors); error != cudaSuccess) {
      return error;
    }
    return takes_three(args, shape, multiprocessors)
               ? launch_tile<Three>(args, shape, stream)
               : launch_tile<PrefillTile<E, C, kHeadDim, false>>(args, shape, stream);
  } else {
    return general ? launch_tile<PrefillTile<E, C, kHeadDim, true>>(args, shape, stream)
                   : launch_tile<PrefillTile<E, C, kHeadDim, false>>(args, shape, stream);
  }
}

template <int kHeadDim, typename E>
cudaError_t launch_of(const PrefillArgs& args, const PrefillShape& shape, bool fp8_cache,
                      cudaStream_t stream) {
  return fp8_cache ? launch_of<kHeadDim, E, __nv_fp8_e4m3>(args, shape, stream)
                   : launch_of<kHeadDim, E, E>(args, shape, stream);
}

// A tile has up to four heads, so that short prompts fill it.
template <int kHeadDim>
cudaError_t launch_prefill(PrefillArgs args, const PrefillShape& shape, Element element,
                           bool fp8_cache, cudaStream_t stream) {
  args.tile_heads = 1;
  while (args.tile_heads < kMostTileHeads && args.group % (2 * args.tile_heads) == 0) {
    args.tile_heads *= 2;
  }
  return element == Element::kBFloat16
             ? launch_of<kHeadDim, __nv_bfloat16>(args, shape, fp8_cache, stream)
             : launch_of<kHeadDim, __half>(args, shape, fp8_cache, stream);
}

}  // namespace fusewright::attention
