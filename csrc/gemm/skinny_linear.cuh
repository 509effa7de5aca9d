// A linear layer for few tokens: y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], of bfloat16 or
// of FP8 with scales, with float accumulation, rounded once; or what is made of such sums on the
// spot: a gated activation, the index of each token's largest.
//
// Limit: memory. A call streams the weight; x and y are small beside it. What it takes to stay near
// that limit:
// - Bytes in flight, in an order that memory likes. One thread of a block issues tensor copies
//   (TMA) into a ring of shared-memory stages. A copy takes 512 bytes of each of its rows, and L2
//   is asked for no more than it takes: promotion to 256 bytes cost 5 % (bench/NOTES.md).
// - Tensor cores, with 16 rows of the weight as the tall operand and 8 tokens as the narrow one
//   (mma m16n8k16): M = 1 costs them what M = 8 does, and that is little. FP8 products (m16n8k32)
//   are, on sm_90, conversions to half, which is exact, and products of halves.
// - Small blocks, two to six a multiprocessor: what one is late another takes on. Where N gives too
//   few, the `splits` blocks of a cluster share a tile along K, and add their sums through
//   distributed shared memory in order of rank: one launch, no atomics.
// - No gap between layers. Launched programmatically, the next call's blocks start while this one
//   drains, and fill their stages with weights before they wait for its result.
//
// Each element's sum has one order, whatever num_tokens is within a batch class (2, 8, 16, 32
// tokens): repeats are equal to the bit, and so is a token's result in another batch of the class.
//
// Free of any framework: pointers, strides and a stream. The instructions need sm_90.
#pragma once

#include <cuda_fp16.h>

#include <atomic>

#include "async_copy.cuh"
#include "skinny_tile.cuh"

namespace fusewright::gemm {

// With this many steps to go, a block lets the next kernel start.
constexpr int kStepsLeftAtTrigger = 4;

enum class Element { kBFloat16, kHalf, kFloat };

// What becomes of the sums.  Gated: the weight's rows are a gate half, then an up half, and y is
// act(gate) * up, of gate and up rounded as y is.  Argmax: only largest is written.
enum class Epilogue { kLinear, kSiluMul, kGeluTanhMul, kArgmax };

struct SkinnyLinearArgs {
  const void* x;              // [num_tokens, in_features] of the format's elements
  const void* weight;         // [rows, in_features]; rows: out_features, gated twice that
  const float* x_scale;       // FP8: one, or one a token; blocks: [in_features / 128, num_tokens]
  const float* weight_scale;  // FP8: one, or one a row; blocks: [rows / 128, in_features / 128],
                              // not with a gate
  const void* bias;           // [rows] of element, or nullptr
  void* y;                    // [num_tokens, out_features], contiguous
  uint32_t* largest;          // argmax: [num_tokens, blocks], see largest_key
  Element element;            // of y and bias
  Epilogue epilogue;
  int num_tokens;  // 1 to kMaxSkinnyTokens
  int out_features;
  int in_features;                          // a multiple of 128 bytes; of 512 with block scales
  int x_scale_stride, weight_scale_stride;  // 0 or 1: one for all, or one each
  int64_t x_row_stride;       // elements; a multiple of 16 bytes, as the addresses are
  int64_t weight_row_stride;  // likewise

