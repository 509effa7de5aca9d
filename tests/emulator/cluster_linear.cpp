// Linear layers, against exact sums: that whose tiles are divided among the blocks of clusters;
// with FW_STREAMED, a format of the one that streams a weight; with FW_PACKED, that by E2M1.
#ifdef FW_PACKED
#include "gemm/packed_linear.cu"
#else
#include "gemm/cluster_linear.cu"
#endif

#include "cases.h"

using namespace fusewright::gemm;
using emulator::Case;

namespace {

float small_number() { return static_cast<float>(static_cast<int>(emulator::dice() % 5) - 2); }

// Numbers of either type, rows apart, and the same as floats side by side.
struct Matrix {
  void* data;
  std::vector<float> numbers;

  Matrix(int rows, int columns, int stride, bool fp8)
      : numbers(static_cast<size_t>(rows) * columns) {
    const size_t count = static_cast<size_t>(rows - 1) * stride + columns;
    data = fp8 ? static_cast<void*>(emulator::device_array<__nv_fp8_e4m3>(count))
               : static_cast<void*>(emulator::device_array<__nv_bfloat16>(count));
    for (size_t i = 0; i < numbers.size(); ++i) {
      const size_t at = i / columns * stride + i % columns;
      numbers[i] = small_number();
      if (fp8) {
        static_cast<__nv_fp8_e4m3*>(data)[at] = __nv_fp8_e4m3(numbers[i]);
      } else {
        static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(numbers[i]);
      }
    }
  }
};

// Numbers of four bits, and the exponents of their groups.
[[maybe_unused]] void draw_packed(SkinnyLinearArgs& args, std::vector<float>& numbers) {
  constexpr float kNumbers[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  constexpr int kGroup = 32;
  auto* bytes = emulator::drawn_array<uint8_t>(
      numbers.size() / 2, [] { return static_cast<uint8_t>(emulator::dice()); });
  auto* exponents = emulator::drawn_array<uint8_t>(
      numbers.size() / kGroup, [] { return static_cast<uint8_t>(125 + emulator::dice() % 3); });
  for (size_t i = 0; i < numbers.size(); ++i) {
    const int nibble = bytes[i / 2] >> i % 2 * 4 & 15;
    const float number = std::ldexp(kNumbers[nibble & 7], exponents[i / kGroup] - 127);
    numbers[i] = nibble & 8 ? -number : number;
  }
  args.weight = bytes;
  args.weight_row_stride = args.in_features / 2;
  args.group = {exponents, nullptr, args.in_features / kGroup, 5};
}

float* scales(int count) {
  return emulator::drawn_array<float>(
      count, [] { return std::exp2(-static_cast<float>(emulator::dice() % 3)); });
}

bool check(const Case& given) {
  const int tokens = given.number("tokens", 9), features = given.number("features", 264);
  const int columns = given.number("columns", 512), stride = columns + 16;
  const bool fp8 = given.number("fp8"), each = given.number("scale_each", 1);
  const Matrix x(tokens, columns, stride, fp8);
  Matrix weight(features, columns, columns, fp8);
  SkinnyLinearArgs args = {};
  args.x = x.data;
  args.weight = weight.data;
  args.element = Element::kBFloat16;
  args.epilogue = Epilogue::kLinear;
  args.num_tokens = tokens;
  args.out_features = features;
  args.in_features = columns;
  args.x_row_stride = tokens > 1 ? stride : columns;
  args.weight_row_stride = columns;
  if (fp8) {
    args.x_scale = scales(each ? tokens : 1);
    args.weight_scale = scales(each ? features : 1);
    args.x_scale_stride = args.weight_scale_stride = each;
  }
  const __nv_bfloat16* bias = nullptr;
  if (given.number("bias", 1)) {
    args.bias = bias = emulator::drawn_array<__nv_bfloat16>(features, small_number);
  }
  auto* y = emulator::device_array<__nv_bfloat16>(static_cast<size_t>(tokens) * features);
  args.y = y;
  [[maybe_unused]] const Operands operands = fp8 ? Operands::kFp8 : Operands::kBf16;
#ifdef FW_STREAMED
  const cudaError_t error = launch_batch<FW_STREAMED, Batch<8, 8>>(args, OneRank{}, false, nullptr);
#elif defined(FW_PACKED)
  draw_packed(args, weight.numbers);
  const cudaError_t error = launch_packed_linear(args, Operands::kMxFp4, false, nullptr);
#else
  const cudaError_t error = launch_cluster_linear(args, operands, false, nullptr);
#endif
  if (error != cudaSuccess) emulator::fail("launch: error " + std::to_string(error));
  emulator::Tally tally;
  for (int token = 0; token < tokens; ++token) {
    for (int feature = 0; feature < features; ++feature) {
      float sum = 0;
      for (int i = 0; i < columns; ++i) {
        sum += x.numbers[token * columns + i] * weight.numbers[feature * columns + i];
      }
      if (fp8) sum *= args.x_scale[each ? token : 0] * args.weight_scale[each ? feature : 0];
      if (bias) sum += __bfloat162float(bias[feature]);
      const float want = __bfloat162float(__float2bfloat16_rn(sum));
      tally.compare(y[static_cast<size_t>(token) * features + feature], want, 0);
    }
  }
  return tally.report(given);
}

}  // namespace

int main() { return emulator::run_cases(check); }
