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

__device__ __forceinline__ unsigned load_word(const unsigned* from) {
  unsigned v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ void store_word(unsigned* to, unsigned v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

__device__ __forceinline__ bool is_written(unsigned v) { return v != kUnwritten; }

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

// Reads the number of this epoch. Call it behind the wait for the kernels before, of which the last
// collective is one.
__device__ __forceinline__ unsigned epoch_of(const Peers& peers) {
  return *static_cast<volatile unsigned*>(peers.state);
}

// An epoch is known by its number. This finds its packets, and ends it.
struct Epoch {
  const Peers& peers;
  const unsigned number;

  __device__ Epoch(const Peers& p, unsigned n) : peers(p), number(n) {}

  // Where in an inbox the packets of a rank begin.
  __device__ int64_t part(int source) const {
    return (static_cast<int64_t>(number & 1) * peers.world + source) * peers.packets;
  }

  // One thread of every block calls this when all of its threads have read the number. The last
  // block begins the next epoch. Nobody waits for that while packets are on their way.
  __device__ void count() const {
    if (atomicAdd(peers.state + 1, 1) + 1 == gridDim.x) {
      peers.state[1] = 0;
      peers.state[0] = number + 1;
    }
  }

  // All threads of a block call this, to the same end.
  __device__ void count_block() const {
    __syncthreads();
    if (threadIdx.x == 0) count();
  }

  // Loads again until what a peer sends is there, or the group is aborted.
  template <typename V, typename Load>
  __device__ void poll(V& found, const Load& load) const {
    for (int polls = 1; !is_written(found); ++polls) {
      if (polls % kPollsAnAbortCheck == 0 && *peers.aborted) break;
      found = load();
    }
  }
};

// The two ends of an epoch, for threads that have whole packets.
template <int kWorld>
struct Exchange : Epoch {
  using Epoch::Epoch;

  __device__ void push_to(int rank, int64_t packet, uint4 v) const {
    store_packet(peers.inbox[rank] + part(peers.rank) + packet, v);
  }

  __device__ void push(int64_t packet, uint4 v) const {
#pragma unroll
    for (int step = 1; step < kWorld; ++step) {
      push_to((peers.rank + step) % kWorld, packet, v);
    }
  }

  __device__ uint4 pull_from(int source, int64_t packet) const {
    uint4* const at = peers.inbox[peers.rank] + part(source) + packet;
    uint4 found = load_packet(at);
    poll(found, [&] { return load_packet(at); });
    *at = unwritten();
    return found;
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
      poll(found[source], [&] { return load_packet(at); });
      *at = unwritten();
    }
  }
};

// The same for threads that have two elements, a word of a packet.
struct WordExchange : Epoch {
  using Epoch::Epoch;

  __device__ unsigned* word_of(int rank, int source, int64_t word) const {
    return reinterpret_cast<unsigned*>(peers.inbox[rank] + part(source)) + word;
  }

  __device__ void push(int64_t word, unsigned v) const {
    for (int rank = 0; rank < peers.world; ++rank) {
      if (rank != peers.rank) store_word(word_of(rank, peers.rank, word), v);
    }
  }

  // The word of every rank to `take`, in the order of the ranks; `own` is this one's.
  template <typename Take>
  __device__ void pull(int64_t word, unsigned own, const Take& take) const {
    unsigned found[kMaxRanks];
#pragma unroll
    for (int source = 0; source < kMaxRanks; ++source) {
      if (source >= peers.world) break;
      found[source] = source == peers.rank ? own : load_word(word_of(peers.rank, source, word));
    }
#pragma unroll
    for (int source = 0; source < kMaxRanks; ++source) {
      if (source >= peers.world) break;
      if (source != peers.rank) {
        unsigned* const at = word_of(peers.rank, source, word);
        poll(found[source], [&] { return load_word(at); });
        *at = kUnwritten;
      }
      take(found[source]);
    }
  }
};

}  // namespace fusewright::collective
