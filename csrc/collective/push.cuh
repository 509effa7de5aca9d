// How ranks exchange packets: a rank stores 16 bytes into a peer's inbox, and the peer polls its
// own memory until they are there. The data say so themselves: a word of a packet that holds two
// negative zeros has not been written. Senders turn negative zeros into positive ones.
//
// Parts of an inbox are used in turn, by the parity of the epoch. A reader marks a packet as
// unwritten as soon as it has it. Two parts are enough: a rank that begins epoch e + 2 has received
// what its peers sent in e + 1, so they have finished e, and with it the marks. Nothing on the host
// counts, so graphs may be replayed and interleaved with other launches.
#pragma once

#include <cuda_runtime.h>

#include "peers.h"

namespace fusewright::collective {

constexpr unsigned kUnwritten = 0x80008000u;
constexpr int kPollsAnAbortCheck = 1 << 12;

__device__ __forceinline__ uint4 load_packet(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_packet(uint4* to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Each word arrives as a whole, but not the packet.
__device__ __forceinline__ bool is_written(uint4 v) {
  return v.x != kUnwritten && v.y != kUnwritten && v.z != kUnwritten && v.w != kUnwritten;
}

__device__ __forceinline__ uint4 unwritten() {
  return {kUnwritten, kUnwritten, kUnwritten, kUnwritten};
}

__device__ __forceinline__ unsigned without_negative_zeros(unsigned pair) {
  return pair & ~__vcmpeq2(pair, kUnwritten);
}

__device__ __forceinline__ uint4 sendable(uint4 v) {
  return {without_negative_zeros(v.x), without_negative_zeros(v.y), without_negative_zeros(v.z),
          without_negative_zeros(v.w)};
}

// The two ends of one epoch.
template <int kWorld>
struct Exchange {
  const Peers& peers;
  const unsigned epoch;

  // Only behind the wait for the kernels before, of which the last collective is one.
  __device__ explicit Exchange(const Peers& p)
      : peers(p), epoch(*static_cast<volatile unsigned*>(p.state)) {}

  __device__ int64_t part(int source) const {
    return (static_cast<int64_t>(epoch & 1) * kWorld + source) * peers.packets;
  }

  __device__ void push(int64_t packet, uint4 v) const {
    const int64_t at = part(peers.rank) + packet;
#pragma unroll
    for (int step = 1; step < kWorld; ++step) {
      store_packet(peers.inbox[(peers.rank + step) % kWorld] + at, v);
    }
  }

  // The packet of every rank, in the order of the ranks; `own` is this one's.
  __device__ void pull(int64_t packet, uint4 own, uint4 (&found)[kWorld]) const {
    uint4* const inbox = peers.inbox[peers.rank] + packet;
#pragma unroll
    for (int source = 0; source < kWorld; ++source) {
      found[source] = source == peers.rank ? own : load_packet(inbox + part(source));
    }
#pragma unroll
    for (int source = 0; source < kWorld; ++source) {
      if (source == peers.rank) continue;
      uint4* const at = inbox + part(source);
      for (int polls = 1; !is_written(found[source]); ++polls) {
        if (polls % kPollsAnAbortCheck == 0 && *peers.aborted) break;
        found[source] = load_packet(at);
      }
      *at = unwritten();
    }
  }

  // Called by all threads of every block behind their first push: they have read the epoch. The
  // last block begins the next one. Nobody waits for that while packets are on their way.
  __device__ void count_block() const {
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(peers.state + 1, 1) + 1 == gridDim.x) {
      peers.state[1] = 0;
      peers.state[0] = epoch + 1;
    }
  }
};

}  // namespace fusewright::collective
