"""The Dynamo backend: ``torch.compile(model, backend="fusewright")`` for unmodified modules.

Dynamo's graph -> AOTAutograd: functional ATen -> canonicalize, fusion passes -> lower -> Inductor
for all the rest.  Attention stays PyTorch's own call: it is already one fused kernel over
contiguous keys and values, which no semantic op describes (``paged_attention`` reads a block
table).  What cannot be fused as a whole, such as training, runs through Inductor as it is, with one
warning, or is refused if fusions are required.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..config import LEVELS, UserError
from ..ops.core.device_table import gpu_of
from ..passes import (
    CANONICALIZE,
    PassReport,
    build_passes,
    check_any_expected,
    check_required,
    run_passes,
)
from ..passes.canonicalize import cast_source
from ..passes.canonicalize_norm import is_eps
from ..passes.subgraph import compute_fake, fake_value
from .dynamo_decompose import decompose
from .lowering.lower import lower

_PASSES = ("cleanup", "fuse_add_norm", "fuse_act")
"""The passes of a level that find sites in unmodified models; the others are about FP8 and paged KV
caches."""
_NO_GRAPH = (
    "no graph was compiled: the compiled module was not called, or a method of the module that it "
    "wraps was, such as generate(); model.compile(backend='fusewright') compiles model itself"
)
_ITEM = ("call_method", "item")
_REPORTS: dict[str, GraphReport] = {}
"""Reports by name: Dynamo may compile a graph again before it runs."""


class UnfusedWarning(UserWarning):
    """A graph runs through Inductor without fusions, or in parts, or further ones in eager mode."""


@dataclass(frozen=True)
class BackendOptions:
    """``torch.compile(..., options={...})`` of this backend.

    Attributes:
        level: as ``-O``: 0 runs the graph eagerly, 1 raises ops and lets Inductor fuse them, 2 runs
            the fusion passes and hand kernels, 3 lets Inductor search for its kernels'
            configurations too.
        require_fusion: "NAME" or "NAME:COUNT", one or a list: the pass must match that often in
            every graph and miss nowhere.
        require_all_fusions: every expected site must match, in one graph without a break, and there
            must be one: a model of which nothing can be fused is refused.  A graph that Dynamo
            compiles again, such as for a branch that returns early, may have none if an earlier
            one of the same function had some.
        verify: run every distinct rewrite, before against after, on random inputs.
        rest: "inductor" or "eager": how what the passes leave runs; the latter, op by op, is for
            debugging.
    """

    level: int = 2
    require_fusion: str | Sequence[str] = ()
    require_all_fusions: bool = False
    verify: bool = False
    rest: str = "inductor"

    def __post_init__(self) -> None:
        checks: list[tuple[str, bool, Any]] = [
            ("level", self.level in LEVELS and type(self.level) is int, f"one of {[*LEVELS]}"),
            ("rest", self.rest in ("inductor", "eager"), "'inductor' or 'eager'"),
        ]
        for name in ("require_all_fusions", "verify"):
            checks.append((name, isinstance(getattr(self, name), bool), "True or False"))
        for name, fits, expected in checks:
            if not fits:
                raise UserError(
                    f"options[{name!r}] is {getattr(self, name)!r}, expected {expected}"
                )
        if self.level == 0 and self.require_all_fusions:
            raise UserError("options: level 0 fuses nothing, and require_all_fusions is set")
        self.required()

    def required(self) -> list[tuple[str, int]]:
        """(pass, least number of matches) of ``require_fusion``."""
        asked = self.require_fusion
        pairs = []
        for item in [asked] if isinstance(asked, str) else asked:
            name, _, count = str(item).partition(":")
            known = [rule.name for rule in self.passes()]
            if name not in known or (count and not count.isdigit()):
                raise UserError(
                    f"options['require_fusion'] has {item!r}, expected NAME or NAME:COUNT; "
                    f"level {self.level} runs: {', '.join(known) or 'none'}"
                )
            pairs.append((name, int(count or 1)))
        return pairs

    def passes(self) -> list[Any]:
        level = LEVELS[self.level]
        if not level.trace:
            return []
        return [*CANONICALIZE, *build_passes(name for name in _PASSES if name in level.passes)]


@dataclass
class GraphReport:
    """The outcome of one graph that Dynamo captured.

    Attributes:
        name: Dynamo's frame and compilation, such as "0/1"; ``TORCH_LOGS`` prints the same.
        passes: expected sites of each pass, matched or missed with the reason.
        choices: implementations chosen, counted.
        library_calls: attention calls that are left to PyTorch, counted.
        notice: why the graph is not fused, or fused in part, or the last one; "" if all is well.
        seconds: time of passes and lowering, without Dynamo and Inductor.
    """

    name: str
    passes: list[PassReport] = field(default_factory=list)
    choices: Mapping[str, int] = field(default_factory=dict)
    library_calls: Mapping[str, int] = field(default_factory=dict)
    notice: str = ""
    seconds: float = 0.0

    def matched(self, name: str) -> int:
        """Sites that the pass of this name matched."""
        return sum(report.matched for report in self.passes if report.name == name)

    def __str__(self) -> str:
        lines = [f"graph {self.name}" + (f": {self.notice}" if self.notice else "")]
        lines += [report.summary() for report in self.passes]
        lines += [f"{name}: {count} left to PyTorch" for name, count in self.library_calls.items()]
        return "\n  ".join([*lines, *(f"{n} x {choice}" for choice, n in self.choices.items())])


class Reports(list[GraphReport]):
    """A list of reports whose text says so if it is empty."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or _NO_GRAPH