  __host__ __device__ bool gated() const {
    return epilogue == Epilogue::kSiluMul || epilogue == Epilogue::kGeluTanhMul;
  }
};

__device__ __forceinline__ void multiply(Bf16, float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply(Fp8, float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply(Fp8Blocks, float (&d)[4], uint32_t a0, uint32_t a1,
                                         uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  multiply(Fp8{}, d, a0, a1, a2, a3, b0, b1);
}

// Where the parts of a block's shared memory lie.
template <typename T>
struct Shared {
  uint32_t base;  // a multiple of 1024, as the swizzle's pattern repeats
  __device__ uint32_t weight(int stage) const { return base + stage * T::kStageBytes; }
  __device__ uint32_t x(int stage) const { return weight(stage) + T::kRows * kRowBytes; }
  __device__ uint32_t full(int stage) const {
    return base + T::kStages * T::kStageBytes + stage * 16;
  }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ uint32_t weight_scale(int stage) const {
    return base + T::kStages * (T::kStageBytes + 16) + stage * T::kScaleBytes;
  }
  __device__ uint32_t x_scale(int stage) const { return weight_scale(stage) + 16; }
};

// What a block adds up: a tile's rows, segments [first, first + num_steps) of K.  Its outputs begin
// at first_output; gated, half of its rows are gates and half the ups of the same outputs.
struct Share {
  int rank, first_output, first, num_steps;
};

// One thread: every copy of the block. Weights for the whole ring are under way before it waits for
// the kernel that makes x.
template <typename T>
__device__ __forceinline__ void produce(const CUtensorMap& weight_map, const CUtensorMap& x_map,
                                        const Shared<T>& shared, const Share& share,
                                        const SkinnyLinearArgs& args) {
  constexpr bool kBlockScales = T::Format::kBlockScales;
  const int num_groups = args.in_features / kScaleBlock;
  const int bytes =
      (T::kRows + args.num_tokens) * kRowBytes + (kBlockScales ? 16 * (args.num_tokens + 1) : 0);
  const auto copy_weight = [&](int step, int stage) {
    const uint32_t full = shared.full(stage), to = shared.weight(stage);
    const int line = (share.first + step) * kConsumerWarps;
    barrier_expect_bytes(full, bytes);
    copy_box(to, weight_map, line, share.first_output, full, kEvictFirst);
    if (args.gated()) {
      copy_box(to + T::kRows / 2 * kRowBytes, weight_map, line,
               args.out_features + share.first_output, full, kEvictFirst);
    }
    if (kBlockScales) {
      const int block = share.first_output / kScaleBlock;
      copy_bytes(shared.weight_scale(stage), args.weight_scale + block * num_groups + line, 16,
                 full);
    }
  };
  const auto copy_x = [&](int step, int stage) {
    const uint32_t full = shared.full(stage);
    const int line = (share.first + step) * kConsumerWarps;
    copy_box(shared.x(stage), x_map, line, 0, full, kEvictNormal);
    if (kBlockScales) {
      copy_bytes(shared.x_scale(stage), args.x_scale + line * args.num_tokens, 16 * args.num_tokens,
                 full);
    }
    if (share.num_steps - step - 1 == kStepsLeftAtTrigger) start_next();
  };
  const int num_ahead = min(share.num_steps, T::kStages);
  for (int step = 0; step < num_ahead; ++step) copy_weight(step, step);
  wait_for_previous();
  // Not before the wait: then at most one unfinished kernel precedes any that has started.
  if (share.num_steps <= kStepsLeftAtTrigger) start_next();
  for (int step = 0; step < num_ahead; ++step) copy_x(step, step);
  for (int step = num_ahead; step < share.num_steps; ++step) {
    const int stage = step % T::kStages;
    barrier_wait(shared.empty(stage), (step / T::kStages + 1) % 2);
    copy_weight(step, stage);
    copy_x(step, stage);
  }
}

template <typename T>
using Sums = float[T::kTilesM][T::kTilesN][4];

// One warp's line of one stage, all rows times all tokens, added to sums.
//
// A dot product does not mind the order of K, so each lane reads 16 bytes of a row at once and
// deals its words to the fragments of two products, for the weight as for x: no shuffle, no
// ldmatrix. The swizzle keeps 16-byte chunk c of a line at c ^ (index of the line % 8), here of 4
// lines a row: so two rows' four chunks, which a quarter of the warp reads, touch every bank once.
template <typename T>
__device__ __forceinline__ void multiply_line(const Shared<T>& shared, int stage, Sums<T>& sums) {
  const int lane = threadIdx.x % kWarpSize, line = threadIdx.x / kWarpSize;
  const auto offset = [&](int row) {
    const int chunk = (lane % 4) ^ (line + 4 * (row % 2));
    return row * kRowBytes + line * kLineBytes + chunk * 16;
  };
  const uint32_t weight_offset = offset(lane / 4), x_offset = offset(lane / 4 % T::kXRows);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t weight = shared.weight(stage) + (weight_offset ^ (half * 64));
    const uint32_t x = shared.x(stage) + (x_offset ^ (half * 64));
    uint4 a[T::kTilesM][2];
#pragma unroll
    for (int i = 0; i < T::kTilesM; ++i) {
      a[i][0] = load_shared_16(weight + 16 * i * kRowBytes);
      a[i][1] = load_shared_16(weight + (16 * i + 8) * kRowBytes);
    }
#pragma unroll
    for (int j = 0; j < T::kTilesN; ++j) {
      const uint4 b = load_shared_16(x + 8 * j * kRowBytes);
#pragma unroll
      for (int i = 0; i < T::kTilesM; ++i) {
        const auto& [a0, a1] = a[i];
        multiply(typename T::Format{}, sums[i][j], a0.x, a1.x, a0.y, a1.y, b.x, b.y);
        multiply(typename T::Format{}, sums[i][j], a0.z, a1.z, a0.w, a1.w, b.z, b.w);
      }
    }
  }
}

// sums += part, each times the scales of this line's block.
template <typename T>
__device__ __forceinline__ void add_scaled(const Shared<T>& shared, int stage, int num_tokens,
                                           const Sums<T>& part, Sums<T>& sums) {
  const int lane = threadIdx.x % kWarpSize, line = threadIdx.x / kWarpSize;
  const float weight_scale = load_shared_float(shared.weight_scale(stage) + 4 * line);
  const uint32_t x_scales = shared.x_scale(stage) + 4 * line * num_tokens;
#pragma unroll
  for (int j = 0; j < T::kTilesN; ++j) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int token = min(8 * j + lane % 4 * 2 + odd, num_tokens - 1);
      const float scale = load_shared_float(x_scales + 4 * token) * weight_scale;
#pragma unroll
      for (int i = 0; i < T::kTilesM; ++i) {
        sums[i][j][odd] += part[i][j][odd] * scale;
        sums[i][j][2 + odd] += part[i][j][2 + odd] * scale;
      }
    }
  }
}

