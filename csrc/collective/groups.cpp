// Owns the memory of the groups. CUDA's interprocess handles map it into the other ranks, whose
// processes may see other GPUs than this one.
#include "groups.h"

#include <map>
#include <mutex>
#include <stdexcept>

namespace fusewright::collective {
namespace {

struct Group {
  Peers peers = {};
  int device = 0;
  unsigned* aborted = nullptr;  // host memory, at the host's address
  bool connected = false;
};

std::mutex mutex;
std::map<std::string, Group> groups;

void check(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // the next launch must not report it
  throw std::runtime_error("peer memory: " + what + ": " + cudaGetErrorString(error));
}

template <typename T>
T* allocate(int64_t bytes) {
  void* made = nullptr;
  check(cudaMalloc(&made, bytes), std::to_string(bytes) + " bytes");
  return static_cast<T*>(made);
}

Group& get(const std::string& name) {
  const auto found = groups.find(name);
  if (found == groups.end()) {
    throw std::runtime_error("peer memory: no group '" + name + "' is open in this process");
  }
  return found->second;
}

// The parts of a rank's memory, which begins with its inbox.
void place(Peers& peers, int rank, void* memory) {
  peers.inbox[rank] = static_cast<uint4*>(memory);
  peers.window[rank] = static_cast<char*>(memory) + 2 * peers.world * peers.packets * 16;
  peers.arrived[rank] = reinterpret_cast<unsigned*>(peers.window[rank] + peers.window_bytes);
}

void release(Group& group) {
  cudaSetDevice(group.device);
  for (int rank = 0; rank < group.peers.world; ++rank) {
    if (rank != group.peers.rank && group.peers.inbox[rank]) {
      cudaIpcCloseMemHandle(group.peers.inbox[rank]);
    }
  }
  cudaFree(group.peers.inbox[group.peers.rank]);
  cudaFree(group.peers.state);
  cudaFree(group.peers.posted);
  cudaFreeHost(group.aborted);
  cudaGetLastError();
}

}  // namespace

Handle open_group(const std::string& name, int rank, int world, int64_t part_bytes,
                  int64_t window_bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (groups.count(name)) {
    throw std::runtime_error("peer memory: a group '" + name + "' is open in this process already");
  }
  if (world < 2 || world > kMaxRanks || rank < 0 || rank >= world || part_bytes % 16 != 0 ||
      window_bytes % 16 != 0) {
    throw std::runtime_error(
        "peer memory: rank " + std::to_string(rank) + " of " + std::to_string(world) +
        " with parts of " + std::to_string(part_bytes) + " bytes and a window of " +
        std::to_string(window_bytes) + ", expected 2 to 8 ranks and multiples of 16");
  }
  Group group;
  Peers& peers = group.peers;
  peers.rank = rank;
  peers.world = world;
  peers.packets = part_bytes / 16;
  peers.window_bytes = window_bytes;
  Handle handle = {};
  try {
    check(cudaGetDevice(&group.device), "current device");
    const int64_t packets = 2 * world * peers.packets;
    const int64_t counts = world * sizeof(unsigned);
    place(peers, rank, allocate<char>(packets * 16 + window_bytes + counts));
    peers.state = allocate<unsigned>(2 * sizeof(unsigned));
    check(cudaMemset(peers.state, 0, 2 * sizeof(unsigned)), "its state");
    peers.posted = allocate<unsigned>(2 * counts);
    peers.taken = peers.posted + world;
    check(cudaMemset(peers.posted, 0, 2 * counts), "its counts");
    check(cudaMemset(peers.arrived[rank], 0, counts), "its counts");
    void* word = nullptr;
    check(cudaHostAlloc(&word, sizeof(unsigned), cudaHostAllocMapped), "a word of the host");
    group.aborted = static_cast<unsigned*>(word);
    *group.aborted = 0;
    void* mapped = nullptr;
    check(cudaHostGetDevicePointer(&mapped, group.aborted, 0), "a word of the host");
    peers.aborted = static_cast<const volatile unsigned*>(mapped);
    check(launch_clear(peers.inbox[rank], packets, nullptr), "clearing the inbox");
    check(cudaDeviceSynchronize(), "clearing the inbox");
    check(cudaIpcGetMemHandle(&handle.memory, peers.inbox[rank]), "a handle of the inbox");
  } catch (...) {
    release(group);
    throw;
  }
  groups.emplace(name, group);
  return handle;
}

void connect_group(const std::string& name, const Handle* handles, int count) {
  const std::lock_guard<std::mutex> lock(mutex);
  Group& group = get(name);
  if (count != group.peers.world) {
    throw std::runtime_error("peer memory: " + std::to_string(count) + " handles, expected " +
                             std::to_string(group.peers.world));
  }
  check(cudaSetDevice(group.device), "current device");
  for (int rank = 0; rank < count; ++rank) {
    if (rank == group.peers.rank) continue;
    void* mapped = nullptr;
    check(cudaIpcOpenMemHandle(&mapped, handles[rank].memory, cudaIpcMemLazyEnablePeerAccess),
          "mapping the memory of rank " + std::to_string(rank));
    place(group.peers, rank, mapped);
  }
  group.connected = true;
}

void abort_group(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = groups.find(name);
  if (found != groups.end()) *static_cast<volatile unsigned*>(found->second.aborted) = 1;
}

void close_group(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex);
  release(get(name));
  groups.erase(name);
}

Peers find_group(const char* op, const std::string& name, int device) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Group& group = get(name);
  if (!group.connected || group.device != device) {
    throw std::runtime_error(std::string(op) + ": the group '" + name + "' is " +
                             (group.connected ? "of cuda:" + std::to_string(group.device) +
                                                    ", x is on cuda:" + std::to_string(device)
                                              : "not connected"));
  }
  return group.peers;
}

}  // namespace fusewright::collective
