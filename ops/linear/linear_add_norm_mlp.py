"""``linear_add_norm_mlp`` is what lies between two attentions of a decoder with FP8 layers: a
projection into the residual stream, a norm and the MLP; in all layers but a model's last one also
the next norm and the projection that follows.

It is one op for the same reason as ``linear_add_norm_linear``: the number of tokens decides what
passes between the layers.  For a few, streaming kernels multiply FP8 weights by activations that
stay bfloat16.  Nothing is quantized then, so no kernel has to wait for the largest value of a row,
and sums, norms and activations are computed where their results are read.  For more, activations
are quantized to FP8, by the kernels that add, normalize and activate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..core import in_turn as turns
from ..core.desc import Case, Cost, Draw, OpDesc, TensorDesc, Tolerance, drawn
from ..core.float8 import E4M3
from ..core.in_turn import Visit
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, on_gpu, parameters_of, signed
from ..core.target import Target, here
from ..launches.quant import WHOLE_ROW
from ..norm.gated_act import GATED_ACTS
from ..norm.norm import NORMS, Norm
from ..norm.quantize import QUANTIZE, refuses_device
from .csrc import streamable
from .desc import LinearDesc
from .kernels import LIBRARY, STREAM, why_not_streamed
from .linear import OP as LINEAR
from .linear_add_norm_linear import LinearAddNorm

Results: TypeAlias = tuple[Tensor, Tensor]

_QUANTIZE, _ADD_NORM = QUANTIZE["dynamic"], NORMS[Norm(add=True, quant="dynamic")]


class Call(NamedTuple):
    """The arguments of a call.

    Attributes:
        head: the first layer, with x a matrix and the weight FP8, the residual add and the norm.
        gate_up: [2 * inner, hidden] float8_e4m3fn, gate rows first.
        down: [hidden, inner] float8_e4m3fn.
        activation: "silu" or "gelu_tanh", as of ``linear``.
        next_norm_weight, next_eps: of the norm behind the MLP.  In a model's last layer,
            ``next_norm_weight`` and all of the layer behind it are None.
        next_weight, next_bias: [out_features, hidden] float8_e4m3fn and [out_features], or None.
        weight_scale, gate_up_scale, down_scale, next_scale: [rows of the weight, 1] float32.
    """

    head: LinearAddNorm
    gate_up: Tensor
    down: Tensor
    activation: str
    next_norm_weight: Tensor | None
    next_eps: float
    next_weight: Tensor | None
    next_bias: Tensor | None
    weight_scale: Tensor
    gate_up_scale: Tensor
    down_scale: Tensor
    next_scale: Tensor | None

    @classmethod
    def of(cls, args: Iterable[Any]) -> Call:
        """The call with these arguments, in the order of the op's parameters."""
        args = tuple(args)
        return cls(LinearAddNorm(*args[:6]), *args[6:])

    @property
    def is_last(self) -> bool:
        """Whether nothing follows the MLP."""
        return self.next_weight is None


_PARAMETERS = (*parameters_of(LinearAddNorm), *parameters_of(Call)[1:])


def _in_turn(call: Call, visit: Visit) -> Results:
    """Compute a call op by op, with activations quantized before each layer."""
    head, dtype = call.head, call.head.x.dtype

    def layer(quantized: Iterable[Any], weight: Any, scale: Any, bias: Any = None) -> Any:
        x, x_scale = quantized
        return visit(LINEAR, x, weight, bias, x_scale, scale, dtype, None, None)

    x = visit(_QUANTIZE, head.x, WHOLE_ROW)
    y = layer(x, head.weight, call.weight_scale, head.bias)
    *x, total = visit(_ADD_NORM, y, head.residual, head.norm_weight, head.eps, WHOLE_ROW)
    gate_up = layer(x, call.gate_up, call.gate_up_scale)
    x = visit(GATED_ACTS[call.activation, "dynamic"], gate_up, WHOLE_ROW)
    y = layer(x, call.down, call.down_scale)
    if call.is_last:
        return y, total
    *x, total = visit(_ADD_NORM, y, total, call.next_norm_weight, call.next_eps, WHOLE_ROW)
    return layer(x, call.next_weight, call.next_scale, call.next_bias), total


def _reference(*args: Any) -> Results:
    """FP8 layers of a decoder between two attentions, each of x quantized a token.

    Returns:
        (y, residual_out), contiguous.  y is [num_tokens, out_features], and ``residual_out`` is the
        sum that the last norm reads.  Without ``next_weight``, y is the result of the MLP, and
        ``residual_out`` is the sum before it.  The streaming kernels do not quantize activations:
        their y is nearer to the layers of unquantized x.

    Raises:
        ValueError: shapes or dtypes are not these.
    """
    call = Call.of(args)
    check(call)
    return _in_turn(call, turns.reference)


