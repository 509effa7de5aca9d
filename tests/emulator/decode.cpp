// Decode attention against float64. FW_QUERY and FW_CACHE are the types of q and of the cache,
// FW_HEAD_DIM and FW_HEAD_TILES those of the tile.
#include "attention/decode.cuh"

#include <numeric>

#include "cases.h"

using namespace fusewright::attention;
using emulator::Case;

using QueryType = FW_QUERY;
using CacheType = FW_CACHE;
using KernelTile = Tile<QueryType, CacheType, FW_HEAD_DIM, FW_HEAD_TILES>;
constexpr int kHeadDim = FW_HEAD_DIM;
// A weight and a result may lose this much below the least numbers of their types.
constexpr double kLeastWeight = std::is_same_v<KernelTile::M, __half> ? 6e-8 : 1e-38;
constexpr double kLeastResult = std::is_same_v<QueryType, __half> ? 6e-8 : 1e-38;

namespace {

float draw() { return std::normal_distribution<float>()(emulator::dice); }

enum class Sinks { kNone, kAllKinds, kFarAbove, kFarBelow, kAbsent };

// Those of all kinds are, every other one, about as large as the sum over some hundred tokens, so
// that a sink counts, and counts once.
float sink_of(Sinks kind, int head) {
  const float near = 5.0f + 2.0f * draw();
  if (kind == Sinks::kFarAbove) return 60.0f + head % 3;
  if (kind == Sinks::kFarBelow) return -60.0f - head % 3;
  if (kind == Sinks::kAbsent) return -INFINITY;
  const float others[] = {40.0f, -INFINITY, -80.0f, 12.0f};
  return head % 2 == 0 ? near : others[head / 2 % 4];
}

// A batch: sequences of one query each, whose blocks lie anywhere in the cache. Drafts of a
// sequence are sequences beside each other that share blocks.
struct Problem {
  int kv_heads, group, block_size, num_seqs, max_blocks, num_blocks, num_tokens, window;
  float soft_cap, scale;
  std::vector<int> lengths, query_start, table;
  QueryType* q;
  CacheType* kv;
  std::vector<float> sinks;  // empty: none
  const void* sinks_argument = nullptr;
  bool wide_sinks;
  float* kv_scale = nullptr;

  explicit Problem(const Case& given);
  void place_blocks(const std::vector<int>& drafts);
  void draw_cache();
  void draw_sinks(Sinks kind);
  double logit(int seq, int head, int position) const;
  const CacheType* row(int seq, int position, bool value, int kv_head) const;
  int heads() const { return kv_heads * group; }
};

template <typename Number>
double as_double(Number number) {
  return static_cast<float>(number);
}

Problem::Problem(const Case& given) {
  kv_heads = given.number("kv_heads", 1);
  group = given.number("group", 1);
  block_size = given.number("block_size", 16);
  window = given.number("window");
  soft_cap = static_cast<float>(given.number("soft_cap"));
  scale = given.number("sharp") ? 1.0f : 1.0f / std::sqrt(static_cast<float>(kHeadDim));
  lengths = given.numbers("lengths");
  // Sequence i is a draft of the one before, longer by one, where drafts has a 1.
  std::vector<int> drafts = given.numbers("drafts"), queries = given.numbers("queries");
  num_seqs = static_cast<int>(lengths.size());
  drafts.resize(num_seqs, 0);
  queries.resize(num_seqs, 1);
  query_start = {0};
  for (int count : queries) query_start.push_back(query_start.back() + count);
  num_tokens = query_start.back();
  const int longest = *std::max_element(lengths.begin(), lengths.end());
  max_blocks = std::max(given.number("table"), longest + block_size - 1) / block_size + 1;
  place_blocks(drafts);
  q = emulator::drawn_array<QueryType>(static_cast<size_t>(num_tokens) * heads() * kHeadDim, draw);
  draw_cache();
  wide_sinks = given.number("wide_sinks");
  draw_sinks(given.choice<Sinks>("sinks",
                                 {{"none", Sinks::kNone},
                                  {"all_kinds", Sinks::kAllKinds},
                                  {"far_above", Sinks::kFarAbove},
                                  {"far_below", Sinks::kFarBelow},
                                  {"absent", Sinks::kAbsent}},
                                 "none"));
}

// Blocks in any order. A draft has those of the sequence before it, and its own behind them.
void Problem::place_blocks(const std::vector<int>& drafts) {
  constexpr int kUnused = 0x7ffffff, kSpare = 2;
  const auto blocks_of = [&](int seq) { return (lengths[seq] + block_size - 1) / block_size; };
  num_blocks = kSpare;
  for (int seq = 0; seq < num_seqs; ++seq) num_blocks += blocks_of(seq);
  std::vector<int> order(num_blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), emulator::dice);
  table.assign(static_cast<size_t>(num_seqs) * max_blocks, kUnused);
  int next = 0;
  for (int seq = 0; seq < num_seqs; ++seq) {
    for (int i = 0; i < blocks_of(seq); ++i) {
      const int before = seq > 0 && drafts[seq] ? table[(seq - 1) * max_blocks + i] : kUnused;
      table[seq * max_blocks + i] = before == kUnused ? order[next++] : before;
    }
  }
}

