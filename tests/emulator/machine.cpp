// The scheduler of the emulated machine, and the CUDA runtime's functions that launches call.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <limits>

#include "emulator.h"

// Saves the registers that a call must keep on the one stack and takes them from the other.
asm(R"(
.globl emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void emulator_switch(void** from, void* to);

namespace emulator {
namespace {

constexpr size_t kPage = 4096, kStackBytes = 32 * kPage;
constexpr int kSavedRegisters = 6;
// At random a warp stands still while others go far.
constexpr unsigned kSleepOdds = 50, kLongestSleep = 300;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// The lowest word of each stack, which stays.
constexpr uint64_t kStackEnd = 0x57ac6e4d57ac6e4d;

void end_thread() {
  Thread& thread = *machine.thread;
  if (memcmp(thread.stack, &kStackEnd, sizeof kStackEnd) != 0) fail("a stack has overflowed");
  thread.flush_stores();
  thread.ended = true;
  --thread.block->running;
}

void run_thread() {
  machine.kernel();
  end_thread();
  leave_fiber();
}

// Stacks of a block at once, as the number of mappings is limited.
char* make_stack() {
  constexpr int kAtOnce = 128;
  static char* next = nullptr;
  static int left = 0;
  if (left == 0) {
    void* stacks = mmap(nullptr, kAtOnce * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) fail("no memory for stacks");
    next = static_cast<char*>(stacks);
    left = kAtOnce;
  }
  char* stack = next;
  memcpy(stack, &kStackEnd, sizeof kStackEnd);
  next += kStackBytes;
  --left;
  return stack;
}

void prepare(Thread& thread, Block& block, int index) {
  char* stack = thread.stack ? thread.stack : make_stack();
  thread = {};
  thread.stack = stack;
  thread.block = &block;
  thread.index = index;
  const int warp = index / kWarpLanes, warps = machine.block_threads / kWarpLanes;
  thread.known = Known(block.rank * warps + warp, index % kWarpLanes);
  void** top = reinterpret_cast<void**>(stack + kStackBytes - 64);
  *--top = nullptr;  // where run_thread would return to
  *--top = reinterpret_cast<void*>(&run_thread);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  thread.stack_pointer = top;
}

char* take_memory(Block& block) {
  if (!machine.arena) {
    void* arena = mmap(nullptr, kArenaBytes * kMostBlocks, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) fail("no memory for blocks");
    machine.arena = static_cast<char*>(arena);
  }
  if (machine.blocks_in_arena.size() == kMostBlocks) fail("too many blocks");
  machine.blocks_in_arena.push_back(&block);
  return machine.arena + (machine.blocks_in_arena.size() - 1) * kArenaBytes;
}

bool can_run(const Thread& thread) {
  return !thread.ended && (!thread.waits_for || thread.waits_for->number != thread.waited_number);
}

void resume(Thread& thread) {
  thread.waits_for = nullptr;
  machine.thread = &thread;
  emulator_switch(&machine.scheduler_stack, thread.stack_pointer);
  machine.thread = nullptr;
}

// Lets each lane go on that can; whether one could.
bool run_warp(Thread* const* lanes) {
  const unsigned first = settings.timing == Timing::kRandom ? dice() % kWarpLanes : 0;
  bool ran = false;
  for (unsigned i = 0; i < kWarpLanes; ++i) {
    Thread& thread = *lanes[(first + i) % kWarpLanes];
    if (!can_run(thread)) continue;
    resume(thread);
    ran = true;
  }
  return ran;
}

template <typename Condition>
bool any_of(const std::vector<Thread*>& threads, const Condition& condition) {
  return std::any_of(threads.begin(), threads.end(),
                     [&](const Thread* thread) { return condition(*thread); });
}

void happen_now(size_t which) {
  std::swap(machine.events[which], machine.events.back());
  const Action event = std::move(machine.events.back());
  machine.events.pop_back();
  event();
}

std::string name(const Thread& thread) {
  return "thread " + std::to_string(thread.index) + " of block " +
         std::to_string(thread.block->index.x) + ", " + std::to_string(thread.block->index.y);
}

[[noreturn]] void fail_deadlocked(const std::vector<Thread*>& threads) {
  std::map<std::string, int> waiting;
  for (const Thread* thread : threads) {
    if (thread->ended) continue;
    ++waiting["block " + std::to_string(thread->block->index.x) + ", " +
              std::to_string(thread->block->index.y) + ", warp " +
              std::to_string(thread->index / kWarpLanes) + ": " + thread->what];
  }
  std::string report = "deadlock";
  for (const auto& [where, count] : waiting) {
    report += "\n  " + where + " (" + std::to_string(count) + " lanes)";
  }
  fail(report);
}

void check_end(const Block& block) {
  for (const NamedBarrier& barrier : block.named) {
    if (barrier.arrived) fail("a named barrier is half full at the end of a block");
  }
  const char* behind = block.memory + kDynamicBegin + block.dynamic_bytes;
  const char* end = block.memory + kSharedBytes;
  if (std::any_of(behind, end, [](char byte) { return byte != '\xff'; })) {
    fail("a block wrote behind its dynamic shared memory");
  }
}

}  // namespace

void fail(const std::string& fault) {
  fflush(stdout);
  const std::string where = machine.thread ? ", in " + name(*machine.thread) : "";
  printf("FAULT %s%s\n", fault.c_str(), where.c_str());
  fflush(stdout);
  _exit(3);
}

void Copy::apply() const {
  if (from) {
    memcpy(to, from, bytes);
  } else {
    memset(to, 0, bytes);
  }
}

void leave_fiber() { emulator_switch(&machine.thread->stack_pointer, machine.scheduler_stack); }

void* guarded_memory(size_t bytes) {
  const size_t size = (bytes + kPage - 1) / kPage * kPage;
  char* pages = static_cast<char*>(
      mmap(nullptr, size + 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(pages, kPage, PROT_NONE);
  mprotect(pages + kPage + size, kPage, PROT_NONE);
  memset(pages + kPage, 0xff, size);
  return pages + kPage + (size - bytes) / 16 * 16;
}

std::unique_ptr<Cluster> make_cluster(int first, int y, int blocks, int dynamic_bytes) {
  if (kDynamicBegin + dynamic_bytes > kSharedBytes) fail("too much dynamic shared memory");
  auto cluster = std::make_unique<Cluster>();
  cluster->blocks.resize(blocks);
  for (int rank = 0; rank < blocks; ++rank) {
    Block& block = cluster->blocks[rank];
    block.index = {static_cast<unsigned>(first + rank), static_cast<unsigned>(y), 0};
    block.rank = rank;
    block.running = machine.block_threads;
    block.dynamic_bytes = dynamic_bytes;
    block.cluster = cluster.get();
    block.memory = take_memory(block);
    memset(block.memory, 0xff, kSharedBytes + kVariableBytes);
    block.meetings.resize(machine.block_threads / kWarpLanes);
  }
  return cluster;
}

void run_clusters(std::vector<std::unique_ptr<Cluster>>& clusters) {
  const bool random = settings.timing == Timing::kRandom;
  std::vector<Thread*> threads;
  for (const auto& cluster : clusters) {
    for (Block& block : cluster->blocks) {
      for (int i = 0; i < machine.block_threads; ++i) {
        if (threads.size() == machine.threads.size()) {
          machine.threads.push_back(std::make_unique<Thread>());
        }
        threads.push_back(machine.threads[threads.size()].get());
        prepare(*threads.back(), block, i);
      }
    }
  }
  const size_t warps = threads.size() / kWarpLanes;
  std::vector<int64_t> asleep(warps, 0);  // until that round
  for (size_t warp = 0; random && warp < warps; warp += machine.block_threads / kWarpLanes) {
    const int64_t until = toss(4) ? kNever : 0;  // a block may begin when others must wait for it
    std::fill_n(asleep.begin() + warp, machine.block_threads / kWarpLanes, until);
  }
  for (int64_t round = 0;; ++round) {
    bool ran = false;
    for (size_t turn = 0; turn < warps; ++turn) {
      const size_t warp = random ? dice() % warps : turn;
      if (asleep[warp] > round) continue;
      ran |= run_warp(&threads[warp * kWarpLanes]);
      if (random && toss(kSleepOdds)) asleep[warp] = round + dice() % kLongestSleep;
    }
    while (random && !machine.events.empty() && !toss(3)) {
      happen_now(dice() % machine.events.size());
    }
    if (ran) continue;
    if (any_of(threads, can_run)) {
      std::fill(asleep.begin(), asleep.end(), 0);
      continue;
    }
    if (!any_of(threads, [](const Thread& thread) { return !thread.ended; })) break;
    if (machine.events.empty()) fail_deadlocked(threads);
    // Until a phase ends, nobody can go on.
    const uint64_t ended = Phase::ended;
    do {
      happen_now(random ? dice() % machine.events.size() : 0);
    } while (!random && !machine.events.empty() && Phase::ended == ended);
  }
  while (!machine.events.empty()) happen_now(machine.events.size() - 1);
  for (const auto& cluster : clusters) {
    for (const Block& block : cluster->blocks) check_end(block);
  }
  machine.blocks_in_arena.clear();
}

}  // namespace emulator

// ---- the CUDA runtime: one device, as settings say

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulator::settings.multiprocessors;
  return cudaSuccess;
}

// Two blocks a multiprocessor.
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*,
                                           const cudaLaunchConfig_t* config) {
  const int blocks = static_cast<int>(config->attrs[0].val.clusterDim.x);
  *clusters = emulator::settings.multiprocessors * 2 / blocks;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&emulator::encode_tiled);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
