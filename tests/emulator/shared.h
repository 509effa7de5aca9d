// Shared memory and what guards it: addresses, barriers, copies from global memory, stores into
// other blocks of the cluster. An address of another block has that block's rank + 1 in its top
// byte.
#pragma once

#include <cuda.h>

#include "machine.h"

namespace emulator {

constexpr int kRankShift = 24;
constexpr uint32_t kOffsetMask = (1u << kRankShift) - 1;

// ---- addresses

inline uint32_t offset_of(const void* pointer) {
  const int64_t offset = static_cast<const char*>(pointer) - machine.block().memory;
  if (offset < 0 || offset >= kSharedBytes + kVariableBytes)
    fail("not an address of shared memory");
  return static_cast<uint32_t>(offset);
}

inline Block& owner_of(uint32_t address) {
  const uint32_t rank = address >> kRankShift;
  if (rank == 0) return machine.block();
  if (rank > machine.cluster().blocks.size()) fail("no such rank in the cluster");
  return machine.cluster().blocks[rank - 1];
}

// Returns where `bytes` of shared memory lie, all of which a kernel may touch at that address.
inline char* shared_memory(uint32_t address, int bytes, int alignment) {
  Block& block = owner_of(address);
  const int64_t begin = address & kOffsetMask, end = begin + bytes;
  const int64_t limit =
      begin < kSharedBytes ? kDynamicBegin + block.dynamic_bytes : kSharedBytes + kVariableBytes;
  if (begin < kDynamicBegin || end > limit) fail("beyond the block's shared memory");
  if (begin % alignment != 0) fail("misaligned address of shared memory");
  return block.memory + begin;
}

inline char* dynamic_memory() { return machine.block().memory + kDynamicBegin; }

// A `__shared__` variable, by where it is declared.
template <typename Variable>
Variable& shared_variable(const char* file, int line) {
  Block& block = machine.block();
  char*& place = block.variables[{file, line}];
  if (!place) {
    const int begin = (block.variable_bytes + 127) / 128 * 128;
    block.variable_bytes = begin + static_cast<int>(sizeof(Variable));
    if (block.variable_bytes > kVariableBytes) fail("no room for shared variables");
    place = block.memory + kSharedBytes + begin;
  }
  return *reinterpret_cast<Variable*>(place);
}

template <typename... Words>
FW_INLINED void store_shared(uint32_t address, Words... words) {
  char* to = shared_memory(address, (sizeof(Words) + ...), (sizeof(Words) + ...));
  note(Kind::kWrite, to, (sizeof(Words) + ...));
  ((memcpy(to, &words, sizeof(Words)), to += sizeof(Words)), ...);
}

template <typename... Words>
FW_INLINED void load_shared(uint32_t address, Words&... words) {
  const char* from = shared_memory(address, (sizeof(Words) + ...), (sizeof(Words) + ...));
  note(Kind::kRead, from, (sizeof(Words) + ...));
  ((memcpy(&words, from, sizeof(Words)), from += sizeof(Words)), ...);
}

template <typename Narrow>
FW_INLINED Narrow load_shared_as(uint32_t address) {
  Narrow value;
  load_shared(address, value);
  return value;
}

// An access that orders no others.
template <typename Value, typename Change>
FW_INLINED Value atomically(Value* at, const Change& change) {
  note(Kind::kAtomic, at, sizeof *at);
  Value before;
  act([&] { before = change(); });
  return before;
}

inline uint32_t address_in(uint32_t address, int rank) {
  return (address & kOffsetMask) | static_cast<uint32_t>(rank + 1) << kRankShift;
}

// ---- barriers

inline void advance_if_over(MemoryBarrier& barrier) {
  if (barrier.pending < 0) fail("more arrivals at a barrier than its count");
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.count;
  barrier.end();
  barrier.last = barrier.gathering.end(barrier.number_in_cluster, barrier.number);
}

FW_INLINED MemoryBarrier& barrier_at(uint32_t address) {
  note(Kind::kAtomic, shared_memory(address, 8, 8), 8);
  MemoryBarrier& barrier = owner_of(address).barriers[address & kOffsetMask];
  if (!barrier.initialized) fail("a barrier that is not initialized");
  return barrier;
}

FW_INLINED void init_barrier(uint32_t address, int count) {
  note(Kind::kWrite, shared_memory(address, 8, 8), 8);
  MemoryBarrier& barrier = owner_of(address).barriers[address & kOffsetMask];
  barrier = {};
  barrier.count = barrier.pending = count;
  barrier.initialized = true;
  barrier.number_in_cluster = machine.cluster().barriers++;
}

FW_INLINED void arrive(uint32_t address, int expected_bytes = 0) {
  MemoryBarrier& barrier = barrier_at(address);
  barrier.gathering.add(machine.thread->known.release());
  barrier.bytes += expected_bytes;
  --barrier.pending;
  advance_if_over(barrier);
}

// Bytes that are written beside the thread that begins it, and counted by a barrier.
struct Landing {
  MemoryBarrier* barrier;
  uint32_t phase;
  int64_t bytes;
  Known known;  // to the thread that began it

