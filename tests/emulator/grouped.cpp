// Experts for many rows, which are gathered, against exact sums. FW_SCALES is the format's.
#include "cases.h"
#include "moe/grouped_launch.cuh"

using namespace fusewright::moe;
using emulator::Case;

namespace {

using KernelTile = GroupedTile<Scales::FW_SCALES, true, false, Scales::FW_SCALES == Scales::kNone>;
using Number = std::conditional_t<KernelTile::kFp8, __nv_fp8_e4m3, __nv_bfloat16>;

int draw(int count) { return static_cast<int>(emulator::dice() % count); }

bool check(const Case& given) {
  const std::vector<int> counts = given.numbers("slots");  // of each expert
  GroupedArgs args = {};
  args.num_experts = given.number("experts");
  args.in_features = given.number("columns");
  args.out_features = given.number("outputs");
  args.slots_a_row = 1;
  std::vector<int> offsets = {0}, order;
  for (int count : counts) offsets.push_back(offsets.back() + count);
  args.num_slots = args.x_rows = offsets.back();
  for (int slot = 0; slot < args.num_slots; ++slot) order.push_back(slot);
  std::shuffle(order.begin(), order.end(), emulator::dice);
  args.order = emulator::array_of(order);
  args.offsets = emulator::array_of(offsets);
  args.x_row_stride = args.in_features + 16;
  const auto small = [] { return static_cast<float>(draw(5) - 2); };
  const auto* x = emulator::drawn_array<Number>(args.num_slots * args.x_row_stride, small);
  const size_t of_expert = static_cast<size_t>(args.out_features) * args.in_features;
  const auto* weight = emulator::drawn_array<Number>(args.num_experts * of_expert, small);
  args.x = x;
  args.weight = weight;
  args.scales = Scales::FW_SCALES;
  const int groups = args.in_features / kScaleBlock;
  const int row_groups = (args.out_features + kScaleBlock - 1) / kScaleBlock;
  if (KernelTile::kFp8) {
    const auto scale = [] { return std::exp2(-static_cast<float>(draw(3))); };
    args.x_scale = emulator::drawn_array<float>(args.num_slots * groups, scale);
    args.x_scale_row = groups;
    args.x_scale_group = 1;
    args.weight_scale = emulator::drawn_array<float>(args.num_experts * row_groups * groups, scale);
  }
  args.y = emulator::device_array<__nv_bfloat16>(static_cast<size_t>(args.num_slots) *
                                                 args.out_features);
  if (run_grouped<KernelTile>(args, false, nullptr) != cudaSuccess) emulator::fail("launch");
  emulator::Tally tally;
  for (int place = 0, expert = 0; place < args.num_slots; ++place) {
    while (place == offsets[expert + 1]) ++expert;
    const int slot = order[place];
    for (int output = 0; output < args.out_features; ++output) {
      float sum = 0;
      for (int i = 0; i < args.in_features; ++i) {
        float scale = 1;
        if (KernelTile::kFp8) {
          const int row = expert * row_groups + output / kScaleBlock;
          scale = args.x_scale[slot * groups + i / kScaleBlock] *
                  args.weight_scale[row * groups + i / kScaleBlock];
        }
        sum += scale * static_cast<float>(x[slot * args.x_row_stride + i]) *
               static_cast<float>(weight[expert * of_expert + output * args.in_features + i]);
      }
      tally.compare(args.y[static_cast<size_t>(slot) * args.out_features + output],
                    __bfloat162float(__float2bfloat16_rn(sum)), 0);
    }
  }
  return tally.report(given);
}

}  // namespace

int main() { return emulator::run_cases(check); }
