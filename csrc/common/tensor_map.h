// The driver's description of tensors for the copy engine.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace fusewright {

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

}  // namespace fusewright
