// A linear layer for few tokens: y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n] in bf16, with
// float accumulation, rounded once.
//
// Limit: memory. A call streams the weight, 2 * N * K bytes; x and y are small beside it. What it
// takes to stay near that limit:
// - Bytes in flight, in an order that memory likes. One thread of a block issues tensor copies
//   (TMA) into a ring of shared-memory stages. A copy takes 512 bytes of each of its rows; rings
//   that took 128 were slower (bench/NOTES.md).
// - Tensor cores, with 16 rows of the weight as the tall operand and 8 tokens as the narrow one
//   (mma m16n8k16): M = 1 costs them what M = 8 does, and that is little.
// - Small blocks, two to four a multiprocessor and many rounds: what one is late another takes on.
//   Where N gives too few, the `splits` blocks of a cluster share a tile along K, and add their
//   sums through distributed shared memory in order of rank: one launch, no atomics.
// - No gap between layers. Launched programmatically, the next call's blocks start while this one
//   drains, and fill their stages with weights before they wait for its result.
//
// Each element's sum has one order, whatever num_tokens is within a tile class: repeats are equal
// to the bit, and so is a token's result in another batch of the class.
//
// Free of any framework: pointers, strides and a stream. The instructions need sm_90.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace fusewright::gemm {

constexpr int kMaxSkinnyTokens = 32;
constexpr int kWarpSize = 32;
constexpr int kConsumerWarps = 4;
constexpr int kThreads = (kConsumerWarps + 1) * kWarpSize;

// A stage holds kSegment elements of K of each row, as kConsumerWarps lines of 128 bytes, the width
// of the swizzle; consumer warp w multiplies line w.
constexpr int kLine = 64;
constexpr int kSegment = kLine * kConsumerWarps;
constexpr int kRowBytes = kSegment * 2;

// With this many steps to go, a block lets the next kernel start.
constexpr int kStepsLeftAtTrigger = 4;

struct SkinnyLinearArgs {
  const __nv_bfloat16* x;       // [num_tokens, in_features]
  const __nv_bfloat16* weight;  // [out_features, in_features]
  const __nv_bfloat16* bias;    // [out_features] or nullptr
  __nv_bfloat16* y;             // [num_tokens, out_features], contiguous
  int num_tokens;               // 1 to kMaxSkinnyTokens
  int out_features;
  int in_features;            // a multiple of kLine
  int64_t x_row_stride;       // elements, a multiple of 8; data 16-byte aligned
  int64_t weight_row_stride;  // likewise
};

// What a block works on: kRows rows of the weight, up to kTokens tokens.
template <int kRows_, int kTokens_, int kStages_>
struct Tile {
  static constexpr int kRows = kRows_, kTokens = kTokens_, kStages = kStages_;
  static constexpr int kTilesM = kRows / 16, kTilesN = kTokens / 8;
  static constexpr int kStageBytes = (kRows + kTokens) * kRowBytes;
  // The warps' sums, [kConsumerWarps][kTokens][kSumPitch] floats over the stages once these are
  // read; the pad spreads the banks.
  static constexpr int kSumPitch = kRows + 4;
  static constexpr int kSharedBytes = kStages * (kStageBytes + 16);
  static_assert(kConsumerWarps * kTokens * kSumPitch * 4 <= kStages * kStageBytes);
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t"
      ".reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Some rows' segment, from line `line` of row `row` on, to consecutive rows of kRowBytes.
__device__ __forceinline__ void copy_segment(uint32_t to, const CUtensorMap& map, int line, int row,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(0), "r"(line), "r"(row), "r"(barrier)
      : "memory");
}

// Let the next kernel's blocks start; it may be any that was launched programmatically.
__device__ __forceinline__ void start_next() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Until the kernel before has finished and its results are visible.
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n\t"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Two floats at this block's shared address, but in the block of that rank of the cluster.
__device__ __forceinline__ float2 load_from_rank(uint32_t address, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(remote));
  return v;
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
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
};

// What a block adds up: rows from first_row on, segments [first, first + num_steps) of K.
struct Share {
  int rank, first_row, first, num_steps;
};

