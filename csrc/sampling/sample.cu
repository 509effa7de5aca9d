// The kernel of draw_tokens for each type of logits.
#include "sample_launch.cuh"

namespace fusewright::sampling {

template <typename Use>
auto with_keys(Element element, const Use& use) {
  switch (element) {
    case Element::kBFloat16:
      return use(BFloat16{});
    case Element::kHalf:
      return use(Half{});
    default:
      return use(Float{});
  }
}

int max_vocab(Element element) {
  return with_keys(element, [](auto keys) { return kMaxVocab<decltype(keys)>; });
}

cudaError_t launch_sample(const SampleArgs& args, Element element, cudaStream_t stream) {
  return with_keys(element, [&](auto keys) { return launch_sample<decltype(keys)>(args, stream); });
}

}  // namespace fusewright::sampling
