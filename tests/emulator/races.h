// Finds races of shared memory by what happens before what, whatever the schedule: vector clocks,
// as in FastTrack (Flanagan and Freund, PLDI 2009). A counter counts what a lane has released; an
// access is stamped with its counter, and another access is ordered behind it if its thread knows
// of that count. What runs beside threads has counters of its own: the cp.async and the MMAs of a
// thread, by groups, and what a barrier in shared memory counts the bytes of, by the barrier's
// phases.
//
// Ordinary accesses come from g++, which calls a function at each (-fsanitize=thread, without its
// library); those of PTX from the emulator's own functions.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace emulator {

constexpr int kWarpLanes = 32;

// Where a warp's counters begin. The fenced ones are those of writes that MMAs may read too.
enum Counter : uint8_t { kLanes = 0, kCopies = 32, kMultiplications = 64, kBarrierBytes = 65 };
constexpr int kFenced = 66, kLeast = 130;  // a count that all lanes have reached
using Counts = std::array<uint32_t, 132>;

// The latest counts of all threads of a cluster that somebody knows.
struct Clock {
  std::vector<Counts> warps;
  std::vector<uint32_t> barriers;

  void join(const Clock& other);
  void join(int warp, const Counts& counts);
  void reach(int barrier, uint32_t phase);
};
using ClockPointer = std::shared_ptr<const Clock>;

// A thread knows counts of its own warp, which often change, and of the others.
struct Known {
  Counts own = {};
  ClockPointer others;
  int warp = 0, lane = 0;

  Known() = default;
  Known(int warp, int lane) : warp(warp), lane(lane) { own[lane] = 1; }
  void acquire(const ClockPointer& clock);
  // Returns what the thread knows until now, for those that acquire it.
  Known release();
  void fence();
};

// A barrier gathers what those know that arrive at it.
class Gathering {
 public:
  void add(const Known& known);
  // A barrier whose bytes are counted has a number and phases.
  ClockPointer end(int barrier = -1, uint32_t phase = 0);

 private:
  Clock clock_;
  ClockPointer last_;
};

// The same of lanes at one __syncwarp, who leave with one count.
struct WarpGathering {
  Known known;
  void add(const Known& other, bool first);
  void leave(Known& thread, uint32_t mask) const;
};

// kLanded: bytes that come beside threads. kMultiplied: read by MMAs of a warpgroup.
enum class Kind : uint8_t { kRead, kWrite, kAtomic, kLanded, kMultiplied };

struct Access {
  uint32_t count, lanes;
  std::array<uint32_t, 2> place;  // in the program: where it is called, and what calls that
  uint16_t number;                // of the warp or barrier that has the counter
  Counter counter;
  Kind kind;
  uint8_t bytes = 0;  // of a word, a bit each
};

// The accesses of each word that a later one might race with, by pages that have any.
class Accesses {
 public:
  static constexpr int kPageWords = 256;
  std::vector<Access>& word(uint32_t index);

 private:
  using Page = std::array<std::vector<Access>, kPageWords>;
  std::vector<std::unique_ptr<Page>> pages_;
};

// Each ends the process at a race. By the thread that runs:
void note(Kind kind, const void* at, int64_t bytes);
void note_copy(const void* at, int64_t bytes);        // cp.async
void note_multiplied(const void* at, int64_t bytes);  // in the open group
void note_landing(const void* at, int64_t bytes, int barrier, uint32_t phase);

}  // namespace emulator
