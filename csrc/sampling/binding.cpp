// fw_cuda::draw_tokens: argument checks and the output.
#include "../common/binding.h"

#include <optional>

#include "sample.h"

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

Element element_of(const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::BFloat16:
      return Element::kBFloat16;
    case ScalarType::Half:
      return Element::kHalf;
    case ScalarType::Float:
      return Element::kFloat;
    default:
      fail(kOp, "logits ", shape_of(logits), " have elements of ", logits.element_size(),
           " bytes, expected bfloat16, float16 or float32");
  }
}

void run(const SampleArgs& args, const Tensor& logits) {
  const Element element = element_of(logits);
  if (args.vocab > max_vocab(element)) {
    fail(kOp, "logits ", shape_of(logits), " have ", args.vocab, " columns, expected ",
         max_vocab(element), " or fewer of ", logits.element_size(), " bytes");
  }
  const cudaError_t error = launch_sample(args, element, current_stream(logits.get_device_index()));
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
      logits.size(0) >= limit / kMostBlocks || (logits.size(1) > 1 && logits.stride(1) != 1)) {
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
  const Tensor token_ids = empty({logits.size(0)}, aoti_torch_dtype_int32(), logits);
  args.token_ids = static_cast<int*>(token_ids.data_ptr());
  if (args.num_rows > 0) run(args, logits);
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
