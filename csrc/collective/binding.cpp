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
constexpr const char* kWindow = "fw_cuda::peer_window";
constexpr const char* kPost = "fw_cuda::peer_post";
constexpr const char* kWait = "fw_cuda::peer_wait";
constexpr const char* kFetch = "fw_cuda::peer_fetch";
constexpr const char* kParts = "fw_cuda::peer_sum_parts_norm";

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
               int64_t world, int64_t part_bytes, int64_t window_bytes) {
  Handle* const to = check_handles("fw_cuda::peer_open", handle);
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  const Handle made = open_group(group_name, static_cast<int>(rank), static_cast<int>(world),
                                 part_bytes, window_bytes);
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

Tensor peer_all_reduce(const Tensor& x, const std::string& group_name, bool two_shots) {
  SumArgs args = {};
  args.element = check_element(kSum, x);
  args.x = check_packets(kSum, x, "x", x);
  const int64_t count = x.numel();
  if (count % kPacketElements != 0) {
    fail(kSum, "x ", shape_of(x), ", expected a multiple of ", kPacketElements, " elements");
  }
  args.peers = find_group(kSum, group_name, x.get_device_index());
  args.two_shots = two_shots;
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
    const std::string& group_name, bool two_shots) {
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
  args.two_shots = two_shots;
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

void check_in_window(const char* op, const Peers& peers, int64_t offset, int64_t bytes) {
  if (offset < 0 || bytes < 0 || offset % 16 != 0 || offset + bytes > peers.window_bytes) {
    fail(op, bytes, " bytes at ", offset, ", expected a multiple of 16 and bytes within the ",
         peers.window_bytes, " of a window");
  }
}

int check_peer(const char* op, const Peers& peers, int64_t rank) {
  if (rank < 0 || rank >= peers.world || rank == peers.rank) {
    fail(op, "rank ", rank, " is no other one of ", peers.world);
  }
  return static_cast<int>(rank);
}

// A matrix of x's dtype in this rank's window, which lives as long as the group.
Tensor peer_window(const Tensor& x, int64_t rows, int64_t columns, int64_t offset,
                   const std::string& group_name) {
  check_element(kWindow, x);
  const Peers peers = find_group(kWindow, group_name, x.get_device_index());
  check_in_window(kWindow, peers, offset, rows * columns * x.element_size());
  const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  AtenTensorHandle handle = nullptr;
  check_torch(aoti_torch_create_tensor_from_blob(
                  peers.window[peers.rank] + offset, 2, sizes, strides, 0, dtype_of(x),
                  aoti_torch_device_type_cuda(), x.get_device_index(), &handle),
              "tensor of a window");
  return Tensor(handle);
}

void check_launch(const char* op, cudaError_t error) {
  if (error != cudaSuccess) fail(op, "launch failed: ", cudaGetErrorString(error));
}

void peer_post(const Tensor& x, int64_t to, const std::string& group_name) {
  const Peers peers = find_group(kPost, group_name, x.get_device_index());
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x.get_device_index());
  check_launch(kPost, launch_post(peers, check_peer(kPost, peers, to), stream));
}

void peer_wait(const Tensor& x, int64_t source, const std::string& group_name) {
  const Peers peers = find_group(kWait, group_name, x.get_device_index());
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x.get_device_index());
  check_launch(kWait, launch_wait(peers, check_peer(kWait, peers, source), stream));
}

// Fills `to` by what lies at `offset` of a peer's window; a copy engine does it.
void peer_fetch(Tensor to, int64_t source, int64_t offset, const std::string& group_name) {
  check_packets(kFetch, to, "to", to);
  const Peers peers = find_group(kFetch, group_name, to.get_device_index());
  const int64_t bytes = to.numel() * to.element_size();
  check_in_window(kFetch, peers, offset, bytes);
  const char* const from = peers.window[check_peer(kFetch, peers, source)] + offset;
  const torch::stable::accelerator::DeviceGuard guard(to.get_device_index());
  check_launch(kFetch, cudaMemcpyAsync(to.data_ptr(), from, bytes, cudaMemcpyDeviceToDevice,
                                       current_stream(to.get_device_index())));
}

