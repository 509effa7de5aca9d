// Prefill attention of bfloat16 against float64.
#include "attention/prefill.cuh"

#include <numeric>

#include "cases.h"

using namespace fusewright::attention;
using emulator::Case;

namespace {

using Number = __nv_bfloat16;
constexpr int kHeadDim = 64;
using KernelTile = PrefillTile<Number, Number, kHeadDim, false>;

float draw() { return std::normal_distribution<float>()(emulator::dice); }

bool check(const Case& given) {
  const std::vector<int> lengths = given.numbers("lengths"), queries = given.numbers("queries");
  const int block_size = given.number("block_size", 16), seqs = static_cast<int>(lengths.size());
  PrefillArgs args = {};
  args.num_seqs = seqs;
  args.fewest = 1;
  args.kv_heads = given.number("kv_heads", 1);
  args.group = given.number("group", 1);
  args.heads = args.kv_heads * args.group;
  args.tile_heads = std::min(args.group, kMostTileHeads);
  args.log2_block_size = std::countr_zero(static_cast<unsigned>(block_size));
  args.scale = 1 / std::sqrt(static_cast<float>(kHeadDim));
  args.table_stride = *std::max_element(lengths.begin(), lengths.end()) / block_size + 1;
  std::vector<int> starts = {0}, table(seqs * args.table_stride);
  for (int count : queries) starts.push_back(starts.back() + count);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), emulator::dice);
  args.block_table = emulator::array_of(table);
  args.seq_lens = emulator::array_of(lengths);
  args.query_start = emulator::array_of(starts);
  const size_t row = static_cast<size_t>(args.heads) * kHeadDim;
  const size_t cached = table.size() * 2 * block_size * args.kv_heads * kHeadDim;
  const auto* q = emulator::drawn_array<Number>(starts.back() * row, draw);
  auto* kv = emulator::drawn_array<Number>(cached, draw);
  auto* out = emulator::device_array<Number>(starts.back() * row);
  args.out = out;
  const PrefillShape shape = {q, kv, starts.back(), static_cast<int64_t>(row),
                              static_cast<int64_t>(table.size())};
  if (launch_tile<KernelTile>(args, shape, nullptr) != cudaSuccess) emulator::fail("launch");

  emulator::Tally tally;
  const auto cached_row = [&](int seq, int position, bool value, int head) {
    const int64_t block = table[seq * args.table_stride + position / block_size];
    const int64_t slot = (block * 2 + value) * block_size + position % block_size;
    return kv + (slot * args.kv_heads + head / args.group) * kHeadDim;
  };
  for (int seq = 0; seq < seqs; ++seq) {
    for (int query = 0; query < queries[seq]; ++query) {
      for (int head = 0; head < args.heads; ++head) {
        const size_t at = (starts[seq] + query) * row + head * kHeadDim;
        std::vector<double> sums(kHeadDim), sizes(kHeadDim);
        double total = 0;
        for (int key = 0; key <= lengths[seq] - queries[seq] + query; ++key) {
          double logit = 0;
          for (int i = 0; i < kHeadDim; ++i) {
            logit += double{static_cast<float>(q[at + i])} *
                     static_cast<float>(cached_row(seq, key, false, head)[i]);
          }
          const double weight = std::exp(logit * args.scale);
          total += weight;
          for (int i = 0; i < kHeadDim; ++i) {
            const double value = static_cast<float>(cached_row(seq, key, true, head)[i]);
            sums[i] += weight * value;
            sizes[i] += weight * std::fabs(value);
          }
        }
        for (int i = 0; i < kHeadDim; ++i) {
          tally.compare(out[at + i], sums[i] / total,
                        std::fabs(sums[i] / total) / 200 + sizes[i] / total / 250);
        }
      }
    }
  }
  return tally.report(given);
}

}  // namespace

int main() { return emulator::run_cases(check); }
