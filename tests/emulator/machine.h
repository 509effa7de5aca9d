// A GPU on one core of a CPU: every thread of a block is a fiber, and the scheduler decides which
// goes on. A fiber is left only where it waits, so whatever one does in between is as if at once.
// Copies, and whatever else a GPU may do late, are done late, early or at random, as settings say.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "races.h"

// A function that notes an access is inlined, so that its place in the program is the kernel's.
#define FW_INLINED inline __attribute__((always_inline))

inline uint3 gridDim, blockDim;  // of the launch

namespace emulator {

// kLate: a copy lands when its wait ends, a store of another block's when nothing else can go on.
// kEarly: at once. kRandom: either, and warps and lanes take turns at random.
enum class Timing { kLate, kEarly, kRandom };

// Which clusters run at a time: one after another, from the first or from the last on; or all.
enum class Order { kForward, kBackward, kTogether };

struct Settings {
  Timing timing = Timing::kLate;
  Order order = Order::kForward;
  int multiprocessors = 132;
};
inline Settings settings;
inline std::mt19937 dice;

constexpr int kSharedBytes = 232448;   // of a block, on an sm_90
constexpr int kVariableBytes = 32768;  // room of the emulator's own for `__shared__` variables
constexpr int kDynamicBegin = 1024;    // no address is 0
constexpr int kMaxNamedBarriers = 16;

// Ends the process: a kernel did what a GPU does not let pass, or might not. Names the thread.
[[noreturn]] void fail(const std::string& fault);

// Memory whose first and last byte border on pages that cannot be read (the last one up to 15 bytes
// from it); its bytes are 0xff.
void* guarded_memory(size_t bytes);

// ---- what waits

// Counts phases; whoever waits goes on when the phase has changed.
struct Phase {
  uint32_t number = 0;
  static inline uint64_t ended = 0;  // of all

  void end() {
    ++number;
    ++ended;
  }
};

struct MemoryBarrier : Phase {
  int count = 0, pending = 0;
  int64_t bytes = 0;
  bool initialized = false;
  int number_in_cluster = 0;
  Gathering gathering;
  ClockPointer last;  // what those knew that arrived in the phase before
};

struct NamedBarrier : Phase {
  int arrived = 0, expected = 0;
  bool any = false, result[2] = {};
  Gathering gathering;
  ClockPointer known[2];
};

constexpr int kExchangedWords = 6;

// The lanes of a warp that are at one instruction. Two buffers: a lane may be at the next one
// before all have read.
struct Meeting : Phase {
  uint32_t words[2][kWarpLanes][kExchangedWords];
  int arrived = 0;
  const char* instruction = nullptr;
  WarpGathering gatherings[2];
};

// ---- threads

struct Copy {
  void* to;
  const void* from;  // nullptr: zeros
  int bytes;
  void apply() const;  // whose accesses are noted where it begins
};

struct Block;
constexpr int kGroupRows = 64;  // of a warpgroup's multiplication
using Action = std::function<void()>;

struct Thread {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  Block* block = nullptr;
  int index = 0, cluster_waits = 0;
  bool ended = false;
  const Phase* waits_for = nullptr;
  uint32_t waited_number = 0;
  Known known;
  uint32_t copy_group = 1, multiplication_group = 1;  // that are open
  int used_rows = kGroupRows;                         // of what it multiplies
  const char* what = "";                              // it waits for, in words
  std::deque<std::vector<Copy>> copy_groups;          // committed, then
  std::vector<Copy> open_copies;                      // those that are not
  std::deque<std::vector<Action>> multiplications;
  std::vector<Action> open_multiplications;
  std::vector<Action> stores;  // to global memory, which other blocks do not see before a fence

