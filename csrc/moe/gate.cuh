// Gated activations with options, of experts with weights of four bits.
#pragma once

#include "../common/numbers.cuh"
#include "moe.h"

namespace fusewright::moe {

// NaN stays. A gate's tanh is the logistic function of a number twice as large.
__device__ __forceinline__ float gated_product(const Gate& how, float gate, float up) {
  gate = gate > how.limit ? how.limit : gate;
  up = up > how.limit ? how.limit : up < -how.limit ? -how.limit : up;
  float exponent = how.alpha * gate;
  if (how.activation == Activation::kGeluTanhMul) {
    exponent = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
  }
  return gate * reciprocal_approx(1.0f + exp2_approx(-kLog2E * exponent)) * (up + how.up_offset);
}

}  // namespace fusewright::moe