// One thread: every copy of the block. Weights for the whole ring are under way before it waits for
// the kernel that makes x.
template <typename T>
__device__ __forceinline__ void produce(const CUtensorMap& weight_map, const CUtensorMap& x_map,
                                        const Shared<T>& shared, const Share& share,
                                        int num_tokens) {
  const auto copy_weight = [&](int step, int stage) {
    barrier_expect_bytes(shared.full(stage), (T::kRows + num_tokens) * kRowBytes);
    copy_segment(shared.weight(stage), weight_map, (share.first + step) * kConsumerWarps,
                 share.first_row, shared.full(stage));
  };
  const auto copy_x = [&](int step, int stage) {
    copy_segment(shared.x(stage), x_map, (share.first + step) * kConsumerWarps, 0,
                 shared.full(stage));
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

// One consumer warp: its line of every stage, all rows times all tokens.
//
// A dot product does not mind the order of K, so each lane reads 16 bytes of a row at once and
// deals its words to the fragments of two products, for the weight as for x: no shuffle, no
// ldmatrix. The swizzle keeps 16-byte chunk c of a line at c ^ (index of the line % 8), here of 4
// lines a row: so two rows' four chunks, which a quarter of the warp reads, touch every bank once.
template <typename T>
__device__ __forceinline__ void consume(const Shared<T>& shared, int num_steps,
                                        float (&sums)[T::kTilesM][T::kTilesN][4]) {
  const int lane = threadIdx.x % kWarpSize, line = threadIdx.x / kWarpSize;
  const int row = lane / 4;
  const int chunk = (lane % 4) ^ (line + 4 * (row % 2));
  const uint32_t offset = row * kRowBytes + line * kLine * 2 + chunk * 16;
  int stage = 0;
  uint32_t parity = 0;
  for (int step = 0; step < num_steps; ++step) {
    barrier_wait(shared.full(stage), parity);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t weight = shared.weight(stage) + (offset ^ (half * 64));
      const uint32_t x = shared.x(stage) + (offset ^ (half * 64));
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
          mma(sums[i][j], a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y, b.x, b.y);
          mma(sums[i][j], a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w, b.z, b.w);
        }
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.empty(stage));
    if (++stage == T::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// Fragments to shared memory, over the stages, as [warp][token][row].
template <typename T>
__device__ __forceinline__ void store_sums(float* to,
                                           const float (&sums)[T::kTilesM][T::kTilesN][4]) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int i = 0; i < T::kTilesM; ++i) {
#pragma unroll
    for (int j = 0; j < T::kTilesN; ++j) {
      const int token = warp * T::kTokens + 8 * j + lane % 4 * 2;
      float* at = to + token * T::kSumPitch + 16 * i + lane / 4;
      at[0] = sums[i][j][0];
      at[T::kSumPitch] = sums[i][j][1];
      at[8] = sums[i][j][2];
      at[T::kSumPitch + 8] = sums[i][j][3];
    }
  }
}

// This block's part of the tile: sums of all ranks and warps, in order, plus the bias, rounded.
template <typename T>
__device__ __forceinline__ void write_part(const SkinnyLinearArgs& args, uint32_t sums,
                                           const Share& share, int splits) {
  constexpr int kPairs = T::kRows / 2;
  const int num_items = args.num_tokens * kPairs;
  const int end = num_items * (share.rank + 1) / splits;
  for (int item = num_items * share.rank / splits + threadIdx.x; item < end; item += kThreads) {
    const int token = item / kPairs, pair = item % kPairs;
    const int n = share.first_row + 2 * pair;
    if (n >= args.out_features) continue;
    const uint32_t address = sums + (token * T::kSumPitch + 2 * pair) * 4;
    float2 total = {0.0f, 0.0f};
    for (int rank = 0; rank < splits; ++rank) {
#pragma unroll
      for (int warp = 0; warp < kConsumerWarps; ++warp) {
        const float2 part = load_from_rank(address + warp * T::kTokens * T::kSumPitch * 4, rank);
        total.x += part.x;
        total.y += part.y;
      }
    }
    const bool both = n + 1 < args.out_features;
    if (args.bias) {
      total.x += __bfloat162float(args.bias[n]);
      if (both) total.y += __bfloat162float(args.bias[n + 1]);
    }
    __nv_bfloat16* y = args.y + static_cast<int64_t>(token) * args.out_features + n;
    if (both && args.out_features % 2 == 0) {
      *reinterpret_cast<__nv_bfloat162*>(y) = __float22bfloat162_rn(total);
    } else {
      y[0] = __float2bfloat16_rn(total.x);
      if (both) y[1] = __float2bfloat16_rn(total.y);
    }
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
  share.first_row = blockIdx.x / splits * T::kRows;
  const int steps = (args.in_features + kSegment - 1) / kSegment;
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
  float sums[T::kTilesM][T::kTilesN][4] = {};
  if (threadIdx.x < kConsumers) {
    consume<T>(shared, share.num_steps, sums);
  } else if (threadIdx.x == kConsumers) {
    produce<T>(weight_map, x_map, shared, share, args.num_tokens);
  }
  wait_for_previous();  // every thread that writes: the kernel before may read what y overwrites
  __syncthreads();      // no warp reads the stages any more
  if (threadIdx.x < kConsumers) store_sums<T>(reinterpret_cast<float*>(memory), sums);
  if (splits > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  write_part<T>(args, shared.base, share, splits);
  if (splits > 1) cluster_sync();  // no block leaves while others read it
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

// Segments of box_rows rows of a [rows, cols] matrix, seen as [rows, cols / kLine, kLine], so that
// a copy walks each row's four lines before the next row. Outside the matrix they are zero.
inline cudaError_t describe_matrix(CUtensorMap* map, const __nv_bfloat16* data, int64_t rows,
                                   int64_t cols, int64_t row_stride, int box_rows) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {kLine, static_cast<cuuint64_t>(cols / kLine),
                              static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {kLine * 2, static_cast<cuuint64_t>(row_stride) * 2};  // bytes
  const cuuint32_t box[] = {kLine, kConsumerWarps, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<__nv_bfloat16*>(data), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
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

template <typename T>
cudaError_t launch(const SkinnyLinearArgs& args, int splits, bool programmatic,
                   cudaStream_t stream) {
  CUtensorMap weight_map, x_map;
  cudaError_t error = describe_matrix(&weight_map, args.weight, args.out_features, args.in_features,
                                      args.weight_row_stride, T::kRows);
  if (error != cudaSuccess) return error;
  // Only real tokens are copied; what the others' columns multiply reaches no result.
  error = describe_matrix(&x_map, args.x, args.num_tokens, args.in_features, args.x_row_stride,
                          args.num_tokens);
  if (error != cudaSuccess) return error;
  error = allow_shared_memory<T>();
  if (error != cudaSuccess) return error;

  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = programmatic;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = splits;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((args.out_features + T::kRows - 1) / T::kRows * splits);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = T::kSharedBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = splits > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, skinny_linear_kernel<T>, weight_map, x_map, args, splits);
}

// One round of blocks over the chip: `splits` blocks a tile along K, and the share of the slots
// that they fill; 0 when one block a tile is more than a round.
struct Round {
  int splits;
  float fill;
};

// The multiprocessors that rounds are planned for. A constant: results follow from shapes alone.
constexpr int kMultiprocessors = 132;

template <typename T>
Round plan_round(int out_features, int in_features) {
  const int slots = kMultiprocessors * (227 * 1024 / (T::kSharedBytes + 1024));
  const int tiles = (out_features + T::kRows - 1) / T::kRows;
  const int steps = (in_features + kSegment - 1) / kSegment;
  if (tiles > slots) return {1, 0.0f};
  int splits = 1;
  while (splits < 8 && 2 * splits * tiles <= slots && steps >= 4 * splits) splits *= 2;
  return {splits, static_cast<float>(tiles * splits) / slots};
}

// Few rows: one round of blocks, of the tile that fills it better, two blocks with deep rings or
// three with shallow ones. Many rows, or neither fills: many rounds of kMany, unsplit.
template <typename Two, typename Three, typename Many>
cudaError_t launch_best(const SkinnyLinearArgs& args, bool programmatic, cudaStream_t stream) {
  const Round two = plan_round<Two>(args.out_features, args.in_features);
  const Round three = plan_round<Three>(args.out_features, args.in_features);
  constexpr float kFull = 0.75f;
  const bool small = args.out_features <= Many::kRows * kMultiprocessors;
  if (two.fill >= three.fill && (small || two.fill >= kFull)) {
    return launch<Two>(args, two.splits, programmatic, stream);
  }
  if (three.fill > two.fill && (small || three.fill >= kFull)) {
    return launch<Three>(args, three.splits, programmatic, stream);
  }
  return launch<Many>(args, 1, programmatic, stream);
}

// `programmatic`: start before the kernel ahead has finished. The weight is then read before that
// one's results are waited for: it must not be among them.
inline cudaError_t launch_skinny_linear(const SkinnyLinearArgs& args, bool programmatic,
                                        cudaStream_t stream) {
  if (args.num_tokens <= 8) {
    return launch_best<Tile<16, 8, 9>, Tile<32, 8, 3>, Tile<16, 8, 4>>(args, programmatic, stream);
  }
  if (args.num_tokens <= 16) {
    return launch_best<Tile<32, 16, 4>, Tile<32, 16, 3>, Tile<32, 16, 4>>(args, programmatic,
                                                                          stream);
  }
  return launch_best<Tile<32, 32, 3>, Tile<32, 32, 2>, Tile<64, 32, 2>>(args, programmatic, stream);
}

}  // namespace fusewright::gemm
