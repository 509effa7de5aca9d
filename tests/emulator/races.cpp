// The race detector, and what g++ calls at each access of a source compiled for it.
#include "races.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>

#include "machine.h"

extern "C" const char __executable_start;

namespace emulator {
namespace {

constexpr int kWordBytes = 4;

void raise(uint32_t* counts, const uint32_t* to, size_t size) {
  for (size_t i = 0; i < size; ++i) counts[i] = std::max(counts[i], to[i]);
}

// The join of two clocks. Lanes of a warp ask for the same one, one after another.
ClockPointer joined(const ClockPointer& a, const ClockPointer& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  static ClockPointer last_a, last_b, result;
  if (last_a == a && last_b == b) return result;
  Clock both = *a;
  both.join(*b);
  last_a = a, last_b = b;
  const bool is_b = both.warps == b->warps && both.barriers == b->barriers;
  return result = is_b ? b : std::make_shared<const Clock>(std::move(both));
}

void fence_counts(Counts& counts) { std::copy_n(counts.begin(), kFenced - 2, &counts[kFenced]); }

// ---- what is ordered

const Counts* counts_of(const Known& known, int warp) {
  if (warp == known.warp) return &known.own;
  const bool there = known.others && warp < static_cast<int>(known.others->warps.size());
  return there ? &known.others->warps[warp] : nullptr;
}

// The lanes of an access of which more is to be known than is; `beside` is kFenced or 0.
uint32_t unknown_lanes(const Access& access, const Known& known, int beside) {
  if (access.counter == kBarrierBytes) {
    const bool there = known.others && access.number < known.others->barriers.size();
    return !there || known.others->barriers[access.number] < access.count;
  }
  const Counts* counts = counts_of(known, access.number);
  if (!counts) return access.lanes;
  if (access.counter == kLanes && !beside && (*counts)[kLeast] >= access.count) return 0;
  uint32_t unknown = 0;
  for (uint32_t left = access.lanes; left; left &= left - 1) {
    const int lane = std::countr_zero(left);
    if ((*counts)[beside + access.counter + lane] < access.count) unknown |= 1u << lane;
  }
  return unknown;
}

bool only_reads(Kind kind) { return kind == Kind::kRead || kind == Kind::kMultiplied; }

bool may_meet(Kind a, Kind b) {
  return (only_reads(a) && only_reads(b)) || (a == Kind::kAtomic && b == Kind::kAtomic);
}

// ---- reports

// The lines of csrc/ at these places in the program.
std::string lines_of(const std::array<uint32_t, 2>& place) {
  char command[128];
  snprintf(command, sizeof command, "addr2line -s -i -e /proc/%d/exe 0x%x 0x%x", getpid(),
           place[0] - 1, place[1] - 1);
  std::string lines;
  FILE* const found = popen(command, "r");
  for (char line[256]; found && fgets(line, sizeof line, found);) {
    const std::string text(line, strcspn(line, " \n"));
    if (text.find(".cu") != text.npos) lines += (lines.empty() ? "" : " in ") + text;
  }
  if (found) pclose(found);
  return lines;
}

std::string description(const Access& access, uint32_t lanes) {
  static const char* const kNames[] = {"a read", "a write", "an atomic access",
                                       "an arrival of bytes", "a read by MMAs"};
  std::string text = kNames[static_cast<int>(access.kind)];
  if (access.counter != kBarrierBytes) {
    const int warps = machine.block_threads / kWarpLanes, warp = access.number % warps;
    text += access.counter == kCopies ? " by cp.async" : "";
    text += " of thread " + std::to_string(warp * kWarpLanes + std::countr_zero(lanes)) +
            " of rank " + std::to_string(access.number / warps);
  }
  return text + " (" + lines_of(access.place) + ")";
}

[[noreturn]] void report(const char* what, const Access& before, uint32_t lanes,
                         const Access& access, const Block& block, uint32_t index) {
  fail(std::string(what) + " at byte " + std::to_string(index * kWordBytes) + " of rank " +
       std::to_string(block.rank) + ": " + description(before, lanes) + " and " +
       description(access, access.lanes));
}

// ---- accesses

void note_word(Block& block, uint32_t index, const Access& access, const Known& known) {
  std::vector<Access>& word = block.accesses.word(index);
  const auto is_of = [&](const Access& other) {
    return other.counter == access.counter && other.number == access.number &&
           other.count == access.count && other.kind == access.kind;
  };
  for (const Access& other : word) {
    const bool again = (other.lanes & access.lanes) && !(access.bytes & ~other.bytes);
    if (again && is_of(other)) return;
  }
  size_t kept = 0;
  for (Access& other : word) {
    if (const uint8_t both = other.bytes & access.bytes) {
      const uint32_t unknown = unknown_lanes(other, known, 0);
      if (unknown && !may_meet(other.kind, access.kind)) {
        report("race", other, unknown, access, block, index);
      }
      if (access.kind == Kind::kMultiplied && !only_reads(other.kind) &&
          other.counter != kBarrierBytes) {
        const uint32_t unfenced = unknown_lanes(other, known, kFenced);
        if (unfenced) report("no proxy fence", other, unfenced, access, block, index);
      }
      // Whatever is ordered behind this access is then ordered behind the other one.
      const bool covers =
          access.kind == Kind::kWrite || access.kind == Kind::kLanded || access.kind == other.kind;
      if (!unknown && covers) other.bytes &= ~both;
    }
    if (other.bytes) word[kept++] = other;
  }
  word.resize(kept);
  for (Access& other : word) {
    if (is_of(other) && other.bytes == access.bytes && other.place == access.place) {
      other.lanes |= access.lanes;
      return;
    }
  }
  word.push_back(access);
}

void note_range(Access access, const Known& known, const void* at, int64_t bytes) {
  const auto offset = static_cast<const char*>(at) - machine.arena;
  Block& block = *machine.blocks_in_arena[offset / kArenaBytes];
  if (block.cluster != &machine.cluster()) fail("an address of another cluster's shared memory");
  const int64_t begin = offset % kArenaBytes, end = begin + bytes;
  for (int64_t word = begin / kWordBytes; word * kWordBytes < end; ++word) {
    const int64_t first = std::max<int64_t>(begin - word * kWordBytes, 0);
    const int64_t behind = std::min<int64_t>(end - word * kWordBytes, kWordBytes);
    access.bytes = (1u << behind) - (1u << first);
    note_word(block, static_cast<uint32_t>(word), access, known);
  }
}

bool is_shared(const void* at) {
  const auto offset = reinterpret_cast<uintptr_t>(at) - reinterpret_cast<uintptr_t>(machine.arena);
  return offset < static_cast<uintptr_t>(kArenaBytes) * kMostBlocks;
}

using Place = std::array<uint32_t, 2>;

Place place_of(const void* address, const void* caller) {
  const auto offset = [](const void* of) {
    return static_cast<uint32_t>(static_cast<const char*>(of) - &__executable_start);
  };
  return {offset(address), offset(caller)};
}
#define FW_PLACE emulator::place_of(__builtin_return_address(0), __builtin_return_address(1))

void note_lane(Kind kind, Counter counter, uint32_t count, const void* at, int64_t bytes,
               const Place& place) {
  const Known& known = machine.thread->known;
  note_range({count, 1u << known.lane, place, static_cast<uint16_t>(known.warp), counter, kind},
             known, at, bytes);
}

}  // namespace

void Clock::join(int warp, const Counts& counts) {
  if (warp >= static_cast<int>(warps.size())) warps.resize(warp + 1);
  raise(warps[warp].data(), counts.data(), counts.size());
}

void Clock::reach(int barrier, uint32_t phase) {
  if (barrier >= static_cast<int>(barriers.size())) barriers.resize(barrier + 1);
  barriers[barrier] = std::max(barriers[barrier], phase);
}

void Clock::join(const Clock& other) {
  for (size_t i = 0; i < other.warps.size(); ++i) join(static_cast<int>(i), other.warps[i]);
  if (other.barriers.size() > barriers.size()) barriers.resize(other.barriers.size());
  raise(barriers.data(), other.barriers.data(), other.barriers.size());
}

void Known::acquire(const ClockPointer& clock) {
  if (!clock) return;
  others = joined(others, clock);
  if (warp < static_cast<int>(clock->warps.size())) {
    raise(own.data(), clock->warps[warp].data(), own.size());
  }
}

Known Known::release() {
  const Known before = *this;
  ++own[lane];
  return before;
}

void Known::fence() {
  static ClockPointer last, result;
  if (others && others != last) {
    last = others;
    Clock fenced = *others;
    for (Counts& counts : fenced.warps) fence_counts(counts);
    result = std::make_shared<const Clock>(std::move(fenced));
  }
  if (others) others = result;
  fence_counts(own);
  ++own[lane];
}

void Gathering::add(const Known& known) {
  if (known.others && known.others != last_) {
    clock_.join(*known.others);
    last_ = known.others;
  }
  clock_.join(known.warp, known.own);
}

ClockPointer Gathering::end(int barrier, uint32_t phase) {
  if (barrier >= 0) clock_.reach(barrier, phase);
  last_.reset();
  return std::make_shared<const Clock>(std::exchange(clock_, {}));
}

void WarpGathering::add(const Known& other, bool first) {
  if (first) {
    known = other;
    return;
  }
  known.others = joined(known.others, other.others);
  raise(known.own.data(), other.own.data(), other.own.size());
}

void WarpGathering::leave(Known& thread, uint32_t mask) const {
  uint32_t most = 0;
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    if (mask >> lane & 1) most = std::max(most, known.own[lane]);
  }
  thread.others = known.others;
  thread.own = known.own;
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    if (mask >> lane & 1) thread.own[lane] = most;
  }
  if (mask == ~0u) thread.own[kLeast] = most;
  ++thread.own[thread.lane];
}

