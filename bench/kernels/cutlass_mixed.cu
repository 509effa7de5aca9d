// One kernel of CUTLASS's mixed-input mainloop for Hopper, y = x weight^T of bfloat16 by integers
// of four bits with scales of 128 columns, as a rival of our kernels. gemm_rivals.py compiles it
// for each of its tiles. Nothing of the package runs it.
//
// The weight is the tall operand, in two's complement, two neighbours of a row a byte, the first
// lowest; scales are bfloat16, [groups, out_features].
#include <cuda_runtime.h>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

namespace {

using Element = cutlass::bfloat16_t;
using Number = cutlass::int4b_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using TileShape = cute::Shape<cute::Int<TILE_M>, cute::Int<TILE_N>, cute::_64>;
using ClusterShape = cute::Shape<cute::Int<CLUSTER_M>, cute::_1, cute::_1>;
constexpr bool kPingpong = PINGPONG, kStreamK = STREAM_K;
static_assert(SWAP, "the weight is the tall operand");
constexpr int kGroup = 128;
using Schedule = std::conditional_t<kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                    cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
using EpilogueSchedule = std::conditional_t<kPingpong, cutlass::epilogue::TmaWarpSpecialized,
                                            cutlass::epilogue::TmaWarpSpecializedCooperative>;
using Scheduler = std::conditional_t<kStreamK, cutlass::gemm::StreamKScheduler,
                                     cutlass::gemm::PersistentScheduler>;
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Column, 8, Element, Column,
    8, EpilogueSchedule,
    cutlass::epilogue::fusion::LinearCombination<Element, float, void, float>>::CollectiveOp;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, cute::tuple<Number, Element>, Row, 32,
    Element, Column, 8, float, TileShape, ClusterShape,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename Epilogue::SharedStorage))>,
    Schedule>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                    Epilogue, Scheduler>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

typename Gemm::Arguments describe(const void* x, const void* weight, const void* scale, void* y,
                                  int rows, int out_features, int in_features) {
  const int m = out_features, n = rows, k = in_features;
  using cutlass::make_cute_packed_stride;
  const auto of_a = make_cute_packed_stride(typename Kernel::StrideA{}, cute::make_shape(m, k, 1));
  const auto of_b = make_cute_packed_stride(typename Kernel::StrideB{}, cute::make_shape(n, k, 1));
  const auto of_d = make_cute_packed_stride(typename Kernel::StrideD{}, cute::make_shape(m, n, 1));
  const auto of_scale =
      make_cute_packed_stride(typename Mainloop::StrideScale{}, cute::make_shape(m, k / kGroup, 1));
  typename Gemm::Arguments args{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {m, n, k, 1},
      {static_cast<const Number*>(weight), of_a, static_cast<const Element*>(x), of_b,
       static_cast<const Element*>(scale), of_scale, kGroup},
      {{}, nullptr, {}, static_cast<Element*>(y), of_d},
      {}};
  args.epilogue.thread.alpha = 1.0f;
  args.epilogue.thread.beta = 0.0f;
  cudaGetDevice(&args.hw_info.device_id);
  static const int multiprocessors =
      cutlass::KernelHardwareInfo::query_device_multiprocessor_count(args.hw_info.device_id);
  args.hw_info.sm_count = multiprocessors;
  return args;
}

}  // namespace

extern "C" int64_t workspace_bytes(int rows, int out_features, int in_features) {
  return Gemm::get_workspace_size(
      describe(nullptr, nullptr, nullptr, nullptr, rows, out_features, in_features));
}

// Returns 0, or what CUTLASS or CUDA refused with.
extern "C" int run(const void* x, const void* weight, const void* scale, void* y, int rows,
                   int out_features, int in_features, void* workspace, cudaStream_t stream) {
  const auto args = describe(x, weight, scale, y, rows, out_features, in_features);
  Gemm gemm;
  if (const auto status = gemm.can_implement(args); status != cutlass::Status::kSuccess) {
    return 1000 + static_cast<int>(status);
  }
  if (const auto status = gemm.initialize(args, workspace, stream);
      status != cutlass::Status::kSuccess) {
    return 2000 + static_cast<int>(status);
  }
  if (const auto status = gemm.run(stream); status != cutlass::Status::kSuccess) {
    return 3000 + static_cast<int>(status);
  }
  return static_cast<int>(cudaGetLastError());
}
