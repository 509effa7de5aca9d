"""``fusewright models check`` proves any model of the library: by its type, or by its folder.

A twin of the model runs by itself, through the eager step and through the graph that the level's
passes rewrote; what the passes did to that graph, and what they left, is counted.
"""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import fx

from ..compiler.capture.trace import TraceError
from ..compiler.emit.constants import take_constants
from ..compiler.emit.direct import is_plain
from ..config import CompileConfig, EngineOptions, Hardware, ModelLimits, UserError
from ..config.resolve import resolve
from ..model_executor.captured.default_configs import default_config
from ..model_executor.captured.library import first_line, read_config, version as version
from ..model_executor.captured.twin import ProofError, Twin, compare, make_twin
from ..model_executor.hf_config import model_folder, read_spec
from ..model_executor.hf_json import read_json
from ..model_executor.loader import load_model
from ..model_executor.models import ARCHITECTURES
from ..passes import PassReport, op_name
from ..passes.fuse_gated_linear import has_epilogue, linear_args
from .worker.proof import Program, rewritten_program

EQUAL, DIFFERS, REFUSED, FAILED = "equal", "differs", "refused", "failed"

_KINDS = {
    "norms": "canonicalize_norm",
    "adds before norms": "fuse_add_norm",
    "rotary": "canonicalize_rope",
    "rotary with KV store": "fuse_rope_store",
    "activations": "fuse_act",
    "gated linears": "fuse_gated_linear",
    "routers": "canonicalize_route",
    "experts": "fuse_moe",
    "chains": "fuse_chain",
}
"""Maps what a reader calls the sites of a pass to the pass."""


_MOVES = frozenset(
    [
        "contiguous",
        "clone",
        "empty_like",
        "expand",
        "getitem",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "squeeze",
        "t",
        "transpose",
        "unsqueeze",
        "view",
    ]
)
"""Calls that compute nothing: views, memory and copies."""


@dataclass(frozen=True)
class ModelCheck:
    """Holds what the check of one model found.

    Attributes:
        name: as it was asked for: a model type, or a folder.
        architecture: the class of its causal language model; "" if it was refused before.
        outcome: "equal", "differs", "refused", or "failed", which is a bug of this program.
        why: one line, if it is not equal.
        eager_error, error: largest difference of logits, of the eager step and of the rewritten
            graph; None where there is none.
        adapter_error: the same of the adapter that serves the architecture, if there is one.
        layers: of the twin.
        sites: kind -> [matched, expected].
        missed: kind -> reason -> how often.
        plain: ATen op which a compiler gets -> number of calls.
    """

    name: str
    architecture: str = ""
    outcome: str = EQUAL
    why: str = ""
    eager_error: float | None = None
    error: float | None = None
    adapter_error: float | None = None
    layers: int = 0
    sites: Mapping[str, list[int]] = field(default_factory=dict)
    missed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    plain: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def causal_types() -> list[str]:
    """The types of the library that have a causal language model, sorted.

    Raises:
        UserError: the library is not installed.
    """
    version()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def check_model(name: str, level: int) -> ModelCheck:
    """Prove one model.

    Args:
        name: a model type, which has its default configuration, or what ``--model`` takes.
        level: whose passes rewrite the graph.

    Raises:
        UserError: there is no such type or folder.
    """
    known = name in causal_types() and not Path(name).is_dir()
    config = None if known else _config_of_folder(name)  # a mistake, if there is none
    check = ModelCheck(name)
    try:
        twin = make_twin(_default(name) if known else config, name)
        check = replace(
            check, architecture=type(twin.unmodified).__name__, layers=twin.spec.num_layers
        )
        check = replace(check, eager_error=compare(twin, twin.ours, name).error)
        check = replace(check, adapter_error=_adapter_error(twin, name))
        passes = _compile_config(level)
        if not passes.trace:
            return check
        program = rewritten_program(twin.spec, twin.ours, passes)
        check = replace(check, error=compare(twin, program.step, name).error)
        return replace(check, **_counted(twin, program))
    except ProofError as error:
        return replace(check, outcome=DIFFERS, why=first_line(error))
    except UserError as error:
        return replace(check, outcome=REFUSED, why=first_line(error))
    except TraceError as error:
        return replace(check, outcome=REFUSED, why=f"{name}: {first_line(error)}")
    except Exception as error:
        why = f"{name}: {type(error).__name__}: {first_line(error)}"
        return replace(check, outcome=FAILED, why=why)


