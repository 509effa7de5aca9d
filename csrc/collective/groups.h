// The groups of ranks that exchange data over peer memory, by the name of their process group.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "peers.h"

namespace fusewright::collective {

// A rank gives this to the others, so that they can write to its inbox and read its window.
struct Handle {
  cudaIpcMemHandle_t memory;
};

// Allocates this rank's inbox and window on the current device. Throws std::runtime_error, as all
// of these.
Handle open_group(const std::string& name, int rank, int world, int64_t part_bytes,
                  int64_t window_bytes);

// Maps the memory of all ranks, whose handles are in their order.
void connect_group(const std::string& name, const Handle* handles, int count);

// Ends all waits of the group's kernels, whose results are then void. Any thread may call it.
void abort_group(const std::string& name);

// Frees what the group holds. No kernel of it may run, here or on a peer.
void close_group(const std::string& name);

// The connected group; `device` is that of the tensors of a call.
Peers find_group(const char* op, const std::string& name, int device);

}  // namespace fusewright::collective