// Slots of no sequence stay NaN.
void Problem::draw_cache() {
  kv = emulator::device_array<CacheType>(static_cast<size_t>(num_blocks) * 2 * block_size *
                                         kv_heads * kHeadDim);
  for (int seq = 0; seq < num_seqs; ++seq) {
    for (int position = 0; position < lengths[seq]; ++position) {
      for (int head = 0; head < kv_heads; ++head) {
        for (bool value : {false, true}) {
          CacheType* to = const_cast<CacheType*>(row(seq, position, value, head));
          if (!emulator::is_unwritten(*to)) continue;
          for (int i = 0; i < kHeadDim; ++i) to[i] = CacheType(draw());
        }
      }
    }
  }
  if (sizeof(CacheType) == 1) {
    kv_scale = emulator::drawn_array<float>(2 * kv_heads, [&] { return std::exp2(draw()); });
  }
}

void Problem::draw_sinks(Sinks kind) {
  if (kind == Sinks::kNone) return;
  for (int head = 0; head < heads(); ++head) {
    const float sink = sink_of(kind, head);
    sinks.push_back(wide_sinks ? sink : static_cast<float>(QueryType(sink)));
  }
  if (wide_sinks) {
    sinks_argument = emulator::array_of(sinks);
  } else {
    sinks_argument = emulator::array_of(std::vector<QueryType>(sinks.begin(), sinks.end()));
  }
}

const CacheType* Problem::row(int seq, int position, bool value, int kv_head) const {
  const int64_t block = table[seq * max_blocks + position / block_size];
  const int64_t slot = (block * 2 + value) * block_size + position % block_size;
  return kv + (slot * kv_heads + kv_head) * kHeadDim;
}

double Problem::logit(int seq, int head, int position) const {
  const QueryType* query = q + (static_cast<int64_t>(query_start[seq]) * heads() + head) * kHeadDim;
  const CacheType* key = row(seq, position, false, head / group);
  double sum = 0;
  for (int i = 0; i < kHeadDim; ++i) {
    sum += as_double(query[i]) * as_double(key[i]);
  }
  sum *= scale * (kv_scale ? kv_scale[head / group] : 1.0);
  return soft_cap > 0 ? soft_cap * std::tanh(sum / soft_cap) : sum;
}

void compare(const Problem& problem, const QueryType* out, emulator::Tally& tally) {
  for (int seq = 0; seq < problem.num_seqs; ++seq) {
    const int tokens = problem.query_start[seq + 1] - problem.query_start[seq];
    const int length = problem.lengths[seq];
    const QueryType* rows =
        out + static_cast<int64_t>(problem.query_start[seq]) * problem.heads() * kHeadDim;
    if (tokens != 1 || length == 0) {
      for (int i = 0; i < tokens * problem.heads() * kHeadDim; ++i) tally.expect_unwritten(rows[i]);
      continue;
    }
    const int first = problem.window > 0 ? std::max(length - problem.window, 0) : 0;
    for (int head = 0; head < problem.heads(); ++head) {
      std::vector<double> weights;
      double peak = problem.sinks.empty() ? -INFINITY : problem.sinks[head];
      for (int position = first; position < length; ++position) {
        weights.push_back(problem.logit(seq, head, position));
        peak = std::max(peak, weights.back());
      }
      double total = problem.sinks.empty() ? 0 : std::exp(problem.sinks[head] - peak);
      for (double& weight : weights) total += weight = std::exp(weight - peak);
      const double v_scale =
          problem.kv_scale ? problem.kv_scale[problem.kv_heads + head / problem.group] : 1.0;
      std::vector<double> sums(kHeadDim), sizes(kHeadDim), least(kHeadDim);
      for (int position = first; position < length; ++position) {
        const CacheType* value = problem.row(seq, position, true, head / problem.group);
        for (int i = 0; i < kHeadDim; ++i) {
          sums[i] += weights[position - first] * as_double(value[i]);
          sizes[i] += weights[position - first] * std::fabs(as_double(value[i]));
          least[i] += kLeastWeight * std::fabs(as_double(value[i])) * v_scale;
        }
      }
      for (int i = 0; i < kHeadDim; ++i) {  // the result and the weights are rounded to two bytes
        const double want = sums[i] * v_scale / total;
        const double tolerance =
            std::fabs(want) / 200 + sizes[i] * v_scale / total / 250 + least[i] + kLeastResult;
        tally.compare(rows[head * kHeadDim + i], want, tolerance);
      }
    }
  }
}