  int lane() const { return index % kWarpLanes; }
  // Groups of copies or multiplications have ended, all but the last ones before the open one.
  void know_ended(Counter counter, uint32_t open, size_t pending) {
    uint32_t& count = known.own[counter + (counter == kCopies ? lane() : 0)];
    if (open > pending) count = std::max(count, open - 1 - static_cast<uint32_t>(pending));
  }
  void flush_stores() {
    for (const Action& store : stores) store();
    stores.clear();
  }
};

struct Cluster;

struct Block {
  uint3 index = {};
  int rank = 0, running = 0, dynamic_bytes = 0, variable_bytes = 0;
  Cluster* cluster = nullptr;
  char* memory = nullptr;
  Accesses accesses;
  std::map<std::pair<const char*, int>, char*> variables;
  std::map<uint32_t, MemoryBarrier> barriers;
  NamedBarrier named[kMaxNamedBarriers];
  std::vector<std::map<uint32_t, Meeting>> meetings;  // of each warp, by the mask of its lanes
};

struct Cluster : Phase {
  std::vector<Block> blocks;
  int arrived = 0, barriers = 0;
  Gathering gathering;
  ClockPointer known;
};

// Shared memory of all blocks that are on the machine together.
constexpr int64_t kArenaBytes = 1 << 19;  // of a block
constexpr int64_t kMostBlocks = 1 << 12;

struct Machine {
  Thread* thread = nullptr;  // that runs
  bool beside = false;       // what runs is not the thread's, but was begun by it
  int block_threads = 0;
  void* scheduler_stack = nullptr;
  std::vector<Action> events;  // that happen by themselves: data that is on its way
  Action previous;             // what the kernel ahead has still to write; may be none
  Phase previous_end;
  std::vector<std::unique_ptr<Thread>> threads;
  Action kernel;
  char* arena = nullptr;
  std::vector<Block*> blocks_in_arena;

  Block& block() { return *thread->block; }
  Cluster& cluster() { return *thread->block->cluster; }
};
inline Machine machine;

void leave_fiber();  // to the scheduler

inline void wait(const Phase& phase, const char* what) {
  Thread& thread = *machine.thread;
  thread.waits_for = &phase;
  thread.waited_number = phase.number;
  thread.what = what;
  leave_fiber();
}

inline bool toss(unsigned sides) { return dice() % sides == 0; }

// Does what is not the thread's own: its accesses are noted where it begins.
inline void act(const Action& action) {
  machine.beside = true;
  action();
  machine.beside = false;
}

// Something that happens while the thread goes on.
inline void happen(Action event) {
  if (settings.timing == Timing::kEarly) {
    act(event);
  } else {
    machine.events.push_back(std::move(event));
  }
}

// Waits for the end of the kernel ahead, which is as late as can be.
inline void wait_for_previous() {
  if (machine.previous) wait(machine.previous_end, "the kernel ahead");
}

// ---- launches

// Runs `machine.kernel` in every thread of these clusters, which are on the machine together.
void run_clusters(std::vector<std::unique_ptr<Cluster>>& clusters);

std::unique_ptr<Cluster> make_cluster(int first, int y, int blocks, int dynamic_bytes);

template <typename... Parameters, typename... Arguments>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                   Arguments&&... arguments) {
  const std::tuple<std::decay_t<Parameters>...> held(std::forward<Arguments>(arguments)...);
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  machine.block_threads = static_cast<int>(config->blockDim.x);
  machine.kernel = [&] { std::apply(kernel, held); };
  unsigned size = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) size = attribute.val.clusterDim.x;
  }
  if (config->gridDim.x % size != 0 || machine.block_threads % kWarpLanes != 0) {
    return cudaErrorInvalidConfiguration;
  }
  if (machine.previous) {  // also where all else happens early
    machine.events.push_back([] {
      std::exchange(machine.previous, nullptr)();
      machine.previous_end.end();
    });
  }
  std::vector<std::pair<int, int>> places;
  for (unsigned y = 0; y < config->gridDim.y; ++y) {
    for (unsigned x = 0; x < config->gridDim.x; x += size) places.push_back({x, y});
  }
  if (settings.order == Order::kBackward) places = {places.rbegin(), places.rend()};
  const size_t at_once = settings.order == Order::kTogether ? places.size() : 1;
  for (size_t done = 0; done < places.size(); done += at_once) {
    std::vector<std::unique_ptr<Cluster>> clusters;
    for (size_t i = done; i < done + at_once; ++i) {
      clusters.push_back(make_cluster(places[i].first, places[i].second, size,
                                      static_cast<int>(config->dynamicSmemBytes)));
    }
    run_clusters(clusters);
  }
  return cudaSuccess;
}

}  // namespace emulator
