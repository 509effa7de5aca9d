"""A checkpoint's own word on how it is quantized -> ``QuantScheme``.

The projects that quantize say it in ``quantization_config`` of ``config.json``, each in fields of
its own; ModelOpt also in a file beside it.  ``dialects`` reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ...config.errors import UserError
from ...config.weight_format import STORED_FORMATS, StoredFormat
from ..hf_json import HfConfig
from ..sharding import ModulePart
from .dialect import Dialect, says_quantized
from .layouts import Layout
from .scheme import LINEARS, MOE_LINEARS, QuantKind, QuantScheme

_NAMES_SHOWN = 4
_GATHERS = (
    "columns of weights are sorted by activation (desc_act): layers put their input in that order, "
    "one more launch each; {}"
)


def read_quantization(
    config: HfConfig, names: Iterable[tuple[str, ModulePart]], num_layers: int
) -> QuantScheme | None:
    """How the checkpoint of a ``config.json`` is quantized; None: not at all.

    Args:
        names: checkpoint names of the model's modules, and their targets.

    Raises:
        UserError: in another way than is supported, or not alike where it must be.
    """
    if (dialect := _dialect(config)) is None:
        return None
    kinds = _of_parts(dialect, ((name, target.module) for name, target in names))
    every = (*LINEARS, *MOE_LINEARS)
    layers = [
        {n: kinds[module] for n in every if (module := f"layers.{layer}.{n}") in kinds}
        for layer in range(num_layers)
    ]
    # The columns of down are sorted by putting the rows of gate and up into the same order; those
    # of experts are not sorted.
    alike = (n for n in every if n != "mlp.down" and not n.startswith("mlp.experts."))
    gathered = tuple(alike) if dialect.ordered else ()
    return _scheme(dialect, layers, gathered, "mlp.down takes the order of the rows before it")


def read_captured_quantization(
    config: HfConfig,
    names: Callable[[Callable[[str], Layout | StoredFormat | None]], Iterable[tuple[str, str]]],
    num_layers: int,
    experts: Collection[str],
) -> QuantScheme | None:
    """The same for a captured model; errors are those of ``read_quantization``.

    Args:
        experts: the linear layers that have a weight for each expert.
        names: gives checkpoint names of modules, and the linear layer of ``ModelSpec.linears`` that
            each is a part of.  It is told which layout or format a module has, if it is one of
            ``STORED_FORMATS``.
    """
    if (dialect := _dialect(config)) is None:
        return None
    laid = STORED_FORMATS | {layout.target: layout for layout in dialect.layouts}
    parts = [*names(lambda module: laid.get(dialect.kind_of(module) or ""))]
    kinds = _of_parts(dialect, parts)
    gathered = tuple(n for n in kinds if n not in experts) if dialect.ordered else ()
    modules = ((name, dialect.kind_of(name)) for name, _ in parts)
    scheme = _scheme(dialect, [kinds] * num_layers, gathered, "of a captured model all do")
    return replace(scheme, modules=tuple((name, kind) for name, kind in modules if kind in laid))


def _dialect(config: HfConfig) -> Dialect | None:
    if not says_quantized(config):
        return None
    from .dialects import read_dialect  # other models start without the dialects

    return read_dialect(config)


def _scheme(
    dialect: Dialect,
    layers: Sequence[Mapping[str, QuantKind | None]],
    gathered: tuple[str, ...],
    rest: str,
) -> QuantScheme:
    counts = Counter(kind for kinds in layers for kind in kinds.values() if kind)
    main = counts.most_common(1)[0][0] if counts else dialect.kind
    left = tuple(tuple(n for n, kind in kinds.items() if kind is None) for kinds in layers)
    others = tuple(
        tuple((n, kind) for n, kind in kinds.items() if kind not in (None, main))
        for kinds in layers
    )
    return QuantScheme(
        main,
        left,
        online=False,
        others=others if any(others) else (),
        gathered=gathered,
        layouts=dialect.layouts,
        notes=(*dialect.notes, *((_GATHERS.format(rest),) if gathered else ())),
    )


def _of_parts(dialect: Dialect, names: Iterable[tuple[str, str]]) -> dict[str, QuantKind | None]:
    """How each module is quantized, of (checkpoint name, module of which it is a part).

    Raises:
        UserError: parts of one module are quantized in several ways.
    """
    parts: dict[str, dict[str, QuantKind | None]] = {}
    for name, module in names:
        parts.setdefault(module, {})[name] = dialect.kind_of(name)
    for of_module in parts.values():
        if len(set(of_module.values())) == 1:
            continue
        left = [name for name, kind in of_module.items() if kind is None]
        if left:
            raise UserError(
                f"{dialect.where}* leaves {_some(left)} unquantized; expected all or none of "
                f"{_some([*of_module])}, which are one matrix here"
            )
        firsts = {kind: name for name, kind in reversed(of_module.items())}
        unlike_first = sorted(of_module.items(), key=lambda pair: firsts[pair[1]] != pair[0])
        each = _some([f"{name} as {kind}" for name, kind in unlike_first])
        raise UserError(
            f"{dialect.where}* has {each}, which are one matrix here; expected one format for all "
            "of them: "
            "quantize the model again with equal bits and groups for them"
        )
    return {module: next(iter(of_module.values())) for module, of_module in parts.items()}


def _some(names: Sequence[str]) -> str:
    """The first few of the names, and how many there are."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