// One consumer warp: its line of every stage.
template <typename T>
__device__ __forceinline__ void consume(const Shared<T>& shared, int num_steps, int num_tokens,
                                        Sums<T>& sums) {
  int stage = 0;
  uint32_t parity = 0;
  for (int step = 0; step < num_steps; ++step) {
    barrier_wait(shared.full(stage), parity);
    if constexpr (T::Format::kBlockScales) {
      Sums<T> part = {};
      multiply_line<T>(shared, stage, part);
      add_scaled<T>(shared, stage, num_tokens, part, sums);
    } else {
      multiply_line<T>(shared, stage, sums);
    }
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) barrier_arrive(shared.empty(stage));
    if (++stage == T::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// Fragments to shared memory, over the stages, as [warp][token][row].
template <typename T>
__device__ __forceinline__ void store_sums(float* to, const Sums<T>& sums) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int i = 0; i < T::kTilesM; ++i) {
#pragma unroll
    for (int j = 0; j < T::kTilesN; ++j) {
      const int token = 8 * j + lane % 4 * 2;
      if (token >= T::kXRows) continue;
      float* at = to + warp * T::kWarpSums + token * T::kSumPitch + 16 * i + lane / 4;
      at[0] = sums[i][j][0];
      at[T::kSumPitch] = sums[i][j][1];
      at[8] = sums[i][j][2];
      at[T::kSumPitch + 8] = sums[i][j][3];
    }
  }
}

__device__ __forceinline__ float load_element(const void* p, int64_t i, Element element) {
  if (element == Element::kBFloat16) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  }
  if (element == Element::kHalf) return __half2float(static_cast<const __half*>(p)[i]);
  return static_cast<const float*>(p)[i];
}

__device__ __forceinline__ float rounded(float v, Element element) {
  if (element == Element::kBFloat16) return __bfloat162float(__float2bfloat16_rn(v));
  return element == Element::kHalf ? __half2float(__float2half_rn(v)) : v;
}

