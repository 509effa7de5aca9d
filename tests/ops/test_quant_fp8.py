"""FP8 quantization beyond conformance: bits of fused kernels, extremes, layouts, refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.ops import BY_NAME, Case, SemanticOp
from fusewright.ops.conformance import check_case
from fusewright.ops.core.float8 import E4M3
from fusewright.ops.launches import norm as norm_kernels, quant as kernels
from fusewright.ops.launches.quant import GROUP

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

UNFUSED = ("rms_norm", "add_rms_norm", "silu_mul", "gelu_tanh_mul")
SCHEMES = ("static", 0, 128)
HIDDEN = 384


def inputs_of(name: str, rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Arguments of an unfused op, with outliers and a row of zeros."""
    width = 2 * HIDDEN if name.endswith("mul") else HIDDEN
    x = torch.randn(rows, width, device=device)
    x[torch.rand_like(x) < 0.01] *= 40
    x[-1] = 0
    residual = torch.randn(rows, width, device=device).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)
    if name.endswith("mul"):
        return (x.to(dtype),)
    return (x.to(dtype), *((residual,) if name.startswith("add") else ()), weight, 1e-6)


def outputs_of(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [*result]


def kind_of(scheme: Any, device: torch.device) -> tuple[str, Any]:
    """(end of an op's name, its last argument)."""
    if scheme == "static":
        return "static", torch.full((1, 1), 0.043, device=device)
    return "dynamic", scheme


def run_fused(name: str, implementation: str, args: tuple[Any, ...], scheme: Any) -> list[Tensor]:
    kind, how = kind_of(scheme, args[0].device)
    return outputs_of(BY_NAME[f"{name}_quant_{kind}"].overload(implementation)(*args, how))


def run_both(
    name: str, implementation: str, args: tuple[Any, ...], scheme: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of the fused op and of the two that it stands for; of the op itself for ""."""
    kind, how = kind_of(scheme, args[0].device)
    fused = run_fused(name, implementation, args, scheme)
    first, *rest = outputs_of(BY_NAME[name].overload(implementation)(*args))
    quantized = outputs_of(BY_NAME[f"quant_fp8_{kind}"].overload(implementation)(first, how))
    return fused, [*quantized, *rest]


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = (t.reshape(-1).view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


@pytest.mark.product
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["", "native", "triton"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", UNFUSED)
def test_fusing_changes_no_bit(
    name: str,
    scheme: Any,
    implementation: str,
    dtype: torch.dtype,
    device: torch.device,
    fw_seed: int,
) -> None:
    torch.manual_seed(fw_seed)
    # 1500 rows are normed by programs that take several in turn.
    for rows in (5, 70, 1500) if device.type == "cuda" else (5,):
        args = inputs_of(name, rows, dtype, device)
        for i, (got, want) in enumerate(
            zip(*run_both(name, implementation, args, scheme), strict=True)
        ):
            assert same_bits(got, want), f"output {i} of {rows} rows, --fw-seed={fw_seed}"


@pytest.mark.parametrize(("hidden", "dtype"), [(1024, torch.bfloat16), (1152, torch.float16)])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_programs_that_take_several_rows_change_no_bit(
    name: str,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    fw_seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(fw_seed)
    x, residual = torch.randn(2, 7, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, device=device).to(dtype)
    args = (x, *((residual,) if name.startswith("add") else ()), weight, 1e-6)
    one = [run_fused(name, "triton", args, scheme) for scheme in SCHEMES]
    monkeypatch.setattr(kernels, "_MANY_ROWS", 4)
    monkeypatch.setattr(kernels, "_MANY_ADDED_ROWS", 4)
    monkeypatch.setattr(kernels, "num_sms", lambda device: 1)
    monkeypatch.setattr(kernels, "_WARPS_OF_MANY", dict.fromkeys(("more", "few"), (12, 64)))
    added = residual if name.startswith("add") else None
    (launch,), _ = kernels.norm_quantize(x, added, weight, 1e-6, GROUP)
    assert launch.kernel == "quant:_norm_quant_rows_kernel" and launch.grid[0] < len(x)
    several = [run_fused(name, "triton", args, scheme) for scheme in SCHEMES]
    for got, want in zip(several, one, strict=True):
        assert all(map(same_bits, got, want)), f"--fw-seed={fw_seed}"


def test_rows_of_an_odd_width_keep_their_last_element(
    device: torch.device, fw_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read by pairs it would be lost, and with it a part of every scale."""
    torch.manual_seed(fw_seed)
    x = torch.randn(5, 1032, device=device).bfloat16()[:, :1025]
    x[:, -1] = 100.0
    args = (x, torch.ones(1025, dtype=torch.bfloat16, device=device), 1e-6)
    schemes = ("static", 0)
    one = [run_fused("rms_norm", "triton", args, scheme) for scheme in schemes]
    monkeypatch.setattr(kernels, "_MANY_ROWS", 4)
    for got, want in zip(
        (run_fused("rms_norm", "triton", args, scheme) for scheme in schemes), one, strict=True
    ):
        assert all(map(same_bits, got, want)), f"--fw-seed={fw_seed}"


def test_no_more_programs_take_several_rows_than_run_at_once() -> None:
    """By registers and warps of a multiprocessor; else some would start when others have ended."""
    widths = (1024, 2048, 4096, 5120, 8192)
    for hidden, scheme, adds in itertools.product(widths, (0, 128), (False, True)):
        x = torch.empty(8192, hidden, dtype=torch.bfloat16, device="meta")
        (launch,), _ = kernels.norm_quantize(x, x if adds else None, x[0], 1e-6, scheme)
        if adds and hidden > 2048:
            assert launch.kernel == "quant:_norm_quant_kernel"
            continue
        programs, rest = divmod(launch.grid[0], 132)
        warps = programs * launch.num_warps
        assert rest == 0 and launch.kernel == "quant:_norm_quant_rows_kernel"
        assert warps <= 64 and 0 < 32 * warps * launch.max_registers <= 65536
    wide = torch.empty(2048, 16384, dtype=torch.bfloat16, device="meta")
    shifted = torch.empty(2048, 4097, dtype=torch.bfloat16, device="meta")[:, 1:]
    for x in (wide, shifted, torch.empty(2048, 4096, device="meta")):
        (launch,), _ = kernels.norm_quantize(x, None, x[0], 1e-6, 0)
        assert (launch.kernel, launch.max_registers) == ("quant:_norm_quant_kernel", 0)


@pytest.mark.parametrize("hidden", [1152, 2048, 4096])
def test_half_the_warps_change_no_bit(
    hidden: int, device: torch.device, fw_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(fw_seed)
    x, residual = (torch.randn(2, 3, hidden, device=device) * 4).bfloat16()
    if device.type == "cpu":  # interpreted, only sums without rounding are the same in any order
        x, residual = x.round(), residual.round()
    args = (x, residual, torch.randn(hidden, device=device).bfloat16(), 1e-6)
    tile, warps = norm_kernels.row_tile(x, len(x), adds=True)
    few = [both for scheme in SCHEMES for both in run_both("add_rms_norm", "triton", args, scheme)]
    monkeypatch.setattr(norm_kernels, "_ELEMENTS_HALVED", (0, 1 << 22))
    halved, half = norm_kernels.row_tile(x, len(x), adds=True)
    assert (tile["AS_WARPS"], halved["AS_WARPS"], 2 * half) == (0, warps, warps)
    many = [both for scheme in SCHEMES for both in run_both("add_rms_norm", "triton", args, scheme)]
    for got, want in zip(many, few, strict=True):
        assert all(map(same_bits, got, want)), f"--fw-seed={fw_seed}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_programs_that_share_rows_find_the_scales_of_one_program(name: str, fw_seed: int) -> None:
    """In graphs, again and again, other widths between: programs wait for each other's words."""
    torch.manual_seed(fw_seed)
    run = BY_NAME[f"{name}_quant_dynamic"].overload("triton")
    reference = BY_NAME["quant_fp8_dynamic"].overload("native")
    inputs = [
        torch.randn(rows, 2 * width, device="cuda").bfloat16()
        for rows in (1, 3, 8, 17)
        for width in (14336, 9216, 8200, 28672)
    ]
    graph = torch.cuda.CUDAGraph()
    for x in inputs:
        run(x, 0)
    with torch.cuda.graph(graph):
        captured = [run(x, 0) for x in inputs]
    for _ in range(20):
        for x in inputs:
            x.normal_()
        graph.replay()
        for x, (q, scale) in zip(inputs, captured, strict=True):
            want_q, want_scale = reference(BY_NAME[name].overload("triton")(x), 0)
            assert same_bits(q, want_q) and torch.equal(scale, want_scale), f"--fw-seed={fw_seed}"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", UNFUSED)
def test_few_values_differ_from_the_reference_and_by_one_step(
    name: str, scheme: Any, device: torch.device, fw_seed: int
) -> None:
    """A cast that truncates, or a scale of the wrong group, would move most of them."""
    torch.manual_seed(fw_seed)
    args = inputs_of(name, 5, torch.float32, device)
    (got, *_), (want, *_) = (run_both(name, i, args, scheme)[0] for i in ("triton", ""))
    ordinals = []
    for q in (got, want):
        bits = q.view(torch.uint8).int()
        ordinals.append(torch.where(bits < 128, bits, 128 - bits))
    steps = (ordinals[0] - ordinals[1]).abs()
    assert steps.max() <= 1 and (steps == 1).float().mean() < 2e-3, f"--fw-seed={fw_seed}"


@pytest.mark.parametrize("implementation", ["", "native", "triton"])
def test_extremes_saturate_and_nan_stays(implementation: str, device: torch.device) -> None:
    op, scale = BY_NAME["quant_fp8_static"], torch.full((1, 1), 0.5, device=device)
    given = [0.0, -0.0, 1.0, -1.0, 224.0, 225.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan]
    # Half of the least FP8 value, which ties to 0; a little more; between 1 and 1.125.
    given += [2.0**-11, 2.0**-11 * 1.001, 0.5 * 1.0625, 0.5 * 1.1875]
    expected = [0.0, -0.0, 2.0, -2.0, 448.0, 448.0, 448.0, -448.0, 448.0, -448.0, torch.nan]
    expected += [0.0, 2.0**-9, 1.0, 1.25]
    q = op.overload(implementation)(torch.tensor([given], device=device), scale)
    assert q.dtype == E4M3
    got, want = q.float().cpu(), torch.tensor([expected])
    assert torch.equal(got.nan_to_num(999.0), want.nan_to_num(999.0)), got
    if implementation != "triton" or device.type == "cuda":  # the interpreter knows no -0
        assert torch.equal(got.signbit()[0, :2], want.signbit()[0, :2])


@pytest.mark.parametrize("implementation", ["", "native", "triton"])
@pytest.mark.parametrize("group_size", [0, 128])
def test_scales_follow_the_largest_value_of_each_group(
    group_size: int, implementation: str, device: torch.device, fw_seed: int
) -> None:
    torch.manual_seed(fw_seed)
    x = torch.randn(9, 512, device=device)
    x[:, 128:256] *= 1e-3
    x[3] = 0
    q, scale = BY_NAME["quant_fp8_dynamic"].overload(implementation)(x, group_size)
    size = group_size or 512
    assert scale.shape == (9, 512 // size) and scale.stride()[0] == 1
    groups, quantized = x.view(9, -1, size), q.float().view(9, -1, size)
    largest = groups.abs().amax(-1)
    zero = largest == 0
    assert zero.any() and (scale > 0).all() and scale.isfinite().all()
    assert (quantized[zero] == 0).all()
    assert torch.allclose(scale[~zero], largest[~zero] / 448, rtol=1e-6)
    assert (quantized.abs().amax(-1)[~zero] == 448).all()
    error = (quantized * scale[..., None] - groups).abs()
    # Half a step: 1/16 of the value, or of the least normal one.
    assert (error <= groups.abs() / 16 + scale[..., None] * 2.0**-10).all()


@pytest.mark.parametrize("implementation", ["", "native", "triton"])
def test_nan_reaches_its_own_group_only(implementation: str, device: torch.device) -> None:
    x = torch.ones(4, 256, device=device)
    x[1, 5] = torch.nan
    for group_size, groups in ((0, 1), (128, 2)):
        q, scale = BY_NAME["quant_fp8_dynamic"].overload(implementation)(x, group_size)
        bad = torch.zeros(4, groups, dtype=torch.bool, device=device)
        bad[1, 0] = True
        assert torch.equal(scale.isnan(), bad)
        assert torch.equal(q.float().isnan(), bad.repeat_interleave(256 // groups, 1))


QUANTIZING = [
    pytest.param(op, id=op.name) for op in ops.ALL_OPS if "quant" in op.name and not op.collective
]


@pytest.mark.parametrize("op", QUANTIZING)
def test_costs_count_every_argument_and_result_once(op: SemanticOp) -> None:
    for case in op.cases(torch.bfloat16, torch.device("cpu"), torch.Generator()):
        moved = [*case.args, *outputs_of(op.reference(*case.args))]
        nbytes = sum(t.numel() * t.element_size() for t in moved if isinstance(t, Tensor))
        assert op.cost(op.describe(case.args)).bytes == nbytes, case.label


@pytest.mark.gpu
@pytest.mark.parametrize("op", QUANTIZING)
@pytest.mark.parametrize("rows", [1, 31, 257, 1025, 4099])
def test_kernels_write_all_of_large_outputs_and_nothing_else(
    op: SemanticOp, rows: int, fw_seed: int
) -> None:
    """Memory poisoned, guards around the arguments; the widths of models."""
    torch.manual_seed(fw_seed)
    name = op.name.partition("_quant")[0]
    hidden = 14336 if name.endswith("mul") else 4096
    x = torch.randn(rows, hidden * (2 if name.endswith("mul") else 1), device="cuda").bfloat16()
    how = [torch.full((1, 1), 0.02, device="cuda")] if op.name.endswith("static") else [0, 128]
    inputs: list[Any] = [x]
    inputs += [torch.randn_like(x)] if name.startswith("add") else []
    weight = torch.randn(hidden, device="cuda").bfloat16()
    inputs += [weight, 1e-5] if name.endswith("norm") else []
    for scheme in how:
        case = Case(f"{rows} rows, {scheme}", (*inputs, scheme))
        check_case(op, op.overload("triton"), case, op.tolerances[torch.bfloat16])


@pytest.mark.parametrize("op", QUANTIZING)
def test_gpus_without_fp8_are_refused_by_name(op: SemanticOp) -> None:
    case = next(op.cases(torch.bfloat16, torch.device("cpu"), torch.Generator()))
    found = op.describe(case.args)
    for sm, lacks_fp8 in ((80, True), (86, True), (89, False), (90, False)):
        refused = lacks_fp8 and "int8" not in op.name
        desc = ops.OpDesc(found.op, found.args, "cuda", sm)
        for impl in op.implementations:
            reason = impl.supports(desc)
            assert bool(reason) == refused
            assert not refused or (op.name in reason and f"SM {sm / 10}" in reason)


X = torch.zeros(4, 200)
SCALE = torch.ones(1, 1)
REFUSED = [
    ("quant_fp8_static", (X[None], SCALE), r"x is \[1, 4, 200\], expected \[num_tokens, columns\]"),
    ("quant_fp8_static", (X, SCALE[0]), r"scale is torch.float32 \[1\], expected torch.float32"),
    ("quant_fp8_static", (X, SCALE.double()), "scale is torch.float64"),
    ("quant_fp8_dynamic", (X, 64), "group_size 64, expected 0"),
    ("quant_fp8_dynamic", (X, 128), "200 columns, expected a multiple of group_size 128"),
    ("silu_mul_quant_static", (X[:, :7], SCALE), "7"),
    ("silu_mul_quant_dynamic", (X, 128), "100 columns, expected a multiple"),
    ("rms_norm_quant_static", (X, torch.zeros(200), 1e-5, SCALE[0]), "expected torch.float32"),
]


@pytest.mark.parametrize(("name", "args", "message"), REFUSED)
def test_what_cannot_be_quantized_is_refused_by_every_implementation(
    name: str, args: tuple[Any, ...], message: str, device: torch.device
) -> None:
    placed = [arg.to(device) if isinstance(arg, Tensor) else arg for arg in args]
    for impl in ("", "native", "triton"):
        with pytest.raises(ValueError, match=message):
            BY_NAME[name].overload(impl)(*placed)
    with pytest.raises(ValueError, match=message):
        BY_NAME[name].fake(*placed)