void peer_sum_parts_norm(const Tensor& parts, const Tensor& residual, const Tensor& weight,
                         double eps, Tensor y, Tensor total, Tensor total_copy,
                         const std::string& group_name) {
  SumArgs args = {};
  args.element = check_element(kParts, parts);
  args.peers = find_group(kParts, group_name, parts.get_device_index());
  const bool matrices = parts.dim() == 3 && parts.size(0) == args.peers.world;
  const int64_t rows = matrices ? parts.size(1) : 0, hidden = matrices ? parts.size(2) : 0;
  if (!matrices || hidden < 1 || hidden > kMaxHidden || hidden % kPacketElements != 0) {
    fail(kParts, "parts ", shape_of(parts), ", expected [", args.peers.world,
         ", rows, hidden], hidden a multiple of ", kPacketElements, ", ", kMaxHidden, " or fewer");
  }
  for (const auto& [name, t] : {std::pair<const char*, const Tensor&>{"residual", residual},
                                {"y", y},
                                {"total", total},
                                {"total_copy", total_copy}}) {
    check_packets(kParts, t, name, parts);
    if (t.dim() != 2 || t.size(0) != rows || t.size(1) != hidden) {
      fail(kParts, name, " has shape ", shape_of(t), ", expected [", rows, ", ", hidden, "]");
    }
  }
  args.x = check_packets(kParts, parts, "parts", parts);
  args.weight = check_packets(kParts, weight, "weight", parts);
  if (weight.numel() != hidden) {
    fail(kParts, "weight has shape ", shape_of(weight), ", expected [", hidden, "]");
  }
  args.residual = residual.data_ptr();
  args.y = y.data_ptr();
  args.total = total.data_ptr();
  args.total_copy = total_copy.data_ptr();
  args.rows = static_cast<int>(rows);
  args.row_packets = static_cast<int>(hidden / kPacketElements);
  args.num_packets = rows * args.row_packets;
  args.x_row_stride = rows * hidden;
  args.eps = static_cast<float>(eps);
  const torch::stable::accelerator::DeviceGuard guard(parts.get_device_index());
  if (rows > 0) run(kParts, args, parts, launch_sum_parts);
}

}  // namespace
}  // namespace fusewright::collective

STABLE_TORCH_LIBRARY_FRAGMENT(fw_cuda, m) {
  m.def(
      "peer_open(Tensor(a!) handle, str group_name, int device, int rank, int world, "
      "int part_bytes, int window_bytes) -> ()");
  m.def("peer_connect(Tensor handles, str group_name) -> ()");
  m.def("peer_abort(str group_name) -> ()");
  m.def("peer_close(str group_name) -> ()");
  m.def("peer_all_reduce(Tensor x, str group_name, bool two_shots=False) -> Tensor");
  m.def(
      "peer_all_reduce_norm(Tensor x, Tensor? residual, Tensor weight, float eps, "
      "float? weight_offset, Tensor? scale, int group_size, str group_name, bool two_shots=False) "
      "-> (Tensor, Tensor, Tensor)");
  m.def("peer_all_gather(Tensor x, str group_name) -> Tensor");
  m.def("peer_window(Tensor x, int rows, int columns, int offset, str group_name) -> Tensor");
  m.def("peer_post(Tensor x, int to, str group_name) -> ()");
  m.def("peer_wait(Tensor x, int source, str group_name) -> ()");
  m.def("peer_fetch(Tensor(a!) to, int source, int offset, str group_name) -> ()");
  m.def(
      "peer_sum_parts_norm(Tensor parts, Tensor residual, Tensor weight, float eps, Tensor(a!) y, "
      "Tensor(b!) total, Tensor(c!) total_copy, str group_name) -> ()");
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
  m.impl("peer_window", TORCH_BOX(&fusewright::collective::peer_window));
  m.impl("peer_post", TORCH_BOX(&fusewright::collective::peer_post));
  m.impl("peer_wait", TORCH_BOX(&fusewright::collective::peer_wait));
  m.impl("peer_fetch", TORCH_BOX(&fusewright::collective::peer_fetch));
  m.impl("peer_sum_parts_norm", TORCH_BOX(&fusewright::collective::peer_sum_parts_norm));
}