__device__ __forceinline__ void store_element(void* p, int64_t i, Element element, float v) {
  if (element == Element::kBFloat16) {
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(v);
  } else if (element == Element::kHalf) {
    static_cast<__half*>(p)[i] = __float2half_rn(v);
  } else {
    static_cast<float*>(p)[i] = v;
  }
}

__device__ __forceinline__ float activated(float gate, Epilogue epilogue) {
  if (epilogue == Epilogue::kSiluMul) return gate / (1.0f + expf(-gate));
  constexpr float kSqrtTwoOverPi = 0.7978845608f;
  const float inner = kSqrtTwoOverPi * (gate + 0.044715f * gate * gate * gate);
  return 0.5f * gate * (1.0f + tanhf(inner));
}

// A row's rank among those of a block: its value as a bfloat16 in an order of integers, then the
// lower row.  NaN is -inf, the two zeros are one; 0 is less than any key.
__device__ __forceinline__ uint32_t largest_key(float v, int row) {
  const float value = isnan(v) ? -INFINITY : rounded(v, Element::kBFloat16) + 0.0f;
  const uint32_t bits = __float_as_uint(value) >> 16;
  return ((bits & 0x8000 ? ~bits : bits | 0x8000) << 16) | (0xffff - row);
}

// A row's sum over ranks and warps, in order; its scales and its bias.
template <typename T>
__device__ __forceinline__ float finish_sum(const SkinnyLinearArgs& args, uint32_t sums, int splits,
                                            int token, int row, int n) {
  const uint32_t address = sums + (token * T::kSumPitch + row) * 4;
  float total = 0.0f;
  for (int rank = 0; rank < splits; ++rank) {
#pragma unroll
    for (int warp = 0; warp < kConsumerWarps; ++warp) {
      total += load_from_rank(address + warp * T::kWarpSums * 4, rank);
    }
  }
  if (T::Format::kBytes == 1 && !T::Format::kBlockScales) {
    total *=
        args.x_scale[token * args.x_scale_stride] * args.weight_scale[n * args.weight_scale_stride];
  }
  return args.bias ? total + load_element(args.bias, n, args.element) : total;
}

// This block's part of the tile: outputs to y, or into the tokens' largest keys.
template <typename T>
__device__ __forceinline__ void write_part(const SkinnyLinearArgs& args, uint32_t sums,
                                           uint32_t* keys, const Share& share, int splits) {
  const int width = args.gated() ? T::kRows / 2 : T::kRows;
  const int num_items = args.num_tokens * width;
  const int end = num_items * (share.rank + 1) / splits;
  for (int item = num_items * share.rank / splits + threadIdx.x; item < end; item += kThreads) {
    const int token = item / width, row = item % width, n = share.first_output + row;
    if (n >= args.out_features) continue;
    float value = finish_sum<T>(args, sums, splits, token, row, n);
    if (args.epilogue == Epilogue::kArgmax) {
      atomicMax(keys + token, largest_key(value, row));
      continue;
    }
    if (args.gated()) {
      const float up = finish_sum<T>(args, sums, splits, token, row + width, n + args.out_features);
      const float gate = activated(rounded(value, args.element), args.epilogue);
      value = gate * rounded(up, args.element);
    }
    const int64_t at = static_cast<int64_t>(token) * args.out_features + n;
    store_element(args.y, at, args.element, value);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    skinny_linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                         const __grid_constant__ CUtensorMap x_map,
                         const __grid_constant__ SkinnyLinearArgs args, int splits) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<T> shared{shared_address(memory)};
  Share share;
  share.rank = blockIdx.x % splits;
  share.first_output = blockIdx.x / splits * (args.gated() ? T::kRows / 2 : T::kRows);
  const int row_bytes = args.in_features * T::Format::kBytes;
  const int steps = (row_bytes + kRowBytes - 1) / kRowBytes;
  share.first = steps * share.rank / splits;
  share.num_steps = steps * (share.rank + 1) / splits - share.first;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), kConsumerWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  constexpr int kConsumers = kConsumerWarps * kWarpSize;
  Sums<T> sums = {};
  if (threadIdx.x < kConsumers) {
    consume<T>(shared, share.num_steps, args.num_tokens, sums);
  } else if (threadIdx.x == kConsumers) {
    produce<T>(weight_map, x_map, shared, share, args);
  }
  wait_for_previous();  // every thread that writes: the kernel before may read what y overwrites
  __syncthreads();      // no warp reads the stages any more
  uint32_t* keys = reinterpret_cast<uint32_t*>(memory + T::kSumBytes);
  if (threadIdx.x < kConsumers) {
    store_sums<T>(reinterpret_cast<float*>(memory), sums);
  } else {
    keys[threadIdx.x - kConsumers] = 0;
  }
  if (splits > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  write_part<T>(args, shared.base, keys, share, splits);
  if (args.epilogue == Epilogue::kArgmax) {
    __syncthreads();
    if (threadIdx.x < args.num_tokens) {
      args.largest[threadIdx.x * gridDim.x + blockIdx.x] = keys[threadIdx.x];
    }
  }
  if (splits > 1) cluster_sync();  // no block leaves while others read it
}

