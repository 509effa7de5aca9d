// FlashInfer's own samplers behind a C interface, as the yardstick of ours: softmax of float logits
// with a temperature a row, then a draw from the probabilities, within top-k, top-p or both.

#include <flashinfer/sampling.cuh>

using namespace flashinfer::sampling;

extern "C" int fi_softmax(float* logits, float* probabilities, float* temperature, void* workspace,
                          size_t workspace_bytes, int rows, int vocab, cudaStream_t stream) {
  return OnlineSoftmax<float>(logits, probabilities, rows, vocab, temperature, 0.0f, workspace,
                              workspace_bytes, true, stream);
}

// top_k: [rows] of int with top_p, of float without; either may be null.
extern "C" int fi_draw(float* probabilities, void* top_k, float* top_p, int* tokens, bool* valid,
                       int rows, int vocab, uint64_t seed, cudaStream_t stream) {
  if (top_k && top_p) {
    return TopKTopPSamplingFromProb<float, int>(probabilities, static_cast<int*>(top_k), top_p,
                                                tokens, valid, nullptr, rows, 0, 0.0f, vocab, true,
                                                nullptr, seed, nullptr, 0, stream);
  }
  if (top_k) {
    return TopKSamplingFromProb<float, int>(probabilities, tokens, valid, nullptr,
                                            static_cast<float*>(top_k), rows, 0, vocab, true,
                                            nullptr, seed, nullptr, 0, stream);
  }
  if (top_p) {
    return TopPSamplingFromProb<float, int>(probabilities, tokens, valid, nullptr, top_p, rows,
                                            0.0f, vocab, true, nullptr, seed, nullptr, 0, stream);
  }
  return SamplingFromProb<float, int>(probabilities, tokens, valid, nullptr, rows, vocab, true,
                                      nullptr, seed, nullptr, 0, stream);
}
