// Lanes of a warp do this together: exchanges, votes, matrices in registers and in shared memory,
// and the matrix multiplications of a warp and of a warpgroup.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <array>
#include <bit>
#include <string_view>

#include "shared.h"

namespace emulator {

constexpr uint32_t kAllLanes = 0xffffffffu;

using Words = uint32_t (&)[kWarpLanes][kExchangedWords];

// Each lane of the mask leaves words; returns those of all once all have come to this instruction.
template <int kCount>
Words meet(const char* instruction, uint32_t mask, const uint32_t (&words)[kCount]) {
  static_assert(kCount <= kExchangedWords);
  Thread& thread = *machine.thread;
  if (!(mask >> thread.lane() & 1)) fail("a lane that its mask leaves out");
  Meeting& meeting = thread.block->meetings[thread.index / kWarpLanes][mask];
  if (meeting.arrived > 0 && meeting.instruction != instruction) {
    fail(std::string("lanes of a warp at two instructions: ") + instruction + " and " +
         meeting.instruction);
  }
  meeting.instruction = instruction;
  const int buffer = meeting.number & 1;
  std::copy(words, words + kCount, meeting.words[buffer][thread.lane()]);
  if (++meeting.arrived == std::popcount(mask)) {
    meeting.arrived = 0;
    meeting.end();
  } else {
    wait(meeting, instruction);
  }
  return meeting.words[buffer];
}

// Alone of what lanes do together, it orders their accesses of memory.
inline void sync_warp(uint32_t mask = kAllLanes) {
  Thread& thread = *machine.thread;
  Meeting& meeting = thread.block->meetings[thread.index / kWarpLanes][mask];
  WarpGathering& gathering = meeting.gatherings[meeting.number & 1];
  gathering.add(thread.known, meeting.arrived == 0);
  meet("__syncwarp", mask, {0});
  gathering.leave(thread.known, mask);
}

// Beyond the warp a lane has its own value; that of a lane which does not take part is any.
template <typename Value>
Value exchange(const char* instruction, uint32_t mask, Value value, int from) {
  struct Parts {
    uint32_t words[sizeof(Value) / 4];
  };
  Parts parts = std::bit_cast<Parts>(value);
  const Words words = meet(instruction, mask, parts.words);
  if (from < 0 || from >= kWarpLanes) return value;
  for (size_t i = 0; i < sizeof(Value) / 4; ++i) {
    parts.words[i] = mask >> from & 1 ? words[from][i] : ~0u;
  }
  return std::bit_cast<Value>(parts);
}

// ---- 8 x 8 matrices of 16-bit elements: lane t holds elements t % 4 * 2 and the next of row t / 4

inline uint16_t half_of(uint32_t word, int which) {
  return static_cast<uint16_t>(which ? word >> 16 : word);
}

FW_INLINED void load_matrices(uint32_t (&to)[4], uint32_t address, bool transposed) {
  const Words rows = meet("ldmatrix", kAllLanes, {address});
  const int lane = machine.thread->lane();
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t elements[2];
    for (int i = 0; i < 2; ++i) {
      const int row = transposed ? lane % 4 * 2 + i : lane / 4;
      const int column = transposed ? lane / 4 : lane % 4 * 2 + i;
      const char* line = shared_memory(rows[matrix * 8 + row][0], 16, 16);
      note(Kind::kRead, line + column * 2, 2);
      memcpy(&elements[i], line + column * 2, 2);
    }
    to[matrix] = elements[0] | static_cast<uint32_t>(elements[1]) << 16;
  }
}

FW_INLINED void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t words[4] = {a, b, c, d};
  const Words rows = meet("stmatrix", kAllLanes, {address});
  const int lane = machine.thread->lane();
  for (int matrix = 0; matrix < 4; ++matrix) {
    char* line = shared_memory(rows[matrix * 8 + lane / 4][0], 16, 16);
    note(Kind::kWrite, line + lane % 4 * 4, 4);
    memcpy(line + lane % 4 * 4, &words[matrix], 4);
  }
}

inline uint32_t transpose_matrix(uint32_t word) {
  const Words words = meet("movmatrix", kAllLanes, {word});
  const int lane = machine.thread->lane(), column = lane / 4;
  const auto element = [&](int row) -> uint32_t {
    return half_of(words[row * 4 + column / 2][0], column % 2);
  };
  return element(lane % 4 * 2) | element(lane % 4 * 2 + 1) << 16;
}

// ---- elements

enum class Element { kBf16, kHalf, kE4M3 };

// The elements of an instruction, by its name.
constexpr Element element_of(std::string_view name) {
  if (name.find("e4m3") != name.npos) return Element::kE4M3;
  return name.find("bf16") != name.npos ? Element::kBf16 : Element::kHalf;
}

constexpr int bytes_of(Element element) { return element == Element::kE4M3 ? 1 : 2; }