constexpr int kFindThreads = 1024;

// A block a token: the index of the largest of its blocks' keys, of tiles of `rows` rows, `splits`
// blocks each.  Equal values: the lower row within a block, the lower tile among blocks.
inline __global__ void __launch_bounds__(kFindThreads)
    find_largest_kernel(const uint32_t* largest, int blocks, int splits, int rows,
                        int32_t* token_ids) {
  __shared__ uint64_t found[kFindThreads / kWarpSize];
  wait_for_previous();
  start_next();
  uint64_t best = 0;
  for (int block = threadIdx.x; block < blocks; block += kFindThreads) {
    const uint32_t key = largest[static_cast<int64_t>(blockIdx.x) * blocks + block];
    const uint32_t n = block / splits * rows + (0xffff - (key & 0xffff));
    if (key) best = max(best, (static_cast<uint64_t>(key >> 16) << 32) | ~n);
  }
#pragma unroll
  for (int other = kWarpSize / 2; other; other /= 2) {
    best = max(best, __shfl_xor_sync(~0u, best, other));
  }
  if (threadIdx.x % kWarpSize == 0) found[threadIdx.x / kWarpSize] = best;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 0; warp < kFindThreads / kWarpSize; ++warp) best = max(best, found[warp]);
  token_ids[blockIdx.x] = static_cast<int32_t>(~static_cast<uint32_t>(best));
}

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

// Segments of box_rows rows of a [rows, cols] matrix, seen as [rows, lines, line], so that a copy
// walks each row's four lines before the next row. Outside the matrix they are zero.
template <typename Format>
cudaError_t describe_matrix(CUtensorMap* map, const void* data, int64_t rows, int64_t cols,
                            int64_t row_stride, int box_rows) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  constexpr cuuint32_t kLine = kLineBytes / Format::kBytes;
  const cuuint64_t sizes[] = {kLine, static_cast<cuuint64_t>(cols / kLine),
                              static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {kLineBytes, static_cast<cuuint64_t>(row_stride) * Format::kBytes};
  const cuuint32_t box[] = {kLine, kConsumerWarps, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1, 1};
  const auto type =
      Format::kBytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const CUresult result =
      encode(map, type, 3, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Shared memory beyond 48 KB, once a device and kernel; and all of it, not what one block needs:
// two kernels' blocks are to share a multiprocessor.
template <typename T>
cudaError_t allow_shared_memory() {
  static std::atomic<uint64_t> done{0};
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (done.load() & bit) return cudaSuccess;
  cudaError_t error = cudaFuncSetAttribute(
      skinny_linear_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedBytes);
  if (error != cudaSuccess) return error;
  error =
      cudaFuncSetAttribute(skinny_linear_kernel<T>, cudaFuncAttributePreferredSharedMemoryCarveout,
                           cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess) done.fetch_or(bit);
  return error;
}

// A launch's grid and what may precede its start.
struct LaunchConfig {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2] = {};

  LaunchConfig(int blocks, int threads, int shared_bytes, int cluster, bool programmatic,
               cudaStream_t stream) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = programmatic;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = 1;
    attributes[1].val.clusterDim.z = 1;
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
  }
};

