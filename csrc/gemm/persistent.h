// What the op fw_cuda::persistent_linear and its kernels agree on. Plain C++: neither torch nor
// device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "skinny.h"

namespace fusewright::gemm {

constexpr int kMaxPersistentTokens = 1 << 24;

// Runs a layer of kBf16 or kFp8 with the epilogue kSiluMul or kGeluTanhMul and results of bfloat16,
// for up to kMaxPersistentTokens; out_features is a multiple of 8 (persistent_linear.cuh).
cudaError_t launch_persistent_linear(const SkinnyLinearArgs& args, Operands operands,
                                     bool programmatic, cudaStream_t stream);

// The same of FP8 alone.
cudaError_t launch_persistent_fp8(const SkinnyLinearArgs& args, bool programmatic,
                                  cudaStream_t stream);

}  // namespace fusewright::gemm
