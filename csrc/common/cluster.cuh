// How the blocks of a cluster tell each other numbers: stores into the other's shared memory that
// count down a barrier there. The receiver waits for its bytes alone. A cluster's own barrier would
// cost more: to order memory, it is a fence for the whole GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device.cuh"

namespace fusewright {

__device__ __forceinline__ int block_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

__device__ __forceinline__ int blocks_in_cluster() {
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return static_cast<int>(blocks);
}

// A barrier in shared memory. A phase is over when one thread has called expect and that many bytes
// are there.
struct Inbox {
  uint64_t barrier;

  __device__ void init() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier))
                 : "memory");
  }

  __device__ void expect(int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
        "r"(bytes)
        : "memory");
  }

  __device__ void wait(int parity) { barrier_wait_cluster(shared_address(&barrier), parity); }

  // Stores `value` where `to` lies, but in the block of that rank, whose barrier counts the bytes.
  __device__ void send(unsigned long long* to, unsigned long long value, int rank) {
    asm volatile(
        "{\n\t"
        ".reg .b32 place, counted;\n\t"
        "mapa.shared::cluster.u32 place, %0, %2;\n\t"
        "mapa.shared::cluster.u32 counted, %1, %2;\n\t"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [place], %3, [counted];\n\t"
        "}" ::"r"(shared_address(to)),
        "r"(shared_address(&barrier)), "r"(rank), "l"(value)
        : "memory");
  }

  __device__ void send(float* to, float value, int rank) {
    asm volatile(
        "{\n\t"
        ".reg .b32 place, counted;\n\t"
        "mapa.shared::cluster.u32 place, %0, %2;\n\t"
        "mapa.shared::cluster.u32 counted, %1, %2;\n\t"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [place], %3, [counted];\n\t"
        "}" ::"r"(shared_address(to)),
        "r"(shared_address(&barrier)), "r"(rank), "f"(value)
        : "memory");
  }
};

// Returns where an address of this block's shared memory lies in the block of that rank.
__device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Does what Inbox::send does, with addresses in the other block.
__device__ __forceinline__ void send_pair(uint32_t to, float2 value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
          "r"(to),
      "f"(value.x), "f"(value.y), "r"(barrier)
      : "memory");
}

}  // namespace fusewright