  FW_INLINED Landing(const void* to, int64_t bytes, uint32_t barrier_address)
      : barrier(&barrier_at(barrier_address)), phase(barrier->number + 1), bytes(bytes) {
    note_landing(to, bytes, barrier->number_in_cluster, phase);
    known = machine.thread->known.release();
  }

  void end() const {
    if (barrier->number + 1 != phase) fail("bytes are counted in another phase of their barrier");
    barrier->gathering.add(known);
    barrier->bytes -= bytes;
    advance_if_over(*barrier);
  }
};

FW_INLINED void wait_for_parity(uint32_t address, uint32_t parity) {
  const MemoryBarrier& barrier = barrier_at(address);
  while ((barrier.number & 1) == (parity & 1)) wait(barrier, "a barrier in shared memory");
  machine.thread->known.acquire(barrier.last);
}

// Returns the barrier's new phase in the block, and whether this thread ended the one before.
inline bool arrive_named(int id, int threads, bool vote = false) {
  if (id < 0 || id >= kMaxNamedBarriers) fail("no such named barrier");
  if (threads <= 0 || threads % kWarpLanes != 0) fail("a named barrier counts whole warps");
  NamedBarrier& barrier = machine.block().named[id];
  if (barrier.arrived > 0 && barrier.expected != threads) fail("a named barrier of two counts");
  barrier.expected = threads;
  barrier.any |= vote;
  barrier.gathering.add(machine.thread->known.release());
  if (++barrier.arrived < threads) return false;
  barrier.result[barrier.number & 1] = barrier.any;
  barrier.known[barrier.number & 1] = barrier.gathering.end();
  barrier.any = false;
  barrier.arrived = 0;
  barrier.end();
  return true;
}

inline bool sync_named(int id, int threads, bool vote = false) {
  NamedBarrier& barrier = machine.block().named[id];
  const uint32_t phase = barrier.number;
  if (!arrive_named(id, threads, vote)) wait(barrier, "a named barrier");
  machine.thread->known.acquire(barrier.known[phase & 1]);
  return barrier.result[phase & 1];
}

inline void arrive_cluster() {
  Cluster& cluster = machine.cluster();
  const int threads = static_cast<int>(cluster.blocks.size()) * machine.block_threads;
  cluster.gathering.add(machine.thread->known.release());
  if (++cluster.arrived < threads) return;
  cluster.known = cluster.gathering.end();
  cluster.arrived = 0;
  cluster.end();
}

inline void wait_cluster() {
  const uint32_t goal = ++machine.thread->cluster_waits;
  while (machine.cluster().number < goal) wait(machine.cluster(), "its cluster");
  machine.thread->known.acquire(machine.cluster().known);
}

// ---- copies

FW_INLINED void copy_async(uint32_t to, const void* from, int bytes, int read_bytes) {
  if (reinterpret_cast<uintptr_t>(from) % bytes != 0) fail("misaligned source of a copy");
  char probe[16];
  memcpy(probe, from, read_bytes);  // the address is valid now
  const Copy copy = {shared_memory(to, bytes, bytes), read_bytes > 0 ? from : nullptr, bytes};
  note_copy(copy.to, bytes);
  if (settings.timing == Timing::kEarly || (settings.timing == Timing::kRandom && toss(2))) {
    copy.apply();
  } else {
    machine.thread->open_copies.push_back(copy);
  }
}

inline void commit_copies() {
  machine.thread->copy_groups.push_back(std::move(machine.thread->open_copies));
  machine.thread->open_copies.clear();
  ++machine.thread->copy_group;
}

inline void wait_for_copies(size_t pending) {
  auto& groups = machine.thread->copy_groups;
  for (; groups.size() > pending; groups.pop_front()) {
    for (const Copy& copy : groups.front()) copy.apply();
  }
  machine.thread->know_ended(kCopies, machine.thread->copy_group, pending);
}

// An arrival when this thread's copies until now have landed.
FW_INLINED void arrive_after_copies(uint32_t address) {
  Thread& thread = *machine.thread;
  std::vector<Copy> copies = std::move(thread.open_copies);
  for (const auto& group : thread.copy_groups) {
    copies.insert(copies.end(), group.begin(), group.end());
  }
  thread.copy_groups.clear();
  thread.open_copies.clear();
  MemoryBarrier* barrier = &barrier_at(address);
  Known known = thread.known.release();
  known.own[kCopies + known.lane] = thread.copy_group++;
  happen([copies, barrier, known] {
    for (const Copy& copy : copies) copy.apply();
    barrier->gathering.add(known);
    --barrier->pending;
    advance_if_over(*barrier);
  });
}

// Stores into the block whose addresses these are, and takes the bytes off its barrier.
template <typename... Words>
FW_INLINED void store_remote(uint32_t to, uint32_t barrier_address, Words... words) {
  constexpr int kBytes = (sizeof(Words) + ...);
  char* place = shared_memory(to, kBytes, kBytes);
  const Landing landing(place, kBytes, barrier_address);
  Block* block = &owner_of(to);
  if (block != &owner_of(barrier_address)) fail("data and barrier lie in two blocks");
  const auto data = std::make_tuple(words...);
  happen([=] {
    if (block->running == 0) fail("a store into the shared memory of a block that has ended");
    char* at = place;
    std::apply(
        [&](const auto&... each) { ((memcpy(at, &each, sizeof each), at += sizeof each), ...); },
        data);
    landing.end();
  });
}

FW_INLINED void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier_address) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) fail("misaligned bulk copy");
  const Copy copy = {shared_memory(to, bytes, 16), from, bytes};
  const Landing landing(copy.to, bytes, barrier_address);
  happen([=] {
    copy.apply();
    landing.end();
  });
}

