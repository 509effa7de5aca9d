// Sampling against the op's reference, whose arguments and results a case's file holds.
#include "sampling/sample.cu"

#include <fstream>

#include "cases.h"

using namespace fusewright::sampling;
using emulator::Case;

namespace {

// Reads arrays one after another.
class File {
 public:
  explicit File(const std::string& path) : stream_(path, std::ios::binary) {
    if (!stream_) emulator::fail("cannot read " + path);
  }

  template <typename Element>
  Element* next(size_t count) {
    Element* const array = emulator::device_array<Element>(count);
    stream_.read(reinterpret_cast<char*>(array), count * sizeof(Element));
    if (!stream_) emulator::fail("a case's file is too short");
    return array;
  }

 private:
  std::ifstream stream_;
};

// A launch of any number of blocks a row, where launch_sample has its own choice.
template <typename F>
void launch_blocks(SampleArgs args, int blocks) {
  constexpr int kUnit = 16 / sizeof(typename F::Raw);
  args.slice = (args.vocab + blocks * kUnit - 1) / (blocks * kUnit) * kUnit;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = blocks;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(args.num_rows * blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes(blocks) + args.slice * sizeof(typename F::Raw);
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (emulator::launch(&config, sample_kernel<F>, args) != cudaSuccess) emulator::fail("launch");
}

template <typename F>
int count_kept(const SampleArgs& args, int row) {
  const auto* logits =
      static_cast<const typename F::Raw*>(args.logits) + static_cast<size_t>(row) * args.vocab;
  int kept = 0;
  for (int i = 0; i < args.vocab; ++i) {
    const uint32_t key = F::key_of(logits[i]);
    const bool is_number = key >= F::kLowest && key <= F::kHighest;
    kept += is_number && F::value_of(key) >= args.thresholds[row];
  }
  return kept;
}

template <typename F>
bool check_keys(const Case& given, Element element) {
  SampleArgs args = {};
  args.num_rows = given.number("rows");
  args.row_stride = args.vocab = given.number("vocab");
  const size_t rows = args.num_rows;
  const std::string filters = given.text("filters", "");
  const auto has = [&](char filter) { return filters.find(filter) != filters.npos; };
  File file(given.text("file", ""));
  args.logits = file.next<typename F::Raw>(rows * args.vocab);
  args.temperature = file.next<float>(rows);
  if (has('k')) args.top_k = file.next<int>(rows);
  if (has('p')) args.top_p = file.next<float>(rows);
  if (has('m')) args.min_p = file.next<float>(rows);
  args.seeds = file.next<int64_t>(rows);
  args.positions = file.next<int>(rows);
  const int* const tokens = file.next<int>(rows);
  const int* const kept = file.next<int>(rows);  // how many logits; -1: no token is drawn
  args.token_ids = emulator::device_array<int>(rows);
  args.thresholds = emulator::device_array<float>(rows);
  if (const int blocks = given.number("blocks"); blocks > 0) {
    launch_blocks<F>(args, blocks);
  } else if (launch_sample(args, element, nullptr) != cudaSuccess) {
    emulator::fail("launch");
  }
  emulator::Tally tally;
  for (int row = 0; row < args.num_rows; ++row) {
    // -1 is a token, and what is unwritten; the threshold is written behind it.
    if (args.token_ids[row] != -1) tally.compare(args.token_ids[row], tokens[row], 0);
    if (args.token_ids[row] == -1) tally.compare(0, tokens[row] + 1, 0);
    if (emulator::is_unwritten(args.thresholds[row])) ++tally.unwritten;
    if (kept[row] >= 0) tally.compare(count_kept<F>(args, row), kept[row], 0);
  }
  return tally.report(given);
}

bool check(const Case& given) {
  const Element element = given.choice<Element>(
      "element",
      {{"bfloat16", Element::kBFloat16}, {"float16", Element::kHalf}, {"float32", Element::kFloat}},
      "bfloat16");
  return with_keys(element, [&](auto keys) { return check_keys<decltype(keys)>(given, element); });
}

}  // namespace

int main() { return emulator::run_cases(check); }
