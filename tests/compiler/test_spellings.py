"""Spellings drawn at random, with casts, dtypes, strides, sizes and random ops: each gives under
the backend what eager gives, and verification refuses none of its rewrites, but every wrong one."""

from __future__ import annotations

import functools
import random
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fusewright.compiler.dynamo_backend import BackendOptions, clear_reports, fusewright, reports
from fusewright.compiler.lowering.lower import lower
from fusewright.passes import PassReport, VerificationError, run_passes
from fusewright.passes.fuse_act import FuseAct
from fusewright.passes.rule import Context
from tests.compiler.spellings import BF16, F16, F32, F64, Spelling, draw, values
from tests.passes.graphs import aten

SEED, COUNT, BATCH = 14, 420, 8
STEPS = {BF16: 2.0**-8, F16: 2.0**-11, F64: 2.0**-45}
"""Half a last bit, of float64 some."""
Results = list[list[Tensor]]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a cast of complex numbers to real ones
        yield
    torch._dynamo.reset()


@functools.cache
def spellings() -> list[Spelling]:
    return draw(COUNT, SEED)


def as_list(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def called(batch: Sequence[Spelling], inputs: Sequence[tuple[Tensor, ...]]) -> Results:
    pairs = zip(batch, inputs, strict=True)
    return [as_list(spelling.fn(*given)) for spelling, given in pairs]


def eager(batch: Sequence[Spelling]) -> Results:
    torch.manual_seed(0)
    return called(batch, [spelling.inputs for spelling in batch])


def compiled(batch: Sequence[Spelling], *, dynamic: bool = False, **options: Any) -> Results:
    """What a batch gives as one graph of Dynamo's."""
    torch._dynamo.reset()
    clear_reports()
    fused = torch.compile(
        functools.partial(called, batch), backend=fusewright, fullgraph=True, dynamic=dynamic,
        options=options,
    )  # fmt: skip
    torch.manual_seed(0)
    made: Results = fused([spelling.inputs for spelling in batch])
    return made


def graph_of(batch: Sequence[Spelling]) -> fx.GraphModule:
    """A batch in AOTAutograd's ops, traced without Dynamo, which would take twice the time."""
    flat = {f"x{i}": x for i, x in enumerate(flattened(batch))}

    def fn(**given: Tensor) -> list[Tensor]:
        left = iter(given.values())
        inputs = [tuple(next(left) for _ in spelling.inputs) for spelling in batch]
        return [result for results in called(batch, inputs) for result in results]

    with torch.inference_mode(False), torch.no_grad():
        return aten(fn, **flat)


def flattened(batch: Sequence[Spelling]) -> list[Tensor]:
    return [x for spelling in batch for x in spelling.inputs]


def fused(batch: Sequence[Spelling]) -> tuple[Results, list[PassReport]]:
    """(results, reports) by all passes, verified, and lowering, run op by op."""
    gm = graph_of(batch)
    made = run_passes(gm, BackendOptions().passes(), verify=True)
    lower(gm, hand_kernels=True, kernels={}, sm=0)
    torch.manual_seed(0)
    left = iter(gm(*flattened(batch)))
    return [[next(left) for _ in results] for results in eager(batch)], made


def difference(spelling: Spelling, want: Tensor, got: Tensor) -> str:
    """What is not as eager has it, beyond a few roundings to the site's dtype and the result's."""
    if (want.dtype, want.shape) != (got.dtype, got.shape):
        return f"{want.dtype}{list(want.shape)} became {got.dtype}{list(got.shape)}"
    if want.is_complex():
        want, got = torch.view_as_real(want), torch.view_as_real(got)
    if not want.is_floating_point():
        return "" if torch.equal(want, got) else "integers differ"
    most = torch.finfo(want.dtype).max
    step = max(STEPS.get(dtype, 2.0**-20) for dtype in (want.dtype, spelling.dtype))
    left, right = (value.double().clamp(-most, most) for value in (want, got))
    size = left.abs()
    if spelling.rows and want.numel():
        size = size.amax(-1, keepdim=True)
    # A subnormal number of float16 is off by 2^-25, and then scaled.
    least = 2.0**-11 if F16 in (want.dtype, spelling.dtype) else 1e-6
    least = 0.0 if spelling.dtype == F64 else least
    error = (left - right).abs()
    bad = (error > 6 * step * size + least) | (left.isnan() != right.isnan())
    if not bad.any():
        return ""
    worst = int(torch.where(bad, error.nan_to_num(most), -1.0).argmax())
    return f"{left.flatten()[worst]} became {right.flatten()[worst]} at {worst}"


def differences(batch: Sequence[Spelling], results: Results) -> list[str]:
    return [
        f"{spelling.words}: {reason}"
        for spelling, want, got in zip(batch, eager(batch), results, strict=True)
        for one, other in zip(want, got, strict=True)
        if (reason := difference(spelling, one, other))
    ]


def problems(batch: Sequence[Spelling], run: Any) -> list[str]:
    """What is wrong with a batch; where it raises, with each of its spellings."""
    try:
        return differences(batch, run(batch))
    except Exception as error:
        if len(batch) == 1:
            return [f"{batch[0].words}: {type(error).__name__}: {error}"]
        found = [problem for one in batch for problem in problems([one], run)]
        return found or [f"only together: {[one.words for one in batch]}: {error}"]


def batches(drawn: Sequence[Spelling], count: int) -> Iterator[Sequence[Spelling]]:
    return (drawn[i : i + count] for i in range(0, len(drawn), count))


def test_every_spelling_gives_what_eager_gives_and_is_verified(fw_seed: int, fw_cases: int) -> None:
    """Half of them, by the seed; ``--fw-cases 2`` has all."""
    all_of_them = spellings()
    is_half = fw_cases == 1
    drawn = random.Random(fw_seed).sample(all_of_them, len(all_of_them) // (1 + is_half))
    sites: Counter[tuple[str, bool]] = Counter()
    expected: Counter[str] = Counter()
    wrong: list[str] = []

    def run(batch: Sequence[Spelling]) -> Results:
        results, made = fused(batch)
        for report in made:
            sites.update((report.name, site.matched) for site in report.sites)
            wrong.extend(f"{site} has no reason" for site in report.missed if not site.reason)
        return results

    for batch in batches(drawn, BATCH):
        wrong += problems(batch, run)
        for spelling in batch:
            expected[spelling.rule] += spelling.sites
    assert not wrong, "\n".join(wrong)
    for rule, count in expected.items():
        assert sites[rule, True] + sites[rule, False] == count, rule
    for rule in [*expected, "fuse_add_norm"]:
        missed = sites[rule, False] or is_half
        assert sites[rule, True] >= (5 if is_half else 20) and missed, (rule, sites)


@pytest.mark.product(2, of="spellings that are compiled")
def test_dynamo_and_dynamic_sizes_change_nothing() -> None:
    """A few through ``torch.compile``, the rest op by op; every second graph of dynamic sizes."""
    wrong: list[str] = []
    for index, batch in enumerate(batches(spellings()[::12], 12)):
        run = functools.partial(compiled, dynamic=index % 2 == 1, rest="eager")
        wrong += problems(batch, run)
    assert not wrong, "\n".join(wrong)


INDUCTORS = ("rand", "dropout", "bernoulli", "float64")
"""Words of what Inductor does in its own way: random numbers, and sums of float32 in another order,
which are far apart as float64."""


@pytest.mark.product(2, of="spellings that are compiled")
def test_inductor_runs_what_is_fused_and_what_is_left() -> None:
    plain = [one for one in spellings() if not any(word in one.words for word in INDUCTORS)]
    wrong = problems(plain[:36:2], lambda batch: compiled(batch))
    assert not wrong, "\n".join(wrong)
    assert sum(report.matched("fuse_act") for report in reports()) >= 5


class Careless:
    """Takes every product of a gate and an up for ``silu_mul``, whatever the dtypes."""

    name, tier = FuseAct.name, FuseAct.tier

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        (output,) = gm.graph.find_nodes(op="output")
        result: Any = output.args[0]
        gate, up = gm.graph.find_nodes(op="placeholder")
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        dtype = result.meta["example_value"].dtype

        def build(graph: fx.Graph) -> list[fx.Node]:
            to = torch.ops.aten._to_copy.default
            wide = [graph.call_function(to, (x,), {"dtype": F32}) for x in (gate, up)]
            made = graph.call_function(torch.ops.fw.silu_mul.default, tuple(wide))
            return [graph.call_function(to, (made,), {"dtype": dtype})]

        context.replace(self, result, old=nodes, outputs=[result], build=build, tier=self.tier)
        return PassReport(self.name)


LOST = {
    "float16": (lambda g, u: F.silu(g) * (u * 7e4).half(), (F32,)),
    "half of the up": (lambda g, u: (F.silu(g) * u.half()).to(g.dtype), (BF16,)),
    "half of the activation": (lambda g, u: (F.silu(g).half() * u).to(g.dtype), (BF16,)),
    "an int": (lambda g, u: F.silu(g).int() * u, (F32, BF16, F16)),
    "a bool": (lambda g, u: F.silu(g).bool() * u, (F32, BF16, F16)),
    "an int8": (lambda g, u: F.silu(g).to(torch.int8) * u, (F32,)),
    "a long": (lambda g, u: F.silu(g).long() * u, (F32,)),
    "wider or complex": (lambda g, u: F.silu(g) * u, (F64, torch.complex64)),
    "beyond float32": (lambda g, u: F.silu(g * 1e30) * (u * 1e30), (F64,)),
}


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        pytest.param(fn, one, id=f"{name} {one}")
        for name, (fn, many) in LOST.items()
        for one in many
    ],
)
def test_a_rewrite_that_loses_a_cast_or_a_dtype_is_refused(fn: Any, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(SEED)
    inputs = [values((5, 8), dtype, gen) for _ in range(2)]
    with torch.inference_mode(False), torch.no_grad():
        right, wrong = (aten(fn, g=inputs[0], u=inputs[1]) for _ in range(2))
    with pytest.raises(VerificationError, match="rewrite fuse_act"):
        run_passes(wrong, [Careless()], verify=True)
    (report,) = run_passes(right, [FuseAct()], verify=True)
    (miss,) = report.missed
    assert "torch." in miss.reason
    assert torch.equal(right(*inputs).isnan(), fn(*inputs).isnan())
