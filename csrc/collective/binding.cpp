// fw_cuda::peer_*: argument checks and the outputs.
#include "../common/binding.h"

#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "groups.h"

namespace fusewright::collective {
namespace {

constexpr const char* kSum = "fw_cuda::peer_all_reduce";
constexpr const char* kNorm = "fw_cuda::peer_all_reduce_norm";
constexpr const char* kGather = "fw_cuda::peer_all_gather";

Handle* check_handles(const char* op, const Tensor& t) {
  const bool bytes = t.scalar_type() == ScalarType::Byte;
  if (t.is_cuda() || !bytes || t.dim() != 2 || !t.is_contiguous() ||
      t.size(1) != static_cast<int64_t>(sizeof(Handle))) {
    fail(op, "handles have shape ", shape_of(t), ", expected a contiguous [ranks, ", sizeof(Handle),
         "] of uint8 on the host");
  }
  return static_cast<Handle*>(t.data_ptr());
}

void peer_open(const Tensor& handle, const std::string& group_name, int64_t device, int64_t rank,
               int64_t world, int64_t part_bytes) {
  Handle* const to = check_handles("fw_cuda::peer_open", handle);
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  const Handle made =
      open_group(group_name, static_cast<int>(rank), static_cast<int>(world), part_bytes);
  std::memcpy(to, &made, sizeof(Handle));
}

void peer_connect(const Tensor& handles, const std::string& group_name) {
  const Handle* const from = check_handles("fw_cuda::peer_connect", handles);
  connect_group(group_name, from, static_cast<int>(handles.size(0)));
}

void peer_abort(const std::string& group_name) { abort_group(group_name); }

void peer_close(const std::string& group_name) { close_group(group_name); }

Element check_element(const char* op, const Tensor& x) {
  if (!x.is_cuda()) fail(op, "x is not on a CUDA device");
  if (x.scalar_type() == ScalarType::BFloat16) return Element::kBFloat16;
  if (x.scalar_type() == ScalarType::Half) return Element::kHalf;
  fail(op, "x ", shape_of(x), " has elements of ", x.element_size(),
       " bytes, expected bfloat16 or float16");
}

void check_room(const char* op, const Peers& peers, int64_t packets, const Tensor& x) {
  if (packets > peers.packets) {
    fail(op, "x ", shape_of(x), " has ", packets * 16, " bytes, expected ", peers.packets * 16,
         " or fewer");
  }
}

// A contiguous tensor of x's dtype whose elements lie in packets.
const void* check_packets(const char* op, const Tensor& t, const char* name, const Tensor& x) {
  check_device(op, t, name, x);
  if (!t.is_contiguous() || !is_aligned(t) || t.scalar_type() != x.scalar_type()) {
    fail(op, name, " ", shape_of(t), " is not contiguous, not of x's dtype, or not on an address ",
         "that is a multiple of 16");
  }
  return t.data_ptr();
}

template <typename Args>
void run(const char* op, const Args& args, const Tensor& x,
         cudaError_t (*launch)(const Args&, bool, cudaStream_t)) {
  const cudaStream_t stream = current_stream(x.get_device_index());
  const cudaError_t error = launch(args, is_capturing(op, stream), stream);
  if (error != cudaSuccess) {
    fail(op, "launch on ", shape_of(x), " failed: ", cudaGetErrorString(error));
  }
}

Tensor empty_like(const Tensor& x) {
  std::vector<int64_t> sizes, strides(x.dim(), 1);
  for (int64_t d = 0; d < x.dim(); ++d) sizes.push_back(x.size(d));
  for (int64_t d = x.dim() - 1; d > 0; --d) strides[d - 1] = strides[d] * sizes[d];
  AtenTensorHandle handle = nullptr;
  check_torch(
      aoti_torch_empty_strided(x.dim(), sizes.data(), strides.data(), dtype_of(x),
                               aoti_torch_device_type_cuda(), x.get_device_index(), &handle),
      "allocation");
  return Tensor(handle);
}

Tensor peer_all_reduce(const Tensor& x, const std::string& group_name) {
  SumArgs args = {};
  args.element = check_element(kSum, x);
  args.x = check_packets(kSum, x, "x", x);
  const int64_t count = x.numel();
  if (count % kPacketElements != 0) {
    fail(kSum, "x ", shape_of(x), ", expected a multiple of ", kPacketElements, " elements");
  }
  args.peers = find_group(kSum, group_name, x.get_device_index());
  args.num_packets = count / kPacketElements;
  check_room(kSum, args.peers, args.num_packets, x);
  constexpr int kRowPackets = 512;
  args.row_packets = kRowPackets;
  args.x_row_stride = kRowPackets * kPacketElements;
  args.rows = static_cast<int>((args.num_packets + kRowPackets - 1) / kRowPackets);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor total = empty_like(x);
  args.total = total.data_ptr();
  if (args.rows > 0) run(kSum, args, x, launch_sum);
  return total;
}

struct Quantized {
  Tensor y, scales;
};

// The results of a norm, and in the arguments where they are.
Quantized plan_results(SumArgs& args, const Tensor& x, const std::optional<Tensor>& scale,
                       int64_t group_size) {
  const int64_t rows = x.size(0), hidden = x.size(1);
  int64_t groups = 0;
  if (scale) {
    check_device(kNorm, *scale, "scale", x);
    if (scale->numel() != 1 || scale->scalar_type() != ScalarType::Float) {
      fail(kNorm, "scale has shape ", shape_of(*scale), ", expected one float32");
    }
    args.scale = static_cast<const float*>(scale->data_ptr());
    args.quantize = Quantize::kStatic;
  } else if (group_size == 0) {
    args.quantize = Quantize::kToken;
    groups = 1;
  } else if (group_size == kScaleGroup && hidden % kScaleGroup == 0) {
    args.quantize = Quantize::kGroup;
    groups = hidden / kScaleGroup;
  } else if (group_size != -1) {
    fail(kNorm, "group_size is ", group_size, ", expected -1, 0, or ", kScaleGroup,
         " with x's columns a multiple of it");
  }
  const bool quantized = args.quantize != Quantize::kNone;
  const int32_t dtype = quantized ? aoti_torch_dtype_float8_e4m3fn() : dtype_of(x);
  const Tensor y = empty({rows, hidden}, dtype, x);
  const Tensor scales = empty({groups, groups ? rows : 0}, aoti_torch_dtype_float32(), x);
  args.y = y.data_ptr();
  args.scales = groups ? static_cast<float*>(scales.data_ptr()) : nullptr;
  return {y, scales};
}

// (the norm or its FP8 values, their scales [groups, rows], the last sum). group_size: -1 quantizes
// only by a static scale, if there is one.
std::tuple<Tensor, Tensor, Tensor> peer_all_reduce_norm(
    const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight, double eps,
    std::optional<double> weight_offset, const std::optional<Tensor>& scale, int64_t group_size,
    const std::string& group_name) {
  SumArgs args = {};
  args.element = check_element(kNorm, x);
  if (x.dim() != 2 || x.size(1) < 1 || x.size(1) > kMaxHidden || x.size(1) % kPacketElements != 0 ||
      x.stride(1) != 1 || !is_aligned(x) ||
      (x.size(0) > 1 && (x.stride(0) % kPacketElements != 0 || x.stride(0) < x.size(1)))) {
    fail(kNorm, "x ", shape_of(x), ", expected aligned rows without gaps inside, of a multiple of ",
         kPacketElements, " columns, ", kMaxHidden, " or fewer");
  }
  const int64_t rows = x.size(0), hidden = x.size(1);
  args.x = x.data_ptr();
  args.weight = check_packets(kNorm, weight, "weight", x);
  if (weight.dim() != 1 || weight.size(0) != hidden) {
    fail(kNorm, "weight has shape ", shape_of(weight), ", expected [", hidden, "]");
  }
  if (residual) {
    args.residual = check_packets(kNorm, *residual, "residual", x);
    if (residual->dim() != 2 || residual->size(0) != rows || residual->size(1) != hidden) {
      fail(kNorm, "residual has shape ", shape_of(*residual), ", expected ", shape_of(x));
    }
  }
  args.peers = find_group(kNorm, group_name, x.get_device_index());
  args.rows = static_cast<int>(rows);
  args.row_packets = static_cast<int>(hidden / kPacketElements);
  args.num_packets = rows * args.row_packets;
  check_room(kNorm, args.peers, args.num_packets, x);
  args.x_row_stride = rows > 1 ? x.stride(0) : hidden;
  args.eps = static_cast<float>(eps);
  args.has_offset = weight_offset.has_value();
  args.weight_offset = static_cast<float>(weight_offset.value_or(0.0));
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Quantized made = plan_results(args, x, scale, group_size);
  const Tensor total = empty({rows, hidden}, dtype_of(x), x);
  args.total = total.data_ptr();
  if (rows > 0) run(kNorm, args, x, launch_sum);
  return {made.y, made.scales, total};
}

Tensor peer_all_gather(const Tensor& x, const std::string& group_name) {
  GatherArgs args = {};
  check_element(kGather, x);
  args.x = static_cast<const uint4*>(check_packets(kGather, x, "x", x));
  if (x.dim() != 2 || x.size(1) % kPacketElements != 0) {
    fail(kGather, "x ", shape_of(x), ", expected a matrix of a multiple of ", kPacketElements,
         " columns");
  }
  args.peers = find_group(kGather, group_name, x.get_device_index());
  args.row_packets = x.size(1) / kPacketElements;
  args.num_packets = x.size(0) * args.row_packets;
  check_room(kGather, args.peers, args.num_packets, x);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor y = empty({x.size(0), x.size(1) * args.peers.world}, dtype_of(x), x);
  args.y = static_cast<uint4*>(y.data_ptr());
  if (args.num_packets > 0) run(kGather, args, x, launch_gather);
  return y;
}

}  // namespace
}  // namespace fusewright::collective

