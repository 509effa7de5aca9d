// The experts' layers by weights of four bits, for few rows an expert, against float64.
#include "cases.h"
#include "moe/packed.cu"

using namespace fusewright::moe;
using emulator::Case;

namespace {

constexpr float kFloatNibbles[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

float number_of_nibble(int nibble, bool floats) {
  if (!floats) return static_cast<float>(nibble - 8);
  return nibble & 8 ? -kFloatNibbles[nibble & 7] : kFloatNibbles[nibble & 7];
}

float rounded(double value) {
  return __bfloat162float(__float2bfloat16_rn(static_cast<float>(value)));
}

int draw(int count) { return static_cast<int>(emulator::dice() % count); }

// Numbers whose sums are exact.
__nv_bfloat16* small_numbers(size_t count) {
  return emulator::drawn_array<__nv_bfloat16>(count,
                                              [] { return static_cast<float>(draw(5) - 2); });
}

struct Problem {
  int tokens, experts, top_k, columns, rows, group_columns, slots;
  bool floats, gated, pairs, sorted, row_a_slot;
  std::vector<int> ids;
  std::vector<float> weights;      // [experts, rows, columns]
  std::vector<double> norm_scale;  // of a token
  PackedArgs args = {};

  explicit Problem(const Case& given);
  void draw_weight();
  void draw_norm();
  void choose_experts();
  double sum(int slot, int row) const;
  double want(int slot, int output) const;
};

Problem::Problem(const Case& given) {
  tokens = given.number("tokens", 1);
  experts = given.number("experts", 4);
  top_k = given.number("top_k", 2);
  columns = given.number("columns", 704);
  rows = given.number("rows", 64);
  group_columns = given.number("group_columns", 32);
  floats = given.number("floats", 1);
  gated = given.number("gated");
  pairs = given.number("pairs");
  sorted = given.number("sorted");
  row_a_slot = given.number("row_a_slot");
  slots = tokens * top_k;
  args.num_slots = slots;
  args.top_k = top_k;
  args.slots_a_row = row_a_slot ? 1 : top_k;
  args.num_experts = experts;
  args.in_features = columns;
  args.out_features = gated ? rows / 2 : rows;
  args.groups = columns / group_columns;
  args.log2_columns = std::countr_zero(static_cast<unsigned>(group_columns));
  args.x_row_stride = columns + 8;
  args.gated = gated;
  args.gate = {Activation::kSiluMul, 1.702f, 7.0f, 1.0f, pairs};
  draw_weight();
  if (given.number("bias", 1)) args.bias = small_numbers(static_cast<size_t>(experts) * rows);
  args.x = small_numbers((row_a_slot ? slots : tokens) * args.x_row_stride - 8);
  choose_experts();
  norm_scale.assign(tokens, 1.0);
  if (given.number("norm")) draw_norm();
  args.y = emulator::device_array<__nv_bfloat16>(static_cast<size_t>(slots) * args.out_features);
}

void Problem::draw_weight() {
  const size_t all_rows = static_cast<size_t>(experts) * rows;
  auto* packed = emulator::drawn_array<uint8_t>(all_rows * columns / 2, [] { return draw(256); });
  std::vector<int> exponents(all_rows * args.groups);
  for (int& exponent : exponents) exponent = -2 - draw(3);
  size_t next = 0;
  if (floats) {
    args.scale =
        emulator::drawn_array<uint8_t>(exponents.size(), [&] { return 127 + exponents[next++]; });
  } else {
    args.scale = emulator::drawn_array<__half>(
        exponents.size(), [&] { return std::exp2(static_cast<float>(exponents[next++])); });
  }
  args.weight = packed;
  weights.resize(all_rows * columns);
  for (size_t i = 0; i < weights.size(); ++i) {
    const int nibble = packed[i / 2] >> i % 2 * 4 & 15;
    weights[i] = std::ldexp(number_of_nibble(nibble, floats), exponents[i / group_columns]);
  }
}

// Experts of a token are distinct; the last one has no tokens, if it can be spared.
void Problem::choose_experts() {
  std::vector<int> all(experts > top_k ? experts - 1 : experts);
  for (int token = 0; token < tokens; ++token) {
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
    std::shuffle(all.begin(), all.end(), emulator::dice);
    ids.insert(ids.end(), all.begin(), all.begin() + top_k);
  }
  if (!sorted) {
    args.ids = emulator::array_of(ids);
    return;
  }
  std::vector<int> order, offsets = {0};
  for (int expert = 0; expert < experts; ++expert) {
    for (int slot = 0; slot < slots; ++slot) {
      if (ids[slot] == expert) order.push_back(slot);
    }
    offsets.push_back(static_cast<int>(order.size()));
  }
  args.order = emulator::array_of(order);
  args.offsets = emulator::array_of(offsets);
}

void Problem::draw_norm() {
  args.num_square_groups = columns / 16;
  args.eps = 1e-5f;
  const float* squares = emulator::drawn_array<float>(
      static_cast<size_t>(tokens) * args.num_square_groups, [] { return 1 + draw(7); });
  args.squares = squares;
  for (int token = 0; token < tokens; ++token) {
    double total = 0;
    for (int i = 0; i < args.num_square_groups; ++i) {
      total += squares[token * args.num_square_groups + i];
    }
    norm_scale[token] = 1 / std::sqrt(total / columns + args.eps);
  }
}

double Problem::sum(int slot, int row) const {
  const size_t weight_row = static_cast<size_t>(ids[slot]) * rows + row;
  const __nv_bfloat16* x = args.x + (row_a_slot ? slot : slot / top_k) * args.x_row_stride;
  double total = 0;
  for (int i = 0; i < columns; ++i) {
    total += static_cast<double>(weights[weight_row * columns + i]) * __bfloat162float(x[i]);
  }
  total *= norm_scale[slot / top_k];
  return rounded(total + (args.bias ? __bfloat162float(args.bias[weight_row]) : 0));
}

double Problem::want(int slot, int output) const {
  if (!gated) return sum(slot, output);
  const double gate = std::min(sum(slot, pairs ? 2 * output : output), 7.0);
  const double up = sum(slot, pairs ? 2 * output + 1 : args.out_features + output);
  return gate / (1 + std::exp(-1.702 * gate)) * (std::clamp(up, -7.0, 7.0) + 1);
}

bool check(const Case& given) {
  const Problem problem(given);
  const PackedArgs& args = problem.args;
  const PackedFormat format = problem.floats ? PackedFormat::kMxFp4 : PackedFormat::kInt4;
  if (const cudaError_t error = launch_packed(args, format, false, nullptr); error != cudaSuccess) {
    emulator::fail("launch: error " + std::to_string(error));
  }
  emulator::Tally tally;
  const bool exact = !args.gated && !args.squares;
  for (int slot = 0; slot < problem.slots; ++slot) {
    for (int output = 0; output < args.out_features; ++output) {
      const double want = problem.want(slot, output);
      const double tolerance = exact ? 0 : std::fabs(want) / 64 + 0.01;
      tally.compare(args.y[static_cast<int64_t>(slot) * args.out_features + output], want,
                    tolerance);
    }
  }
  return tally.report(given);
}

}  // namespace

int main() { return emulator::run_cases(check); }