template <typename T>
cudaError_t launch(const SkinnyLinearArgs& args, int32_t* token_ids, int splits, bool programmatic,
                   cudaStream_t stream) {
  CUtensorMap weight_map, x_map;
  const int halves = args.gated() ? 2 : 1;
  cudaError_t error = describe_matrix<typename T::Format>(
      &weight_map, args.weight, int64_t{halves} * args.out_features, args.in_features,
      args.weight_row_stride, T::kRows / halves);
  if (error != cudaSuccess) return error;
  // Only real tokens are copied; what the others' columns multiply reaches no result.
  error = describe_matrix<typename T::Format>(&x_map, args.x, args.num_tokens, args.in_features,
                                              args.x_row_stride, args.num_tokens);
  if (error != cudaSuccess) return error;
  error = allow_shared_memory<T>();
  if (error != cudaSuccess) return error;
  const int outputs = T::kRows / halves;
  const int blocks = (args.out_features + outputs - 1) / outputs * splits;
  const LaunchConfig config(blocks, kThreads, T::kSharedBytes, splits, programmatic, stream);
  error =
      cudaLaunchKernelEx(&config.config, skinny_linear_kernel<T>, weight_map, x_map, args, splits);
  if (error != cudaSuccess || args.epilogue != Epilogue::kArgmax) return error;
  const LaunchConfig find(args.num_tokens, kFindThreads, 0, 1, programmatic, stream);
  return cudaLaunchKernelEx(&find.config, find_largest_kernel,
                            static_cast<const uint32_t*>(args.largest), blocks, splits, T::kRows,
                            token_ids);
}

template <typename Format, typename B>
cudaError_t launch_batch(const SkinnyLinearArgs& args, int32_t* token_ids, bool programmatic,
                         cudaStream_t stream) {
  using R = Rings<Format, B>;
  const int row_bytes = args.in_features * Format::kBytes;
  const Plan plan = make_plan<R>(args.out_features * (args.gated() ? 2 : 1),
                                 (row_bytes + kRowBytes - 1) / kRowBytes);
  const auto with = [&](auto tile) {
    return launch<decltype(tile)>(args, token_ids, plan.splits, programmatic, stream);
  };
  switch (plan.ring) {
    case Ring::kDeep:
      return with(typename R::Deep{});
    case Ring::kMedium:
      return with(typename R::Medium{});
    case Ring::kShallow:
      return with(typename R::Shallow{});
    default:
      return with(typename R::Many{});
  }
}

// Keys that the argmax needs room for a token: a block's each, and blocks of split tiles fit a
// round.
constexpr int64_t max_blocks(int out_features) {
  constexpr int64_t kRound = kMultiprocessors * 8;
  return out_features / 16 + 1 > kRound ? out_features / 16 + 1 : kRound;
}

// `programmatic`: start before the kernel ahead has finished. The weight, and block scales of it,
// are then read before that one's results are waited for: they must not be among them.
// `token_ids`: [num_tokens], of the argmax.
template <typename Format>
cudaError_t launch_skinny_linear(const SkinnyLinearArgs& args, int32_t* token_ids,
                                 bool programmatic, cudaStream_t stream) {
  if (args.num_tokens <= 2) {
    return launch_batch<Format, Batch<8, 2>>(args, token_ids, programmatic, stream);
  }
  if (args.num_tokens <= 8) {
    return launch_batch<Format, Batch<8, 8>>(args, token_ids, programmatic, stream);
  }
  if (args.num_tokens <= 16) {
    return launch_batch<Format, Batch<16, 16>>(args, token_ids, programmatic, stream);
  }
  return launch_batch<Format, Batch<32, 32>>(args, token_ids, programmatic, stream);
}

}  // namespace fusewright::gemm