def reports() -> Reports:
    """One for each graph that was compiled since ``clear_reports()``, oldest first."""
    return Reports(_REPORTS.values())


def clear_reports() -> None:
    _REPORTS.clear()


def fusewright(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile what Dynamo captured; ``torch.compile`` calls this.

    Args:
        mode: as for Inductor, such as "reduce-overhead" for CUDA graphs.
        options: fields of ``BackendOptions``.

    Raises:
        UserError: an unknown option, or a fusion that is required and missed.
    """
    chosen = read_options(options or {})
    compile_id = torch._guards.CompileContext.current_compile_id()
    name = str(compile_id)
    report = _REPORTS[name] = GraphReport(name)
    if chosen.level == 0:
        report.notice = "level 0 runs it eagerly"
        return _unchanged(gm)
    _check_limit(report, getattr(compile_id, "frame_compile_id", None))
    from torch._functorch import config as functorch_config
    from torch._inductor import list_mode_options

    patches = list_mode_options(mode) if mode else {}
    if LEVELS[chosen.level].tune:
        patches |= {"coordinate_descent_tuning": True}
    if chosen.rest == "eager":
        patches |= {"fallback_random": True}
    unfused = _why_unfused(gm, example_inputs)
    _notice(report, chosen, unfused or _broken(gm))
    if unfused and chosen.rest == "eager":
        return _unchanged(gm)
    if unfused:
        return _inductor(gm, example_inputs, config_patches=patches)
    _fix_floats(gm)

    def inner(aten: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        return _compile_aten(aten, inputs, chosen, report, **kwargs)

    # AOTAutograd's own cache knows Dynamo's graph alone, not what we make of it.
    with functorch_config.patch(enable_autograd_cache=False):
        return _inductor(
            gm, example_inputs, inner_compile=inner, config_patches=patches, decompositions={}
        )


def _inductor(gm: fx.GraphModule, example_inputs: list[Any], **how: Any) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, example_inputs, **how)  # type: ignore[return-value]


def _unchanged(gm: fx.GraphModule) -> Callable[..., Any]:
    forward: Callable[..., Any] = gm.forward
    return forward


def read_options(options: Mapping[str, Any]) -> BackendOptions:
    """Read the backend's options.  Raises UserError for an unknown name or a bad value."""
    known = [*BackendOptions.__dataclass_fields__]
    for name in options:
        if name not in known:
            raise UserError(f"options has {name!r}, expected some of: {', '.join(known)}")
    return BackendOptions(**options)


def _why_unfused(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """Why the rewritten graph could not stand for this one, or nothing."""
    tensors = [value for value in example_inputs if isinstance(value, Tensor)]
    if torch.is_grad_enabled() and any(value.requires_grad for value in tensors):
        return (
            "gradients are required; for inference, call it under torch.inference_mode() or "
            "torch.no_grad()"
        )
    devices = {value.device.type for value in tensors} - {"cpu", "cuda"}
    if devices:
        return f"it runs on {', '.join(sorted(devices))}, expected cpu or cuda"
    for node in gm.graph.nodes:
        if node.meta.get("unbacked_bindings"):
            return f"a size or a number in it depends on data, computed by {node.name}"
    return ""


def _check_limit(report: GraphReport, frame_compile_id: int | None) -> None:
    """Warn of the last graph that Dynamo compiles of a function: what differs from all of them runs
    in eager mode, without a call of this backend."""
    limit = torch._dynamo.config.recompile_limit
    if frame_compile_id is None or frame_compile_id + 1 < limit:
        return
    report.notice = (
        f"it is the last of {limit} that torch compiles of one function: with inputs that need "
        "another, such as another shape, it will run in eager mode, unfused; pass dynamic=True to "
        "torch.compile, mark sizes with torch._dynamo.mark_dynamic, or raise "
        "torch._dynamo.config.recompile_limit"
    )
    warnings.warn(f"fusewright: graph {report.name}: {report.notice}", UnfusedWarning, stacklevel=3)


def _broken(gm: fx.GraphModule) -> str:
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    what = str(reason.reason).strip().splitlines()[0]
    return f"the graph breaks behind it ({what}): nothing is fused across the break"


def _notice(report: GraphReport, options: BackendOptions, reason: str) -> None:
    """Warn, or refuse where fusions are required."""
    if not reason:
        return
    broken = reason.startswith("the graph breaks")
    if options.require_all_fusions or (options.require_fusion and not broken):
        raise UserError(f"fusions are required, but graph {report.name} is not fused: {reason}")
    what = "is compiled in parts" if broken else "runs through Inductor unfused"
    report.notice = "; ".join(filter(None, (reason, report.notice)))
    warnings.warn(f"fusewright: a graph {what}: {reason}", UnfusedWarning, stacklevel=3)


def _fix_floats(gm: fx.GraphModule) -> None:
    """Make constants of the numbers that rules read: attributes of modules, and a norm's eps.

    With ``dynamic=True`` Dynamo makes inputs of them.  It guards what is read here, so a number
    that the caller passes stays an input: the graph would be compiled anew for each value.
    """
    for node in list(gm.graph.nodes):
        value = node.meta.get("example_value")
        if not isinstance(value, torch.SymFloat) or (node.op, node.target) != _ITEM:
            continue
        if _is_of_module(node.args[0]) or any(is_eps(node, user) for user in node.users):
            node.replace_all_uses_with(float(value))
            gm.graph.erase_node(node)
    gm.recompile()


def _is_of_module(node: Any) -> bool:
    """Whether a placeholder stands for a number that a module holds."""
    from torch._dynamo.source import NNModuleSource

    source = getattr(node.meta.get("grapharg"), "source", None)
    while source is not None and not isinstance(source, NNModuleSource):
        source = getattr(source, "base", None)
    return source is not None


def _compile_aten(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: BackendOptions,
    report: GraphReport,
    **kwargs: Any,
) -> Any:
    """Rewrite and lower AOTAutograd's graph, and have Inductor compile the result."""
    start = time.perf_counter()
    for node in gm.graph.nodes:
        attribute = getattr(gm, node.target) if node.op == "get_attr" else None
        node.meta["example_value"] = node.meta.get("val", attribute)
        if options.verify and node.op == "call_function":
            # AOTAutograd drops slices that take all: sizes behind them are other expressions.
            node.meta["example_value"] = compute_fake(node)
    report.library_calls = Counter(
        node.target.__name__
        for node in gm.graph.nodes
        if "scaled_dot_product" in getattr(node.target, "__name__", "")
    )
    with unset_fake_temporarily():  # verification runs on data
        report.passes = run_passes(gm, options.passes(), verify=options.verify)
    required = options.required()
    if options.require_all_fusions:
        required = [(one.name, 0) for one in report.passes]
        check_any_expected(_of_function(report), f"graph {report.name}")
    check_required(report.passes, required)
    report.choices = lower(
        gm, hand_kernels=LEVELS[options.level].hand_kernels, kernels={}, sm=_sm(gm)
    )
    report.seconds = time.perf_counter() - start
    if options.rest == "eager":
        return _run_eagerly(gm)
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    # Inductor computes 16 bits in float32, and leaves out casts that a value has to pass.
    with config.patch(emulate_precision_casts=any(map(_narrows, gm.graph.nodes))):
        return compile_fx_inner(decompose(gm), example_inputs, **kwargs)


def _narrows(node: fx.Node) -> bool:
    """Whether the model itself casts a tensor to 16 bits at this node."""
    source = cast_source(node)
    if source is node:
        return False
    result, read = fake_value(node).dtype, fake_value(source).dtype
    return result in (torch.bfloat16, torch.float16) and result != read


def _of_function(report: GraphReport) -> list[PassReport]:
    """The passes over this graph and, before it, over others that Dynamo compiled of the same
    function: "0/2" is the third of the first."""
    function, _, number = report.name.rpartition("/")
    earlier = (f"{function}/{n}" for n in range(int(number) if number.isdigit() else 0))
    before = [_REPORTS[name].passes for name in earlier if name in _REPORTS]
    return [*report.passes, *(one for passes in before for one in passes)]


def _sm(gm: fx.GraphModule) -> int:
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta["example_value"]
        if isinstance(value, Tensor) and value.device.type == "cuda":
            return gpu_of(value.device)[1]
    return 0


def _run_eagerly(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        values = list(args)
        args.clear()
        return gm(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
