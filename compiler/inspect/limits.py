"""Computes the limits of a lowered model's step: the bytes and the operations of each of its calls.

The figures are those of the ops' own costs, which ``explain`` shows too, at every size of a step
that is asked for.  A call takes at least the longer of two times: its bytes at the copy rate, and
its operations at the rate of matrix multiplications.  Calls run one after the other, so these add
up; a step that overlapped all of them could come down to ``overlapped_ms``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import sympy
from torch import fx

from ... import ops
from ...config.device_table import Ceilings
from ...ops.attention.paged_attention import context_symbols
from ...ops.chain.chain import stage_costs
from ...ops.core.desc import Cost, OpDesc
from ...ops.core.float8 import E4M3
from ..build import Lowered
from ..capture.source import OutsideCalls
from .explain import arguments, kernels_of, semantic_name

FAMILIES = ("linears", "attention", "head", "experts", "sampling", "rest")
"""Parts of a step.  ``head``: the linear layer behind the choice of each sequence's last token;
``rest``: embedding, norms, activations, and what chains move besides weights."""
_FAMILY_OF_OP = {
    **dict.fromkeys(("linear",), "linears"),
    **dict.fromkeys(("rotary_embedding", "kv_store", "rope_kv_store"), "attention"),
    **dict.fromkeys(("paged_attention",), "attention"),
    **dict.fromkeys(("route", "expert_linear", "combine_experts", "fused_moe"), "experts"),
    **dict.fromkeys(("write_inputs", "argmax", "keep_tokens"), "sampling"),
}
_FAMILY_OF_STAGE = {"linear": "linears", "experts": "experts"}
_SAMPLING = ("write_inputs", "argmax", "keep_tokens")
"""The ops that a greedy step runs beside the program."""


@dataclass(frozen=True)
class StepSize:
    """A step of equal sequences.

    Attributes:
        query_len: tokens of each that the step computes, 1 in a decode step.
        context: KV positions of each behind the step.
    """

    num_seqs: int
    query_len: int
    context: int

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.query_len

    @property
    def decode(self) -> bool:
        return self.query_len == 1

    def __str__(self) -> str:
        if self.decode:
            return f"decode {self.num_seqs}"
        return f"prefill {self.num_tokens:,} ({self.num_seqs} x {self.query_len})"


@dataclass(frozen=True)
class Work:
    """What a call, or a stage of a chain, has to do: bytes to move and operations, of FP8 operands
    or of wider ones."""

    family: str
    bytes: float
    flops: float
    fp8: bool

    def times_ms(self, ceilings: Ceilings) -> tuple[float, float]:
        """(of the bytes, of the operations) in ms."""
        rate = ceilings.fp8_tflop_s if self.fp8 else ceilings.bfloat16_tflop_s
        return self.bytes / ceilings.copy_tb_s / 1e9, self.flops / rate / 1e9


@dataclass(frozen=True)
class StepWork:
    """All calls of a step.

    Attributes:
        launches: kernels that it launches; None if that is not known of one of its calls.
        unknown: calls without a cost: ATen ops that no kernel of ours does.
    """

    step: StepSize
    works: tuple[Work, ...]
    launches: int | None
    unknown: int


@dataclass(frozen=True)
class FamilyLimit:
    """The least time of a family's calls, one after the other.

    Attributes:
        bytes_ms, arithmetic_ms: what their bytes alone take, and their operations.
        by_bytes_ms: the part of ``ms`` in calls whose bytes take longer than their operations.
    """

    ms: float
    bytes_ms: float
    arithmetic_ms: float
    by_bytes_ms: float

    @property
    def bound(self) -> str:
        """The resource that bounds most of the time."""
        return "bytes" if 2 * self.by_bytes_ms >= self.ms else "arithmetic"


@dataclass(frozen=True)
class StepLimit:
    """The least time of a step on one GPU: its parts by family, and the bytes and operations."""

    step: StepSize
    families: dict[str, FamilyLimit]
    bytes: float
    flops: float
    launches: int | None

    @property
    def bytes_ms(self) -> float:
        return sum(each.bytes_ms for each in self.families.values())

    @property
    def arithmetic_ms(self) -> float:
        return sum(each.arithmetic_ms for each in self.families.values())

    @property
    def ms(self) -> float:
        """Every call at its own limit, one after the other."""
        return sum(each.ms for each in self.families.values())

    @property
    def overlapped_ms(self) -> float:
        """All bytes beside all operations."""
        return max(self.bytes_ms, self.arithmetic_ms)

    @property
    def bound(self) -> str:
        """The resource that bounds most of the time."""
        by_bytes_ms = sum(each.by_bytes_ms for each in self.families.values())
        return "bytes" if 2 * by_bytes_ms >= self.ms else "arithmetic"

    def to_json(self) -> dict[str, Any]:
        families = {
            name: {**asdict(each), "bound": each.bound} for name, each in self.families.items()
        }
        return {
            **asdict(self.step),
            "num_tokens": self.step.num_tokens,
            "bytes": self.bytes,
            "flops": self.flops,
            "bytes_ms": self.bytes_ms,
            "arithmetic_ms": self.arithmetic_ms,
            "limit_ms": self.ms,
            "overlapped_ms": self.overlapped_ms,
            "bound": self.bound,
            "launches": self.launches,
            "families": families,
        }


def step_work(lowered: Lowered, outside: OutsideCalls, step: StepSize) -> StepWork:
    """What the calls of a step of this size have to do.  Transfers between ranks are left out."""
    works: list[Work] = []
    counts: list[int | None] = []
    unknown, behind_gather = 0, False
    for node in (node for region in lowered.regions for node in region.nodes):
        name = semantic_name(node)
        if not name:
            unknown += node.op == "call_function" and _computes(node)
            continue
        args = arguments(node, lowered.traced, step.num_tokens, step.num_seqs)
        works += _works(name, ops.BY_NAME[name].describe(args), step, behind_gather)
        kernels = kernels_of(node, args)
        counts.append(None if kernels is None else len(kernels))
        behind_gather |= name == "gather_last_token"
    seen: set[str] = set()
    for name, outside_args in outside(step.num_tokens, step.num_seqs):
        if name in _SAMPLING and name not in seen:
            seen.add(name)
            works += _works(name, ops.BY_NAME[name].describe(list(outside_args)), step, False)
            counts.append(1)
    known = [count for count in counts if count is not None]
    launches = sum(known) if len(known) == len(counts) and not unknown else None
    return StepWork(step, tuple(works), launches, unknown)


def limit_of(work: StepWork, ceilings: Ceilings) -> StepLimit:
    """The least time of a step on a GPU."""
    families = {}
    for name in FAMILIES:
        times = [each.times_ms(ceilings) for each in work.works if each.family == name]
        families[name] = FamilyLimit(
            sum(max(pair) for pair in times),
            sum(of_bytes for of_bytes, _ in times),
            sum(of_flops for _, of_flops in times),
            sum(of_bytes for of_bytes, of_flops in times if of_bytes >= of_flops),
        )
    return StepLimit(
        work.step,
        families,
        sum(each.bytes for each in work.works),
        sum(each.flops for each in work.works),
        work.launches,
    )


def _computes(node: fx.Node) -> bool:
    from ..emit.direct import is_plain

    return not is_plain(node)


def _works(name: str, desc: OpDesc, step: StepSize, behind_gather: bool) -> Iterator[Work]:
    figures = {"world_size": 1}  # so that what ranks send each other is nothing
    if name == "paged_attention":
        figures |= _context(step, desc["sliding_window"], desc["chunk"])
    for family, cost, fp8 in _parts(name, desc):
        if family == "linears" and behind_gather:
            family = "head"
        yield Work(family, _number(cost.bytes, figures), _number(cost.flops, figures), fp8)


def _parts(name: str, desc: OpDesc) -> Iterable[tuple[str, Cost, bool]]:
    """(family, cost, whether it multiplies FP8) of a call, or of each stage of a chain."""
    op = ops.BY_NAME[name]
    if name not in ("chain", "chain_over_ranks"):
        return [(_FAMILY_OF_OP.get(name, "rest"), op.cost(desc), _is_fp8(desc))]
    return [
        (
            _FAMILY_OF_STAGE.get(stage.kind, "rest") if stage else "rest",
            cost,
            getattr(stage, "group_size", None) is not None if stage else False,
        )
        for stage, cost in stage_costs(desc)
    ]


def _is_fp8(desc: OpDesc) -> bool:
    """Whether a call multiplies FP8 by FP8; an FP8 weight alone is multiplied as x's numbers."""
    names = dict(desc.args)
    if "gate_up" in names:  # ``fused_moe`` quantizes its inputs if its weights are FP8
        return bool(names["gate_up"].dtype == E4M3)
    x = names.get("x")
    return x is not None and x.dtype == E4M3


@cache
def _context(step: StepSize, window: int, chunk: int) -> dict[str, int]:
    queries, seen = [step.query_len] * step.num_seqs, [step.context] * step.num_seqs
    return context_symbols(queries, seen, window, chunk)


def _number(value: Any, figures: dict[str, int]) -> float:
    return float(sympy.sympify(value).subs(figures))


def equal_steps(
    rows: Sequence[int], context: int, prefills: Sequence[int], prompt_len: int
) -> list[StepSize]:
    """Decode steps of ``rows`` sequences of ``context`` positions each, and steps of so many
    prefill tokens in prompts of ``prompt_len``, or one shorter prompt."""
    decodes = [StepSize(count, 1, context) for count in rows]
    lengths = [(tokens, min(prompt_len, tokens)) for tokens in prefills]
    return [*decodes, *(StepSize(tokens // each, each, each) for tokens, each in lengths)]