def check(call: Call) -> None:
    """Raises ValueError: shapes do not fit; names what was expected."""
    call.head.check_matrix("linear_add_norm_mlp")
    behind = [t is None for t in (call.next_norm_weight, call.next_weight, call.next_scale)]
    if any(behind) != all(behind):
        raise ValueError(
            "linear_add_norm_mlp: some of next_norm_weight, next_weight and next_scale are given, "
            "expected all or none"
        )
    if (call.activation, "dynamic") not in GATED_ACTS:
        raise ValueError(
            f"linear_add_norm_mlp: activation is {call.activation!r}, expected 'silu' or "
            "'gelu_tanh'"
        )


def _fake(*args: Any) -> Results:
    call = Call.of(args)
    check(call)
    return _in_turn(call, turns.fake)


def _facts(call: Call) -> tuple[Any, ...]:
    """The hashable facts from which ``_layers`` describes a call: x's dtype, the shapes of the
    weights, which layers have a bias, and the activation."""
    weights = (call.head.weight, call.gate_up, call.down, call.next_weight)
    shapes = tuple([None if t is None else tuple(t.shape) for t in weights])
    biases = call.head.bias is not None, call.next_bias is not None
    return call.head.x.dtype, shapes, biases, call.activation


@lru_cache(4096)
def _layers(
    dtype: torch.dtype, shapes: tuple[Any, ...], biases: tuple[bool, bool], activation: str
) -> list[LinearDesc]:
    """Describe the layers as the streaming kernels run them, of activations in x's dtype, by the
    facts of a call."""
    first, gate_up, down, behind = shapes

    def layer(shape: tuple[int, int], **how: Any) -> LinearDesc:
        return LinearDesc("fp8 weight", dtype, *shape, **how)

    found = [
        layer(first, bias=biases[0], add=True),
        layer(gate_up, prologue="norm", activation=activation),
        layer(down, add=behind is not None),
    ]
    if behind is not None:
        found.append(layer(behind, prologue="norm", bias=biases[1]))
    return found


@lru_cache(4096)
def _are_streamed(facts: tuple[Any, ...], rows: int, device: torch.device) -> bool:
    return not why_not_streamed(_layers(*facts), rows, here(device))


def _streams(call: Call) -> bool:
    """Whether the streaming kernels serve all layers of a call."""
    x, weights = call.head.x, (call.head.weight, call.gate_up, call.down, call.next_weight)
    if not _are_streamed(_facts(call), x.shape[0], x.device):
        return False
    return streamable(x, *(t for t in weights if t is not None)) is not None


def _skinny(*args: Any) -> Results:
    """Four streaming kernels for few tokens, else the ops in turn."""
    call = Call.of(args)
    if not _streams(call):
        return _run_with_csrc(*args)
    head = call.head._replace(
        residual=call.head.residual.contiguous(), norm_weight=call.head.norm_weight.contiguous()
    )
    join = torch.ops.fw_cuda.skinny_linear_add_norm_linear.default
    behind: tuple[Any, ...] = (call.gate_up, None, call.activation)
    y, total = join(*head, *behind, call.weight_scale, call.gate_up_scale)
    if call.next_norm_weight is None:
        multiply = torch.ops.fw_cuda.skinny_linear.default
        return multiply(y, call.down, None, None, call.down_scale, y.dtype), total
    norm = call.next_norm_weight.contiguous(), call.next_eps
    behind = (call.next_weight, call.next_bias, None, call.down_scale, call.next_scale)
    joined: Results = join(y, call.down, None, total, *norm, *behind)
    return joined


def _part(linear: str) -> turns.Part:
    """Choose the implementations of a call that is computed op by op."""
    return lambda op: op.implementation(linear if op is LINEAR else "triton")


def _runner(linear: str) -> Callable[..., Results]:
    def run(*args: Any) -> Results:
        results: Results = turns.run(_in_turn, Call.of(args), _part(linear))
        return results

    return run


_run_with_csrc = _runner("skinny")


def _launches(*args: Any, linear: str) -> Launches[Results]:
    """The launches of the ops in turn: what must be compiled."""
    return turns.plan(_in_turn, Call.of(args), _part(linear))


def _runs(*args: Any, linear: str) -> tuple[str, ...]:
    """Names of the kernels that a call launches."""
    call = Call.of(args)
    if linear == "skinny" and _streams(call):
        joined = f"{STREAM.name}, add", f"norm, {STREAM.name}"
        return (*joined, STREAM.name) if call.is_last else (*joined, *joined)
    return turns.names(_in_turn, call, _part(linear))


