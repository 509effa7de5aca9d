// One kernel of CUTLASS's mixed-input mainloop for Hopper, y = x weight^T of bfloat16 by integers
// of four bits with scales of 128 columns, as a rival of our kernels. gemm_rivals.py compiles it
// for each of its tiles. Nothing of the package runs it.
//
// The weight is the tall operand, in two's complement, two neighbours of a row a byte, the first
// lowest; scales are bfloat16, [groups, out_features].
#include "cutlass_call.cuh"

namespace {

using Number = cutlass::int4b_t;
static_assert(SWAP, "the weight is the tall operand");
constexpr int kGroup = 128;
using Epilogue = EpilogueOf<Column>;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, cute::tuple<Number, Element>, Row, 32,
    Element, Column, 8, float, TileShape, ClusterShape, StagesBeside<Epilogue>,
    Schedule>::CollectiveOp;
using Kernel = KernelOf<Mainloop, Epilogue>;
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
  complete(args);
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
  return launch<Gemm>(describe(x, weight, scale, y, rows, out_features, in_features), workspace,
                      stream);
}
