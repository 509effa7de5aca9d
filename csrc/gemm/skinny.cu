// The kernels of the streaming GEMMs for each type of operands.
#include "skinny_launch.cuh"

namespace fusewright::gemm {

cudaError_t launch_skinny_linear(const SkinnyLinearArgs& args, Operands operands, bool programmatic,
                                 cudaStream_t stream) {
  const auto with = [&](auto format, auto most) {
    return launch_tokens<decltype(format), decltype(most)::value>(args, OneRank{}, programmatic,
                                                                  stream);
  };
  using Most = std::integral_constant<int, kMaxSkinnyTokens>;
  using MostWide = std::integral_constant<int, kMaxWideTokens>;
  switch (operands) {
    case Operands::kBf16:
      return with(Bf16{}, Most{});
    case Operands::kFp8:
      return with(Fp8{}, Most{});
    case Operands::kFp8ByBf16:
      return with(Fp8ByBf16{}, MostWide{});
    case Operands::kFp8BlocksByBf16:
      return with(Fp8BlocksByBf16{}, MostWide{});
    case Operands::kFp8Blocks:
      return with(Fp8Blocks{}, Most{});
    default:
      return launch_packed_linear(args, operands, programmatic, stream);
  }
}

}  // namespace fusewright::gemm