std::vector<Access>& Accesses::word(uint32_t index) {
  const size_t page = index / kPageWords;
  if (page >= pages_.size()) pages_.resize(page + 1);
  if (!pages_[page]) pages_[page] = std::make_unique<Page>();
  return (*pages_[page])[index % kPageWords];
}

void note(Kind kind, const void* at, int64_t bytes) {
  if (!is_shared(at)) return;
  const Known& known = machine.thread->known;
  note_lane(kind, kLanes, known.own[known.lane], at, bytes, FW_PLACE);
}

void note_copy(const void* at, int64_t bytes) {
  note_lane(Kind::kLanded, kCopies, machine.thread->copy_group, at, bytes, FW_PLACE);
}

void note_multiplied(const void* at, int64_t bytes) {
  const Known& known = machine.thread->known;
  note_range({machine.thread->multiplication_group, 1, FW_PLACE, static_cast<uint16_t>(known.warp),
              kMultiplications, Kind::kMultiplied},
             known, at, bytes);
}

void note_landing(const void* at, int64_t bytes, int barrier, uint32_t phase) {
  note_range({phase, 1, FW_PLACE, static_cast<uint16_t>(barrier), kBarrierBytes, Kind::kLanded},
             machine.thread->known, at, bytes);
}

}  // namespace emulator