// The kernel ahead writes q and the last slot of each sequence, or the whole cache.
emulator::Action poison(const Problem& problem, bool one_slot) {
  std::vector<std::tuple<void*, size_t, std::string>> late;
  const auto take = [&](const void* at, size_t bytes) {
    late.push_back(
        {const_cast<void*>(at), bytes, std::string(static_cast<const char*>(at), bytes)});
    memset(const_cast<void*>(at), 0xff, bytes);
  };
  take(problem.q,
       static_cast<size_t>(problem.num_tokens) * problem.heads() * kHeadDim * sizeof(QueryType));
  for (int seq = 0; seq < problem.num_seqs; ++seq) {
    const int length = problem.lengths[seq];
    for (int position = one_slot ? std::max(length - 1, 0) : 0; position < length; ++position) {
      for (bool value : {false, true}) {
        for (int head = 0; head < problem.kv_heads; ++head) {
          take(problem.row(seq, position, value, head), kHeadDim * sizeof(CacheType));
        }
      }
    }
  }
  return [late = std::move(late)] {  // in reverse: a slot may be there twice
    for (auto each = late.rbegin(); each != late.rend(); ++each) {
      memcpy(std::get<0>(*each), std::get<2>(*each).data(), std::get<1>(*each));
    }
  };
}

bool check(const Case& given) {
  const Problem problem(given);
  DecodeArgs args = {};
  args.q = problem.q;
  args.kv = problem.kv;
  args.block_table = emulator::array_of(problem.table);
  args.seq_lens = emulator::array_of(problem.lengths);
  args.query_start = emulator::array_of(problem.query_start);
  const size_t outputs = static_cast<size_t>(problem.num_tokens) * problem.heads() * kHeadDim;
  auto* out = emulator::device_array<QueryType>(outputs);
  args.out = out;
  args.kv_scale = problem.kv_scale;
  args.sinks = problem.sinks_argument;
  args.wide_sinks = problem.wide_sinks;
  args.num_seqs = problem.num_seqs;
  args.max_blocks = problem.max_blocks;
  args.kv_heads = problem.kv_heads;
  args.group = problem.group;
  args.log2_block_size = std::countr_zero(static_cast<unsigned>(problem.block_size));
  args.one_slot = given.number("one_slot", 1);
  args.q_stride = problem.heads() * kHeadDim;
  args.table_stride = problem.max_blocks;
  args.scale = problem.scale;
  args.window = problem.window;
  args.soft_cap = problem.soft_cap;

  const std::vector<int> asked = given.numbers("grid");  // blocks, cluster, parts; none: planned
  Grid grid;
  if (asked.empty()) {
    const Limits* limits = nullptr;
    limits_of<KernelTile>(limits);
    const int64_t max_tokens = static_cast<int64_t>(args.max_blocks) << args.log2_block_size;
    grid = plan_grid<KernelTile>(*limits, args.num_seqs, args.kv_heads, max_tokens);
  } else {
    grid = {asked[0], asked[1], asked[2]};
  }
  args.partials = emulator::device_array<float4>(partial_float4s<KernelTile>(args, grid));
  emulator::machine.previous = poison(problem, args.one_slot);
  if (const cudaError_t error = launch_decode<KernelTile>(args, grid, nullptr);
      error != cudaSuccess) {
    emulator::fail("launch: error " + std::to_string(error));
  }
  emulator::Tally tally;
  compare(problem, out, tally);
  for (const unsigned& arrived : arrivals) tally.stray += arrived != 0;
  for (const unsigned& arrived : group_arrivals) tally.stray += arrived != 0;
  return tally.report(given);
}

}  // namespace

int main() { return emulator::run_cases(check); }