// ---- tensor maps, whose lines have 128 bytes that are swizzled

constexpr int kMaxDimensions = 5;
constexpr int kLineBytes = 128, kAtomLines = 8, kAtomBytes = kLineBytes * kAtomLines;

struct TensorMap {
  char* data;
  int dimensions, element_bytes;
  int64_t sizes[kMaxDimensions], strides[kMaxDimensions];
  int box[kMaxDimensions];
};
inline std::vector<TensorMap> tensor_maps;

inline CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t dimensions,
                             void* data, const cuuint64_t* sizes, const cuuint64_t* strides,
                             const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                             CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                             CUtensorMapFloatOOBfill) {
  TensorMap made = {};
  made.data = static_cast<char*>(data);
  made.dimensions = static_cast<int>(dimensions);
  made.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  bool valid = reinterpret_cast<uintptr_t>(data) % 16 == 0 && dimensions <= kMaxDimensions &&
               swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  for (cuuint32_t i = 0; valid && i < dimensions; ++i) {
    valid = sizes[i] > 0 && box[i] > 0 && box[i] <= 256;
    made.sizes[i] = static_cast<int64_t>(sizes[i]);
    made.box[i] = static_cast<int>(box[i]);
    if (i == 0) continue;
    valid &= strides[i - 1] % 16 == 0;
    made.strides[i] = static_cast<int64_t>(strides[i - 1]);
  }
  if (!valid || made.box[0] * made.element_bytes != kLineBytes) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t number = tensor_maps.size();
  tensor_maps.push_back(made);
  memcpy(map, &number, sizeof number);
  return CUDA_SUCCESS;
}

// One line of a box, whose place in the tensor is `at` but for the innermost dimension.
inline void copy_line(const TensorMap& map, const int64_t* at, char* line, int number) {
  bool inside = true;
  const char* from = map.data;
  for (int i = 1; i < map.dimensions; ++i) {
    inside &= at[i] >= 0 && at[i] < map.sizes[i];
    from += at[i] * map.strides[i];
  }
  for (int byte = 0; byte < kLineBytes; byte += map.element_bytes) {
    char* to = line + (byte ^ (number % kAtomLines) << 4);
    const int64_t element = at[0] + byte / map.element_bytes;
    if (inside && element >= 0 && element < map.sizes[0]) {
      memcpy(to, from + element * map.element_bytes, map.element_bytes);
    } else {
      memset(to, 0, map.element_bytes);
    }
  }
}

template <typename... Coordinates>
FW_INLINED void copy_box(uint32_t to, const void* described, uint32_t barrier_address,
                         Coordinates... coordinates) {
  uint64_t number;
  memcpy(&number, described, sizeof number);
  if (number >= tensor_maps.size()) fail("not a tensor map");
  const TensorMap map = tensor_maps[number];
  if (map.dimensions != sizeof...(coordinates)) fail("a tensor map of other dimensions");
  int lines = 1;
  for (int i = 1; i < map.dimensions; ++i) lines *= map.box[i];
  char* first = shared_memory(to, lines * kLineBytes, kAtomBytes);
  const Landing landing(first, lines * kLineBytes, barrier_address);
  const int64_t begin[] = {coordinates...};
  happen([=] {
    for (int line = 0; line < lines; ++line) {
      int64_t at[kMaxDimensions] = {begin[0]};
      for (int i = 1, rest = line; i < map.dimensions; ++i) {
        at[i] = begin[i] + rest % map.box[i];
        rest /= map.box[i];
      }
      copy_line(map, at, first + line * kLineBytes, line);
    }
    landing.end();
  });
}

}  // namespace emulator
