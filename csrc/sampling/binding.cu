// fw_cuda::draw_tokens: argument checks and the output; the work is in the header.
#include <optional>

#include "../common/binding.h"
#include "sample_launch.cuh"

namespace fusewright::sampling {
namespace {

constexpr const char* kOp = "fw_cuda::draw_tokens";

// The data of a column: one element a row of logits.
template <typename T>
T* column(const Tensor& t, const char* name, ScalarType dtype, const char* dtype_name,
          const Tensor& logits) {
  if (!t.is_cuda() || t.get_device_index() != logits.get_device_index()) {
    fail(kOp, name, " is not on logits' device, cuda:", logits.get_device_index());
  }
  if (t.dim() != 1 || t.size(0) != logits.size(0) || t.scalar_type() != dtype ||
      !t.is_contiguous()) {
    fail(kOp, name, " has shape ", shape_of(t), " and elements of ", t.element_size(),
         " bytes, expected a contiguous [", logits.size(0), "] of ", dtype_name);
  }
  return static_cast<T*>(t.data_ptr());
}

const float* floats(const std::optional<Tensor>& t, const char* name, const Tensor& logits) {
  return t ? column<const float>(*t, name, ScalarType::Float, "float32", logits) : nullptr;
}

template <typename F>
void run(SampleArgs& args, const Tensor& logits) {
  if (args.vocab > kMaxVocab<F>) {
    fail(kOp, "logits ", shape_of(logits), " have ", args.vocab, " columns, expected ",
         kMaxVocab<F>, " or fewer of ", logits.element_size(), " bytes");
  }
  const cudaError_t error = launch_sample<F>(args, current_stream(logits.get_device_index()));
  if (error != cudaSuccess) {
    fail(kOp, "launch on logits ", shape_of(logits), " failed: ", cudaGetErrorString(error));
  }
}

Tensor draw_tokens(const Tensor& logits, const Tensor& temperature,
                   const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p,
                   const std::optional<Tensor>& min_p, const Tensor& seeds, const Tensor& positions,
                   const std::optional<Tensor>& thresholds) {
  if (!logits.is_cuda()) fail(kOp, "logits are not on a CUDA device");
  const int64_t limit = int64_t{1} << 31;
  if (logits.dim() != 2 || logits.size(1) < 1 || logits.size(1) >= limit ||
      logits.size(0) >= limit / kMaxBlocks || (logits.size(1) > 1 && logits.stride(1) != 1)) {
    fail(kOp, "logits have shape ", shape_of(logits),
         ", expected [num_seqs, 1 or more] without gaps in rows");
  }
  SampleArgs args = {};
  args.logits = logits.data_ptr();
  args.row_stride = logits.stride(0);
  args.vocab = static_cast<int>(logits.size(1));
  args.num_rows = static_cast<int>(logits.size(0));
  args.temperature = floats(temperature, "temperature", logits);
  args.top_k =
      top_k ? column<const int>(*top_k, "top_k", ScalarType::Int, "int32", logits) : nullptr;
  args.top_p = floats(top_p, "top_p", logits);
  args.min_p = floats(min_p, "min_p", logits);
  args.seeds = column<const int64_t>(seeds, "seeds", ScalarType::Long, "int64", logits);
  args.positions = column<const int>(positions, "positions", ScalarType::Int, "int32", logits);
  args.thresholds = const_cast<float*>(floats(thresholds, "thresholds", logits));

  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const int64_t size = logits.size(0), stride = 1;
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_int32(),
                               aoti_torch_device_type_cuda(), logits.get_device_index(), &handle));
  const Tensor token_ids(handle);
  args.token_ids = static_cast<int*>(token_ids.data_ptr());
  if (args.num_rows == 0) return token_ids;
  if (logits.scalar_type() == ScalarType::BFloat16) {
    run<BFloat16>(args, logits);
  } else if (logits.scalar_type() == ScalarType::Half) {
    run<Half>(args, logits);
  } else if (logits.scalar_type() == ScalarType::Float) {
    run<Float>(args, logits);
  } else {
    fail(kOp, "logits ", shape_of(logits), " have elements of ", logits.element_size(),
         " bytes, expected bfloat16, float16 or float32");
  }
  return token_ids;
}

}  // namespace
}  // namespace fusewright::sampling

STABLE_TORCH_LIBRARY_FRAGMENT(fw_cuda, m) {
  m.def(
      "draw_tokens(Tensor logits, Tensor temperature, Tensor? top_k, Tensor? top_p, "
      "Tensor? min_p, Tensor seeds, Tensor positions, Tensor(a!)? thresholds=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fw_cuda, CUDA, m) {
  m.impl("draw_tokens", TORCH_BOX(&fusewright::sampling::draw_tokens));
}
