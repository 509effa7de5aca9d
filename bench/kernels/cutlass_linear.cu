// One kernel of CUTLASS's collective builders for y = x weight^T, bfloat16 with float sums, as a
// rival of our kernels. gemm_rivals.py compiles it for each of its tiles. Nothing of the package
// runs it.
#include "cutlass_call.cuh"

namespace {

// The weight may be the tall operand: y is then the transposed result.
constexpr bool kSwap = SWAP;
using LayoutD = std::conditional_t<kSwap, Column, Row>;
using Epilogue = EpilogueOf<LayoutD>;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, Row, 8, Element, Column, 8, float,
    TileShape, ClusterShape, StagesBeside<Epilogue>, Schedule>::CollectiveOp;
using Kernel = KernelOf<Mainloop, Epilogue>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

typename Gemm::Arguments describe(const void* x, const void* weight, void* y, int rows,
                                  int out_features, int in_features) {
  const void *a = kSwap ? weight : x, *b = kSwap ? x : weight;
  const int m = kSwap ? out_features : rows, n = kSwap ? rows : out_features, k = in_features;
  using cutlass::make_cute_packed_stride;
  const auto of_a = make_cute_packed_stride(typename Kernel::StrideA{}, cute::make_shape(m, k, 1));
  const auto of_b = make_cute_packed_stride(typename Kernel::StrideB{}, cute::make_shape(n, k, 1));
  const auto of_d = make_cute_packed_stride(typename Kernel::StrideD{}, cute::make_shape(m, n, 1));
  typename Gemm::Arguments args{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {m, n, k, 1},
      {static_cast<const Element*>(a), of_a, static_cast<const Element*>(b), of_b},
      {{}, nullptr, {}, static_cast<Element*>(y), of_d},
      {}};
  complete(args);
  return args;
}

}  // namespace

extern "C" int64_t workspace_bytes(int rows, int out_features, int in_features) {
  return Gemm::get_workspace_size(
      describe(nullptr, nullptr, nullptr, rows, out_features, in_features));
}

// Returns 0, or what CUTLASS or CUDA refused with.
extern "C" int run(const void* x, const void* weight, void* y, int rows, int out_features,
                   int in_features, void* workspace, cudaStream_t stream) {
  return launch<Gemm>(describe(x, weight, y, rows, out_features, in_features), workspace, stream);
}