template <Element kElement>
float number_of(uint32_t bits) {
  if constexpr (kElement == Element::kBf16) {
    return std::bit_cast<float>(bits << 16);
  } else if constexpr (kElement == Element::kHalf) {
    return __half2float(std::bit_cast<__half>(static_cast<uint16_t>(bits)));
  } else {
    return static_cast<float>(std::bit_cast<__nv_fp8_e4m3>(static_cast<uint8_t>(bits)));
  }
}

// Number i of the row of 32 bytes of an MMA that a quad holds: word `half` of lane `quad`, of which
// each has a quarter.
template <Element kElement, typename WordOf>
float number_in_row(int i, const WordOf& word_of) {
  constexpr int kInWord = 4 / bytes_of(kElement), kBits = 8 * bytes_of(kElement);
  const uint32_t word = word_of(i / kInWord % 4, i / kInWord / 4);
  return number_of<kElement>(word >> i % kInWord * kBits & ((1u << kBits) - 1));
}

template <Element kElement>
constexpr int kDepth = 32 / bytes_of(kElement);  // of one multiplication

// d += a b, of 16 rows by 8 columns.
template <Element kElement>
void multiply_warp(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                   uint32_t b1) {
  const Words words = meet("mma", kAllLanes, {a0, a1, a2, a3, b0, b1});
  const int lane = machine.thread->lane();
  constexpr int kCount = kDepth<kElement>;
  float columns[2][kCount];
  for (int odd = 0; odd < 2; ++odd) {
    const int column = lane % 4 * 2 + odd;
    for (int i = 0; i < kCount; ++i) {
      columns[odd][i] = number_in_row<kElement>(
          i, [&](int quad, int half) { return words[column * 4 + quad][4 + half]; });
    }
  }
  for (int lower = 0; lower < 2; ++lower) {
    float sums[2] = {};
    for (int i = 0; i < kCount; ++i) {
      const float number = number_in_row<kElement>(
          i, [&](int quad, int half) { return words[lane / 4 * 4 + quad][lower + 2 * half]; });
      for (int odd = 0; odd < 2; ++odd) sums[odd] += number * columns[odd][i];
    }
    for (int odd = 0; odd < 2; ++odd) d[2 * lower + odd] += sums[odd];
  }
}

// ---- multiplications of a warpgroup, which happen when they are waited for, or at once

// A matrix in shared memory whose rows have 128 bytes that are swizzled, as a descriptor says.
struct Described {
  const Block* block;
  uint32_t begin, stride, leading;

  explicit Described(uint64_t descriptor)
      : block(&machine.block()),
        begin(static_cast<uint32_t>(descriptor & 0x3fff) << 4),
        stride(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4),
        leading(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4) {}

  // Where some bytes of a row are.
  const char* place(int row, int byte, int bytes) const {
    uint32_t at = begin + row / kAtomLines * stride + row % kAtomLines * kLineBytes + byte;
    at ^= (at / kLineBytes % kAtomLines) << 4;
    if (at + bytes > static_cast<uint32_t>(kDynamicBegin + block->dynamic_bytes)) {
      fail("a multiplication reads beyond shared memory");
    }
    return block->memory + at;
  }

  template <Element kElement>
  float number(int row, int i) const {
    constexpr int kBytes = bytes_of(kElement);
    uint32_t bits = 0;
    memcpy(&bits, place(row, i * kBytes, kBytes), kBytes);
    return number_of<kElement>(bits);
  }

  // Where number i of a transposed matrix's column is, whose rows have several lines.
  const char* transposed_place(int column, int i) const {
    constexpr int kInLine = kLineBytes / 2;
    return place(i, column % kInLine * 2, 2) + column / kInLine * leading;
  }

  FW_INLINED void note_transposed(int columns) const {
    if (machine.thread->lane() != 0) return;
    for (int i = 0; i < 16 * columns / 8; ++i) {
      note_multiplied(transposed_place(i / 16 * 8, i % 16), 16);
    }
  }

  // Its lanes read these rows together.
  FW_INLINED void note_rows(int first, int count) const {
    if (machine.thread->lane() != 0) return;
    for (int i = 0; i < 2 * count; ++i) note_multiplied(place(first + i / 2, i % 2 * 16, 16), 16);
  }
};

inline void start_multiplication(Action multiplication) {
  if (settings.timing == Timing::kEarly) {
    act(multiplication);
  } else {
    machine.thread->open_multiplications.push_back(std::move(multiplication));
  }
}

