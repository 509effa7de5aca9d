"""Chains: their text, which kernels cover them, and what few rows of FP8 layers are rounded to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.ops import BY_NAME, load_cuda_library
from fusewright.ops.chain import chain as chain_ops
from fusewright.ops.chain.chain import CHAIN, CHAIN_OVER_RANKS
from fusewright.ops.chain.kernels import OVERLAPPED, STREAM, Cover, Step
from fusewright.ops.chain.stages import Call, Linear, by_reference, parse
from fusewright.ops.linear.linear import OP as LINEAR

CPU, META = torch.device("cpu"), torch.device("meta")
PAIR = "linear(weight) > add_norm(weight, eps=1e-05) > linear(weight)"


def cases(op: Any, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    drawn = op.cases(dtype, device, torch.Generator(device=device).manual_seed(5))
    return {case.label: case for case in drawn}


@pytest.mark.parametrize("op", [CHAIN, CHAIN_OVER_RANKS], ids=lambda op: op.name)
def test_a_chain_is_read_as_it_is_printed(op: ops.SemanticOp) -> None:
    for label, case in cases(op, CPU).items():
        text = case.args[3]
        assert str(parse(text)) == text, label
        assert parse(text).sums_over_ranks is (op is CHAIN_OVER_RANKS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "linear(weight) > dense(weight)",
            r"'dense\(weight\)' is no stage, expected one of linear",
        ),
        ("linear(weight", "'linear.weight': .*, expected stage"),
        ("linear(weight) > linear(weight)", "adds nothing to the residual, expected an add_norm"),
        (PAIR.replace("linear(weight)", "linear(gain)"), r"operands \('gain',\), expected"),
        (PAIR.replace(", eps=1e-05", ""), "eps"),
        (PAIR.replace("1e-05", "__import__('os')"), "malformed node or string"),
        (PAIR.replace("eps=1e-05", "eps=1e-05, centre=True"), "unexpected keyword argument"),
        (PAIR.replace("(weight, eps", "(weight, bias, eps"), "no add_rms_norm of weight, bias"),
        (PAIR.replace("5)", "5, center=True, offset=1.0)", 1), "no add_layer_norm .* offset 1.0"),
        (PAIR.replace(">", "<", 1), "linear.weight. < .* is no stage"),
        (PAIR.replace("linear(weight)", "linear(weight, 3)", 1), "3 is no name of a tensor"),
    ],
)
def test_what_is_no_chain_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({2: []}, "0 operands, expected 3"),
        (
            {1: torch.zeros(2, 96)},
            r"x is \[1, 64\] and the residual \[2, 96\], expected as many rows",
        ),
        ({0: torch.zeros(1, 32, dtype=torch.bfloat16)}, "x has 32 features"),
        ({3: PAIR.replace("eps", "reduce=True, eps")}, "takes a group_name"),
    ],
)
def test_bad_arguments_are_named(change: dict[int, Any], message: str) -> None:
    args = [change.get(at, arg) for at, arg in enumerate(cases(CHAIN, CPU)["one row"].args)]
    for run in (CHAIN.reference, CHAIN.fake):
        with pytest.raises(ValueError, match=message):
            run(*args)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def layer(n: int, k: int, scheme: str = "") -> list[Tensor]:
    if not scheme:
        return [empty(n, k)]
    scale = (n, 1) if scheme == "token" else (-(-n // 128), k // 128)
    return [empty(n, k, dtype=torch.float8_e4m3fn), empty(*scale, dtype=torch.float32)]


def decoder_layer(rows: int, scheme: str = "", ranks: int = 1, last: bool = False) -> list[Any]:
    """The arguments of Llama-3-8B's chain from an attention to the next, or to the end."""
    heads, inner, hidden = 4096 // ranks, 14336 // ranks, 4096
    size = {"": "", "token": ", group_size=0", "block": ", group_size=128"}[scheme]
    dense = f"linear(weight{', weight_scale' if scheme else ''}{size})"
    norm = f"add_norm(weight, eps=1e-05{size}{', reduce=True' if ranks > 1 else ''})"
    gate = [f"{dense} > act(activation='silu'{size})"] if scheme else []
    text = [dense, norm, *(gate or ["linear(weight, activation='silu')"]), dense]
    weights = [*layer(hidden, heads, scheme), empty(hidden), *layer(2 * inner, hidden, scheme)]
    weights += layer(hidden, inner, scheme)
    if not last:
        text += [norm, dense]
        weights += [empty(hidden), *layer(6144 // ranks, hidden, scheme)]
    args = [empty(rows, heads), empty(rows, hidden), weights, " > ".join(text)]
    return [*args, "any"] if ranks > 1 else args


FIRST, SECOND = "skinny_linear, add", "norm, skinny_linear"
PUSHED = "skinny_linear, push, add"
QUANTIZED = [
    *("_quantize_rows_kernel", "cuBLASLt", "_norm_quantize_kernel", "cuBLASLt"),
    *("_quantize_rows_kernel", "cuBLASLt", "_norm_quantize_kernel", "cuBLASLt"),
]


@pytest.mark.parametrize(
    ("scheme", "ranks", "last", "rows", "names"),
    [
        ("", 1, False, 1, [FIRST, SECOND] * 2),
        ("", 1, False, 16, [FIRST, SECOND] * 2),
        ("token", 1, False, 1, [FIRST, SECOND] * 2),
        ("token", 1, False, 2, [FIRST, SECOND] * 2),
        ("token", 1, True, 1, [FIRST, SECOND, "skinny_linear"]),
        ("block", 1, False, 1, [FIRST, SECOND, "_gated_activation_kernel", FIRST, SECOND]),
        ("block", 1, True, 1, [FIRST, SECOND, "_gated_activation_kernel", "skinny_linear"]),
        ("", 2, False, 1, [PUSHED, SECOND] * 2),
        ("token", 2, False, 1, [PUSHED, SECOND] * 2),
    ],
)
def test_few_rows_stream(scheme: str, ranks: int, last: bool, rows: int, names: list[str]) -> None:
    """Two launches for each pair of layers, which the norm, the residual, a sum over ranks and an
    activation are parts of.  FP8 activations of blocks have a kernel of their own."""
    op = CHAIN if ranks == 1 else CHAIN_OVER_RANKS
    found = op.implementation("cuda").runs(*decoder_layer(rows, scheme, ranks, last))  # type: ignore[misc]
    assert [*found] == names


@pytest.mark.parametrize("rows", [1, 17])
def test_products_and_offsets_of_norms_cost_no_launch(rows: int) -> None:
    """Granite's residual multiplier and Gemma's norms, with few rows and with more."""
    plain = decoder_layer(rows)
    text = plain[3].replace("eps=1e-05", "eps=1e-05, offset=1.0")
    text = text.replace("add_norm", "scale(factor=0.22) > add_norm")
    run = CHAIN.implementation("cuda").runs
    assert [*run(*plain[:3], text)] == [*run(*plain)]  # type: ignore[misc]


@pytest.mark.parametrize(("scheme", "rows"), [("", 17), ("token", 3), ("block", 40)])
def test_more_rows_run_as_without_a_chain(scheme: str, rows: int) -> None:
    """The kernels are those that the ops of the stages have alone."""
    args = decoder_layer(rows, scheme)
    alone: list[str] = []

    def visit(op: ops.SemanticOp, *given: Any) -> Any:
        chosen = op.implementation("skinny" if op is LINEAR else "triton")
        if chosen.runs is not None:
            alone.extend(chosen.runs(*given))
        else:
            alone.extend(n.kernel.partition(":")[2] for n in chosen.launches(*given)[0])  # type: ignore[misc]
        return op.fake(*given)

    Call.of(args).fold(visit)
    assert CHAIN.implementation("cuda").runs(*args) == tuple(alone)  # type: ignore[misc]
    assert len(alone) >= 6


@pytest.mark.parametrize("rows", [9, 128])
def test_gated_fp8_layers_activate_where_they_multiply(rows: int) -> None:
    """One launch less reads gates and ups; the stages around the layer run as without it."""
    op, args = CHAIN.implementation("cuda"), decoder_layer(rows, "token")
    names = [*op.runs(*args)]  # type: ignore[misc]
    at = names.index("persistent_linear")
    assert names[at - 1 : at + 2] == ["_norm_quant_kernel", "persistent_linear", "_quant_kernel"]
    assert len(names) == 8 and names.count("_quant_kernel") == 2


@pytest.mark.parametrize("rows", [33, 64])
def test_a_gated_fp8_layer_quantizes_what_its_norm_does_not(rows: int) -> None:
    """As behind a norm with an offset.  Where the kernel cannot read, the layer and its activation
    run in turn: what they launch is planned beside what the kernel does."""
    op, args = CHAIN.implementation("cuda"), decoder_layer(rows, "token")
    args[3] = args[3].replace("eps=1e-05, group_size=0)", "eps=1e-05, offset=1.0)")
    names = [*op.runs(*args)]  # type: ignore[misc]
    at = names.index("persistent_linear")
    assert names[at - 1 : at + 2] == ["_quant_kernel", "persistent_linear", "_quant_kernel"]
    planned, _ = op.launches(*args)  # type: ignore[misc]
    quantized = [each for each in planned if each.kernel == "quant:_quant_kernel"]
    kinds = {(each.args["width"], each.constexprs["ACTIVATION"]) for each in quantized}
    assert kinds >= {(4096, "none"), (14336, "none"), (14336, "silu")}


def test_each_layer_behind_a_kernel_that_cannot_read_has_its_own_implementation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stages that a kernel was to compute at once run by their own ops, each as it needs."""
    args = cases(CHAIN, CPU)["one row"].args
    unreadable = replace(STREAM, run=lambda part: None)
    laid = Cover((Step(unreadable, 0, 3),), {})
    monkeypatch.setattr(chain_ops, "cover", lambda args, kernels: laid)
    asked: list[Any] = []

    def choose(op: ops.SemanticOp, args: tuple[Any, ...], way: Any) -> Any:
        asked.append((op.name, tuple(args[1].shape)))
        return op.implementation("native")

    monkeypatch.setattr(chain_ops, "_implementation", choose)
    run = CHAIN.implementation("cuda").fn
    assert all(map(torch.equal, run(*args), CHAIN.reference(*args)))
    assert asked == [("linear", (96, 64)), ("add_rms_norm", (1, 96)), ("linear", (80, 96))]
    run(*args)
    assert len(asked) == 3, "a second run asks nothing"


def test_the_launches_of_stages_in_turn_are_compiled_for_few_rows_too() -> None:
    """A kernel of csrc that cannot read a tensor's strides leaves the stages to them."""
    for scheme in ("token", "block"):
        planned, _ = CHAIN.implementation("cuda").launches(*decoder_layer(1, scheme))  # type: ignore[misc]
        names = {launch.kernel.partition(":")[2] for launch in planned}
        assert {"_quantize_rows_kernel", "_norm_quantize_kernel"} <= names or len(names) >= 3
        assert ("_gated_activation_kernel" in names) is (scheme == "block")


def described(args: Any, dtype: Any = None, **target: Any) -> ops.OpDesc:
    return replace(CHAIN.describe(args, **{"sm": 90, "csrc": True, **target}), device="cuda")


@pytest.mark.parametrize(
    ("label", "dtype", "reason"),
    [
        ("FP8 token, one token", torch.bfloat16, "less than 8 MiB"),
        ("FP8 token, one token", torch.float16, "an FP8 weight is converted to bfloat16 alone"),
        ("offset norm", torch.bfloat16, "less than 8 MiB"),
        ("residual multiplier, offset norm", torch.bfloat16, "less than 8 MiB"),
        ("rows, sandwich", torch.bfloat16, "no chain kernel has this pattern"),
        ("post-norm", torch.bfloat16, "no chain kernel has this pattern"),
        ("SiLU", torch.float32, "not bfloat16 or FP8"),
    ],
)
def test_what_the_kernels_refuse_is_said(label: str, dtype: torch.dtype, reason: str) -> None:
    desc = described(cases(CHAIN, CPU, dtype)[label].args)
    assert reason in CHAIN.implementation("cuda").supports(desc)
    assert not CHAIN.implementation("library").supports(desc)
    choice = ops.choose(CHAIN, desc, inline_first=False)
    assert choice.name == "library" and reason in str(choice)


def test_without_csrc_no_kernel_of_it_is_chosen() -> None:
    desc = described(decoder_layer(1), csrc=False)
    reason = CHAIN.implementation("cuda").supports(desc)
    assert reason.endswith("csrc is not built into this installation")


def test_inductor_sees_through_all_but_experts() -> None:
    native = CHAIN.implementation("native")
    for label, case in cases(CHAIN, CPU).items():
        assert bool(native.supports(CHAIN.describe(case.args))) is ("experts" in label), label


def test_a_shape_that_the_library_refuses_is_tritons() -> None:
    """FP8 rows of 24 columns: cuBLASLt takes multiples of 16."""
    for n, k, name in ((64, 64, "skinny"), (64, 24, "triton")):
        weight, scale = layer(n, k, "token")
        x = empty(3, k, dtype=torch.float8_e4m3fn), empty(3, 1, dtype=torch.float32)
        args = (x[0], weight, None, x[1], scale, torch.bfloat16, None, None)
        desc = replace(LINEAR.describe(args, sm=90, csrc=True), device="cuda")
        assert chain_ops._choice(LINEAR, chain_ops.CUDA, desc) == (name, "")


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    for dim in (-2, -1):
        if 1 < scale.shape[dim] < weight.shape[dim]:
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, weight.shape[dim])
    return weight.float() * scale


def unrounded(args: Any) -> tuple[Tensor, Tensor]:
    """The call in float32, of activations that are rounded nowhere."""
    call = Call.of(args)
    operands, stages = [], []
    for stage, given in zip(call.chain.stages, call.operands, strict=True):
        scales = {name: given[f"{name}_scale"] for name in given if f"{name}_scale" in given}
        plain = {
            name: dequantized(t, scales[name]) if name in scales else t.float()
            for name, t in given.items()
            if not name.endswith("_scale")
        }
        size = {"group_size": 0 if stage.kind == "experts" else None}
        size = size if hasattr(stage, "group_size") else {}
        stages.append(replace(stage, tensors=tuple(plain), **size))
        operands += plain.values()
    text = " > ".join(map(str, stages))
    state = Call.of((call.x.float(), call.residual.float(), operands, text)).fold(by_reference)
    return state.x, state.total


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def test_what_is_unrounded_is_near_the_reference() -> None:
    for label, case in cases(CHAIN, CPU).items():
        if "FP8" in label and case.args[0].numel():
            pairs = zip(CHAIN.reference(*case.args), unrounded(case.args), strict=True)
            errors = [error(*pair) for pair in pairs]
            assert 1e-4 < errors[0] < 0.1, f"{label}: {errors}"


@pytest.mark.gpu
def test_few_tokens_of_fp8_are_rounded_to_bfloat16_alone() -> None:
    """They are less than 1.5 % off; with FP8 activations more.  A second run has the same bits."""
    if not load_cuda_library():
        pytest.skip("csrc is not built here")
    cuda, streamed = CHAIN.implementation("cuda"), 0
    for label, case in cases(CHAIN, torch.device("cuda")).items():
        weights = [t for t in case.args[2] if t.dim() > 1]
        if "FP8" not in label or weights[0].numel() < 8 << 20:
            continue
        got = cuda.fn(*case.args)
        errors = [error(g, w) for g, w in zip(got, unrounded(case.args), strict=True)]
        is_streamed = not any("quant" in name for name in cuda.runs(*case.args))  # type: ignore[misc]
        few = 8 if "block" in label else 2
        assert is_streamed is (case.args[0].shape[0] <= few), label
        assert (errors[0] < 0.015) is is_streamed, f"{label}: {errors}"
        assert all(map(torch.equal, got, cuda.fn(*case.args))), label
        streamed += is_streamed
    assert streamed == 15


def test_transfers_are_hidden_for_many_rows_of_two_ranks() -> None:
    for rows, hidden in ((2560, False), (2561, True)):
        names = CHAIN_OVER_RANKS.implementation("cuda").runs(*decoder_layer(rows, ranks=2))  # type: ignore[misc]
        assert (OVERLAPPED in names) is hidden  # in front of qkv; gate_up has no gain from it
        assert "_rms_norm_kernel" not in names


def test_costs_are_those_of_the_stages() -> None:
    args = decoder_layer(3)
    cost = CHAIN.cost(CHAIN.describe(args))
    weights = sum(t.nbytes for t in args[2])
    rows = 3 * 2 * (4096 + 4096 + 4096 + 6144)
    assert cost.bytes == weights + rows
    products = sum(2 * 3 * t.numel() for t in args[2] if t.dim() == 2)
    assert cost.flops == products + 5 * 3 * (4096 + 14336 + 4096)
    assert isinstance(parse(args[3]).stages[0], Linear) and "chain" in BY_NAME