// ---- what g++ calls

namespace {

inline void note_access(emulator::Kind kind, const void* at, size_t bytes,
                        const emulator::Place& place) {
  using namespace emulator;
  if (!is_shared(at) || !machine.thread || machine.beside) return;
  const Known& known = machine.thread->known;
  note_lane(kind, kLanes, known.own[known.lane], at, static_cast<int64_t>(bytes), place);
}

}  // namespace

#define FW_ACCESS(NAME, KIND, BYTES)                        \
  extern "C" void __tsan_##NAME##BYTES(void* at) {          \
    note_access(emulator::Kind::KIND, at, BYTES, FW_PLACE); \
  }
#define FW_ACCESSES(NAME, KIND) \
  FW_ACCESS(NAME, KIND, 2)      \
  FW_ACCESS(NAME, KIND, 4)      \
  FW_ACCESS(NAME, KIND, 8)      \
  FW_ACCESS(NAME, KIND, 16)
#define FW_ALL_ACCESSES(NAME, KIND)                               \
  FW_ACCESS(NAME, KIND, 1)                                        \
  FW_ACCESSES(NAME, KIND)                                         \
  FW_ACCESSES(unaligned_##NAME, KIND)                             \
  extern "C" void __tsan_##NAME##_range(void* at, size_t bytes) { \
    note_access(emulator::Kind::KIND, at, bytes, FW_PLACE);       \
  }
FW_ALL_ACCESSES(read, kRead)
FW_ALL_ACCESSES(write, kWrite)
extern "C" void __tsan_init() {}
extern "C" void __tsan_vptr_update(void*, void*) {}
extern "C" void __tsan_vptr_read(void*) {}

// Those of the host's code.
extern "C" uint8_t __tsan_atomic8_load(const uint8_t* at, int) { return *at; }
extern "C" uint32_t __tsan_atomic32_load(const uint32_t* at, int) { return *at; }
extern "C" void __tsan_atomic32_store(uint32_t* at, uint32_t value, int) { *at = value; }
extern "C" void __tsan_atomic8_store(uint8_t* at, uint8_t value, int) { *at = value; }
extern "C" uint64_t __tsan_atomic64_load(const uint64_t* at, int) { return *at; }
extern "C" uint64_t __tsan_atomic64_fetch_or(uint64_t* at, uint64_t bits, int) {
  return std::exchange(*at, *at | bits);
}
extern "C" uint32_t __tsan_atomic32_fetch_add(uint32_t* at, uint32_t addend, int) {
  return std::exchange(*at, *at + addend);
}
