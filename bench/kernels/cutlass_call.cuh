// CUTLASS's kernels that are rivals of ours share this: the tile's types, from the macros that
// gemm_rivals.py defines, and the call. Nothing of the package runs it.
#pragma once

#include <cuda_runtime.h>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

namespace {

using Element = cutlass::bfloat16_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using TileShape = cute::Shape<cute::Int<TILE_M>, cute::Int<TILE_N>, cute::_64>;
using ClusterShape = cute::Shape<cute::Int<CLUSTER_M>, cute::_1, cute::_1>;
constexpr bool kPingpong = PINGPONG, kStreamK = STREAM_K;
using Schedule = std::conditional_t<kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                    cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
using EpilogueSchedule = std::conditional_t<kPingpong, cutlass::epilogue::TmaWarpSpecialized,
                                            cutlass::epilogue::TmaWarpSpecializedCooperative>;
using Scheduler = std::conditional_t<kStreamK, cutlass::gemm::StreamKScheduler,
                                     cutlass::gemm::PersistentScheduler>;

// Writes sums of float as bfloat16, in the layout of y.
template <typename LayoutD>
using EpilogueOf = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, LayoutD, 8, Element,
    LayoutD, 8, EpilogueSchedule,
    cutlass::epilogue::fusion::LinearCombination<Element, float, void, float>>::CollectiveOp;

template <typename Epilogue>
using StagesBeside = cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
    sizeof(typename Epilogue::SharedStorage))>;

template <typename Mainloop, typename Epilogue>
using KernelOf = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                      Epilogue, Scheduler>;

// All calls have y = 1 * sums, on all multiprocessors of this device.
template <typename Arguments>
void complete(Arguments& args) {
  args.epilogue.thread.alpha = 1.0f;
  args.epilogue.thread.beta = 0.0f;
  cudaGetDevice(&args.hw_info.device_id);
  static const int multiprocessors =
      cutlass::KernelHardwareInfo::query_device_multiprocessor_count(args.hw_info.device_id);
  args.hw_info.sm_count = multiprocessors;
}

// Returns 0, or what CUTLASS or CUDA refused with.
template <typename Gemm>
int launch(const typename Gemm::Arguments& args, void* workspace, cudaStream_t stream) {
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

}  // namespace