def _supports(desc: OpDesc) -> str:
    """Why the ops in turn do not serve a call; "" if they do."""
    if reason := refuses_device(desc):
        return reason
    call, target = Call.of([value for _, value in desc.args]), Target.of(desc)
    for layer in _layers(*_facts(call)):
        plain = LinearDesc("fp8 token", layer.dtype, layer.out_features, layer.in_features)
        if reason := LIBRARY.refuses(plain, 1, target):
            return reason
    inner = TensorDesc(call.head.x.dtype, (call.head.x.shape[0], call.gate_up.shape[0]))
    act = GATED_ACTS[call.activation, "dynamic"]
    for op, x in ((_QUANTIZE, call.head.x), (_ADD_NORM, call.head.residual), (act, inner)):
        part = OpDesc(op.name, (("x", x),), desc.device, desc.sm)
        if reason := op.implementation("triton").supports(part):
            return reason
    return ""


def _skinny_supports(desc: OpDesc) -> str:
    call = Call.of([value for _, value in desc.args])
    return _supports(desc) or why_not_streamed(_layers(*_facts(call)), 1, Target.of(desc))


# Results are of size one.  Each of the four layers moves them by 2 % where a kernel rounds an x to
# another neighbour in FP8 than the reference does, or not to FP8 at all.  On a CPU only bfloat16,
# whose sums another order moves by a bit, meets other neighbours.
_MOVED = Tolerance(0.25, 0.1)
_TOLERANCES = {
    torch.float32: Tolerance(1e-2, 1e-2),
    torch.float16: Tolerance(2e-2, 2e-2),
    torch.bfloat16: _MOVED,
}
_ON_GPU = dict.fromkeys(_TOLERANCES, _MOVED)


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    dtype, randn = draw.dtype, draw.randn
    tolerances = _ON_GPU if draw.device.type == "cuda" else None

    def weight(n: int, k: int) -> tuple[Tensor, Tensor]:
        """Rows of a norm of about one, and their scales."""
        return (randn(n, k) * 100).clamp(-448, 448).to(E4M3), (0.75 + draw.rand(n, 1) / 2) / (
            100 * k**0.5
        )

    def call(
        label: str,
        tokens: int,
        k: int,
        hidden: int,
        inner: int,
        n: int,
        activation: str = "silu",
        bias: bool = False,
    ) -> Case:
        first, gate_up, down, then = (
            weight(*shape)
            for shape in ((hidden, k), (2 * inner, hidden), (hidden, inner), (n, hidden))
        )
        biases = [randn(size).to(dtype) if bias else None for size in (hidden, n)]
        x, residual = randn(tokens, k).to(dtype), randn(tokens, hidden).to(dtype)
        norms = [(1 + randn(hidden) / 4).to(dtype) for _ in range(2)]
        head = (x, first[0], biases[0], residual, norms[0], 1e-5, gate_up[0], down[0], activation)
        scales = (first[1], gate_up[1], down[1])
        if not n:
            return Case(label, (*head, None, 0.0, None, None, *scales, None), tolerances)
        behind = (norms[1], 1e-6, then[0], biases[1])
        return Case(label, (*head, *behind, *scales, then[1]), tolerances)

    yield call("one token", 1, 48, 64, 96, 80)
    yield call("last layer, GELU", 5, 64, 32, 48, 0, "gelu_tanh")
    yield call("biases", 19, 32, 96, 64, 48, bias=True)
    yield call("no tokens", 0, 32, 64, 48, 16)
    if draw.device.type == "cuda":  # large enough for the streaming kernels
        large = partial(call, k=4096, hidden=2048, inner=4096)
        for tokens in (1, 2, 3, 40):
            yield large(f"{tokens} tokens", tokens, n=4096)
        yield large("2 tokens, GELU", 2, n=4112, activation="gelu_tanh", bias=True)
        yield large("1 token, last layer", 1, n=0)


def _cost(desc: OpDesc) -> Cost:
    call = Call.of([value for _, value in desc.args])
    rows, hidden = call.head.residual.shape
    read = sum(value.nbytes for _, value in desc.args if isinstance(value, TensorDesc))
    columns = hidden if call.next_weight is None else call.next_weight.shape[0]
    written = rows * (columns + hidden) * call.head.x.dtype.itemsize
    weights = (call.head.weight, call.gate_up, call.down, call.next_weight)
    flops = sum(2 * rows * t.shape[0] * t.shape[1] for t in weights if t is not None)
    between = 5 * rows * (hidden * (1 if call.is_last else 2) + call.down.shape[1])
    return Cost(bytes=read + written, flops=flops + between)


OP = SemanticOp(
    name="linear_add_norm_mlp",
    reference=signed(_reference, _PARAMETERS, results=2),
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        on_gpu(
            "skinny",
            _skinny,
            _skinny_supports,
            launches=partial(_launches, linear="skinny"),
            runs=partial(_runs, linear="skinny"),
        ),
        on_gpu(
            "library",
            _runner("library"),
            _supports,
            launches=partial(_launches, linear="library"),
            runs=partial(_runs, linear="library"),
        ),
        Implementation("native", _reference, refuses_device),
    ),
    tolerances=_TOLERANCES,
)
