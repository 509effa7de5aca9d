// Which pairs of a token and an expert go to which expert, for few tokens: every block makes the
// list by itself, in shared memory, which costs less than a launch would.
#pragma once

#include <cuda_runtime.h>

#include "moe.h"

namespace fusewright::moe {

// Pairs by expert, then by token: those of chosen expert c are pair[begin[c]] to
// pair[begin[c + 1] - 1]. Chosen experts ascend.
struct Plan {
  int num_chosen;
  int expert[kMaxPairs];
  int begin[kMaxPairs + 1];
  int pair[kMaxPairs], token[kMaxPairs];  // the pair's token
  int key[kMaxPairs], sorted[kMaxPairs];

  __device__ int count(int chosen) const { return begin[chosen + 1] - begin[chosen]; }
};

// By all threads of a block of kMaxPairs threads or more. Reads past the first-level cache: ids may
// have been written while this block was there. Not `real`: of no ids, to bring instructions near.
__device__ __forceinline__ void make_plan(Plan& plan, const ExpertsArgs& args, bool real = true) {
  const int num_pairs = args.num_tokens * args.top_k, thread = threadIdx.x;
  int key = args.num_experts;
  if (thread < num_pairs) {
    if (real) key = __ldcg(args.topk_ids + thread);
    if (key < 0 || key >= args.num_experts) key = args.num_experts;  // behind all experts
    plan.key[thread] = key;
  }
  if (num_pairs <= 32) {  // in one warp
    if (thread < 32) {
      int place = 0;
#pragma unroll 8
      for (int i = 0; i < num_pairs; ++i) {
        const int other = __shfl_sync(~0u, key, i);
        place += other < key || (other == key && i < thread);
      }
      if (thread < num_pairs) {
        plan.sorted[place] = key;
        plan.pair[place] = thread;
        plan.token[place] = thread / args.top_k;
      }
      __syncwarp();
    }
  } else {
    __syncthreads();
    int place = 0;
#pragma unroll 8
    for (int i = 0; i < num_pairs; ++i) {
      const int other = plan.key[i];
      place += other < key || (other == key && i < thread);
    }
    if (thread < num_pairs) {
      plan.sorted[place] = key;
      plan.pair[place] = thread;
      plan.token[place] = thread / args.top_k;
    }
    __syncthreads();
  }
  if (thread < 32) {
    int num_chosen = 0, num_valid = 0;
    for (int from = 0; from < num_pairs; from += 32) {
      const int i = from + thread;
      const int expert = i < num_pairs ? plan.sorted[i] : args.num_experts;
      const bool valid = expert < args.num_experts;
      const bool first = valid && (i == 0 || plan.sorted[i - 1] != expert);
      const unsigned firsts = __ballot_sync(~0u, first);
      if (first) {
        const int chosen = num_chosen + __popc(firsts & ((1u << thread) - 1));
        plan.expert[chosen] = expert;
        plan.begin[chosen] = i;
      }
      num_chosen += __popc(firsts);
      num_valid += __popc(__ballot_sync(~0u, valid));
    }
    if (thread == 0) {
      plan.begin[num_chosen] = num_valid;
      plan.num_chosen = num_chosen;
    }
  }
  __syncthreads();
}

}  // namespace fusewright::moe