def _default(name: str) -> Any:
    try:
        return default_config(name)
    except Exception as error:
        text = " ".join(str(error).split())
        raise UserError(f"{name}: its configuration has no valid default: {text}") from error


def _config_of_folder(name: str) -> Any:
    folder = model_folder(name)
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{name!r} is neither a folder with a config.json nor a causal language model type of "
            f"{version()}; `fusewright models check --all` checks every type"
        )
    values = read_json(path)
    names = values.get("architectures")
    return read_config(path, values, str(names[0]) if names else "no architecture")


def _compile_config(level: int) -> CompileConfig:
    """How the level compiles on a machine whose measurements turn no pass off."""
    options = EngineOptions(optimization_level=level, device="cpu")
    return resolve(options, Hardware("cpu", "cpu"), ModelLimits(4096, "float32")).compile


def _adapter_error(twin: Twin, what: str) -> float | None:
    """The error of the architecture's adapter, which loads the twin as a checkpoint."""
    if type(twin.unmodified).__name__ not in ARCHITECTURES:
        return None
    with TemporaryDirectory() as folder:
        twin.unmodified.save_pretrained(folder)  # type: ignore[operator]
        spec = read_spec(folder)
        adapter = load_model(spec, folder, "cpu")
        return compare(replace(twin, spec=spec), adapter, f"{what} by its adapter").error


def _counted(twin: Twin, program: Program) -> dict[str, Any]:
    """Sites, misses and plain ops of a rewritten graph."""
    reports = {report.name: report for report in program.reports}
    sites = {kind: _matched(reports[name]) for kind, name in _KINDS.items() if name in reports}
    missed = {
        kind: dict(Counter(site.reason for site in reports[name].missed))
        for kind, name in _KINDS.items()
        if name in reports
    }
    graph = program.traced.gm.graph
    calls = [op_name(node) for node in _calls(graph)]
    sites["attention"] = [calls.count("paged_attention"), twin.spec.num_layers]
    merged = len(twin.spec.captured.siblings) if twin.spec.captured else 0
    apart = _apart(graph)
    sites["siblings"] = [merged, merged + apart]
    if apart:
        missed["siblings"] = {"linear layers of several modules read one tensor": apart}
    take_constants(program.traced)  # computed once, with the weights
    return {
        "sites": {kind: counts for kind, counts in sites.items() if counts[1]},
        "missed": {kind: reasons for kind, reasons in missed.items() if reasons},
        "plain": dict(Counter(_plain(graph)).most_common()),
    }


def _apart(graph: fx.Graph) -> int:
    """How many tensors are read by several linear layers that one could compute.  Layers on both
    sides of attention are in two pieces of the program, and one with a gated activation attached
    computes two halves: neither is a sibling."""
    read: Counter[Any] = Counter()
    pieces = 0
    for node in _calls(graph):
        pieces += op_name(node) == "paged_attention"
        args = linear_args(node)
        if args is not None and not has_epilogue(args):
            read[args["x"], pieces] += 1
    return sum(count > 1 for count in read.values())


def _matched(report: PassReport) -> list[int]:
    return [report.matched, len(report.sites)]


def _calls(graph: fx.Graph) -> Iterable[fx.Node]:
    return [node for node in graph.nodes if node.op in ("call_function", "call_method")]


def _plain(graph: fx.Graph) -> list[str]:
    """Names of the calls that compute something and are none of our ops."""
    return [
        op_name(node)
        for node in _calls(graph)
        if not is_plain(node)
        and getattr(node.target, "namespace", "") != "fw"
        and op_name(node) not in _MOVES
    ]


def check_models(
    names: Sequence[str], level: int, jobs: int, on_done: Callable[[ModelCheck], object]
) -> list[ModelCheck]:
    """``check_model`` for each of ``names``, by ``jobs`` processes; results are in their order.

    Raises:
        UserError: the library is not installed, or there is no such type or folder.
    """
    version()
    if jobs == 1 or len(names) == 1:
        _be_quiet()
        checks = []
        for name in names:
            checks.append(check_model(name, level))
            on_done(checks[-1])
        return checks
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_be_quiet) as workers:
        running = {workers.submit(check_model, name, level): name for name in names}
        by_name = {}
        for future in as_completed(running):
            by_name[running[future]] = future.result()
            on_done(by_name[running[future]])
    return [by_name[name] for name in names]


def _be_quiet() -> None:
    """Keep what libraries say of twins from the terminal: what matters is in the results."""
    from transformers.utils import logging as library

    library.set_verbosity_error()
    library.disable_progress_bar()
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