STABLE_TORCH_LIBRARY_FRAGMENT(fw_cuda, m) {
  m.def(
      "peer_open(Tensor(a!) handle, str group_name, int device, int rank, int world, "
      "int part_bytes) -> ()");
  m.def("peer_connect(Tensor handles, str group_name) -> ()");
  m.def("peer_abort(str group_name) -> ()");
  m.def("peer_close(str group_name) -> ()");
  m.def("peer_all_reduce(Tensor x, str group_name) -> Tensor");
  m.def(
      "peer_all_reduce_norm(Tensor x, Tensor? residual, Tensor weight, float eps, "
      "float? weight_offset, Tensor? scale, int group_size, str group_name) "
      "-> (Tensor, Tensor, Tensor)");
  m.def("peer_all_gather(Tensor x, str group_name) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fw_cuda, CompositeExplicitAutograd, m) {
  m.impl("peer_open", TORCH_BOX(&fusewright::collective::peer_open));
  m.impl("peer_connect", TORCH_BOX(&fusewright::collective::peer_connect));
  m.impl("peer_abort", TORCH_BOX(&fusewright::collective::peer_abort));
  m.impl("peer_close", TORCH_BOX(&fusewright::collective::peer_close));
}

STABLE_TORCH_LIBRARY_IMPL(fw_cuda, CUDA, m) {
  m.impl("peer_all_reduce", TORCH_BOX(&fusewright::collective::peer_all_reduce));
  m.impl("peer_all_reduce_norm", TORCH_BOX(&fusewright::collective::peer_all_reduce_norm));
  m.impl("peer_all_gather", TORCH_BOX(&fusewright::collective::peer_all_gather));
}