// d = a b^T, + d unless `fresh`, this thread's part; `row_of` gives number i of one of its two
// rows.
template <Element kElement, int kCount, typename NumberOf, typename RowOf>
void multiply_rows(float* d, int lane, const NumberOf& number_of_b, bool fresh,
                   const RowOf& row_of) {
  constexpr int kNumbers = kDepth<kElement>;
  float rows[2][kNumbers];
  for (int lower = 0; lower < 2; ++lower) {
    for (int i = 0; i < kNumbers; ++i) rows[lower][i] = row_of(lower, i);
  }
  for (int pair = 0; pair < kCount / 4; ++pair) {
    for (int odd = 0; odd < 2; ++odd) {
      float sums[2] = {};
      for (int i = 0; i < kNumbers; ++i) {
        const float number = number_of_b(8 * pair + lane % 4 * 2 + odd, i);
        for (int lower = 0; lower < 2; ++lower) sums[lower] += rows[lower][i] * number;
      }
      for (int lower = 0; lower < 2; ++lower) {
        float& to = d[4 * pair + 2 * lower + odd];
        to = fresh ? sums[lower] : to + sums[lower];
      }
    }
  }
}

template <Element kElement, int kCount>
FW_INLINED void multiply_group(float (&d)[kCount], uint64_t a, uint64_t b, bool fresh) {
  float* to = d;
  const int thread = machine.thread->index;
  const Described left(a), right(b);
  const int first_row = thread / kWarpLanes % 4 * 16;
  left.note_rows(first_row, std::clamp(machine.thread->used_rows - first_row, 0, 16));
  right.note_rows(0, 2 * kCount);
  start_multiplication([=] {
    const int first = thread / kWarpLanes % 4 * 16 + thread % kWarpLanes / 4;
    multiply_rows<kElement, kCount>(
        to, thread % kWarpLanes, [&](int row, int i) { return right.number<kElement>(row, i); },
        fresh, [&](int lower, int i) { return left.number<kElement>(first + 8 * lower, i); });
  });
}

// The same with a's rows in registers, of a matrix whose numbers these are.
template <Element kElement, int kCount, typename NumberOf>
void multiply_held(float (&d)[kCount], const uint32_t* a, bool fresh, const NumberOf& number_of_b) {
  const Words words = meet("wgmma", kAllLanes, {a[0], a[1], a[2], a[3]});
  float* to = d;
  const int lane = machine.thread->lane();
  std::array<std::array<uint32_t, 4>, 4> held;
  for (int quad = 0; quad < 4; ++quad) {
    std::copy_n(words[lane / 4 * 4 + quad], 4, held[quad].begin());
  }
  start_multiplication([=] {
    multiply_rows<kElement, kCount>(to, lane, number_of_b, fresh, [&](int lower, int i) {
      return number_in_row<kElement>(
          i, [&](int quad, int half) { return held[quad][lower + 2 * half]; });
    });
  });
}

template <Element kElement, int kCount>
FW_INLINED void multiply_group(float (&d)[kCount], const uint32_t* a, uint64_t b, bool fresh) {
  const Described right(b);
  right.note_rows(0, 2 * kCount);
  multiply_held<kElement>(d, a, fresh,
                          [=](int row, int i) { return right.number<kElement>(row, i); });
}

// d += a b, of a b whose columns are not side by side.
template <Element kElement, int kCount>
FW_INLINED void multiply_transposed(float (&d)[kCount], const uint32_t* a, uint64_t b) {
  const Described right(b);
  right.note_transposed(2 * kCount);
  multiply_held<kElement>(d, a, false, [=](int column, int i) {
    uint16_t bits;
    memcpy(&bits, right.transposed_place(column, i), 2);
    return number_of<kElement>(bits);
  });
}

inline void commit_multiplications() {
  machine.thread->multiplications.push_back(std::move(machine.thread->open_multiplications));
  machine.thread->open_multiplications.clear();
  ++machine.thread->multiplication_group;
}

inline void wait_for_multiplications(size_t pending) {
  auto& groups = machine.thread->multiplications;
  for (; groups.size() > pending; groups.pop_front()) {
    for (const Action& multiplication : groups.front()) act(multiplication);
  }
  machine.thread->know_ended(kMultiplications, machine.thread->multiplication_group, pending);
  meet("wgmma.wait_group", kAllLanes, {0});
}

// ---- arithmetic of instructions that C++ has no word for

inline uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> 4 * i & 15;
    uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (selector & 7)) & 255;
    if (selector & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}

template <typename Operation>
uint32_t of_bf16_pairs(uint32_t a, uint32_t b, const Operation& operation) {
  uint32_t result = 0;
  for (int i = 0; i < 2; ++i) {
    const float value = operation(number_of<Element::kBf16>(half_of(a, i)),
                                  number_of<Element::kBf16>(half_of(b, i)));
    result |= uint32_t{std::bit_cast<uint16_t>(__float2bfloat16_rn(value))} << 16 * i;
  }
  return result;
}

inline uint32_t multiply_bf16_pairs(uint32_t a, uint32_t b) {
  return of_bf16_pairs(a, b, [](float x, float y) { return x * y; });
}

inline uint32_t subtract_bf16_pairs(uint32_t a, uint32_t b) {
  return of_bf16_pairs(a, b, [](float x, float y) { return x - y; });
}

inline uint32_t half_pair_of_e4m3(uint32_t pair) {
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  return halves.x | static_cast<uint32_t>(halves.y) << 16;
}

}  // namespace emulator
