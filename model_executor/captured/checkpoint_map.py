"""Which tensor of a checkpoint goes where in a model of ``transformers``.

The library's own mapping decides: its renamings give each tensor a name in the model, and its
conversions run on tensors without data (``traced``), which say what to copy.  Every name, shape and
type is checked against the files' headers before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ...config.errors import UserError
from ..checkpoint import RawTensor, TensorInfo, dtype_names, read_raw_header
from ..checkpoint_facts import equal_bits
from ..slots import IGNORED, some_weights
from .moves import Move, in_file_order, whole
from .traced import InexpressibleError, TracedTensor, traced

Skip: TypeAlias = Callable[[str], bool]
"""Whether a name is of a part that is not wanted, such as another tower.  It is asked about the
model's parameters, and about the tensors of the checkpoint by the names that they have in the
model: by the library's renaming, also where the model has no such parameter."""

_ONE_MODEL = "config.json and weights must be of one model"


def _none(name: str) -> bool:
    return False


@dataclass(frozen=True)
class _Load:
    """Tensors of a checkpoint that one of the library's conversions turns into parameters, of which
    ``key`` is the first, or a tensor that is a parameter as it is.  Each is under the pattern that
    its name matched."""

    key: str
    conversion: Any | None
    tensors: dict[str, list[TensorInfo]]

    @property
    def names(self) -> list[str]:
        return [info.name for group in self.tensors.values() for info in group]


@dataclass(frozen=True)
class _Plan:
    """The loads of a checkpoint, and its tensors that have no place, by their names in the model.
    ``expected`` are the model's parameters and persistent buffers, ``skipped`` the tensors of parts
    that are not wanted."""

    model: Any
    expected: dict[str, Tensor]
    loads: dict[str, _Load]
    unused: dict[str, str]
    skipped: list[str]

    def results(self) -> dict[str, tuple[_Load, TracedTensor]]:
        """Return the load and the tensor that fill each parameter."""
        done: dict[str, tuple[_Load, TracedTensor]] = {}
        for load in self.loads.values():
            for name, tensor in _converted(self.model, load).items():
                if name in done:
                    raise _two(name, done[name][0].names[0], load.names[0])
                done[name] = load, tensor
        return done


def moves_of(
    model: Any,
    found: Mapping[str, TensorInfo],
    skip: Skip = _none,
    types: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> list[Move]:
    """The copies that fill a model from a checkpoint, in file order.

    Tied parameters are filled once, under the name of the one that the others are tied to;
    ``untie`` says first which these are.

    Args:
        model: a ``PreTrainedModel`` as the library builds it, on the meta device.
        found: from ``read_headers``.
        skip: see ``Skip``.
        types: of the tensors for a parameter, where they are not the ones of its own type.

    Raises:
        UserError: a parameter or persistent buffer is left without a tensor, or has two; a tensor
            has no place in the model, or a wrong shape or type; a conversion is more than copies
            of slices.
    """
    plan, homes = _plan(model, found, skip), _homes(model)
    results = plan.results()
    missing = _missing(plan, results, homes, skip)
    if missing:
        raise UserError(
            f"the checkpoint lacks {some_weights(missing)}, which config.json calls for; "
            "download the model again, or use its own config.json"
        )
    unused = dict(plan.unused)
    moves: list[Move] = []
    for name, (load, tensor) in results.items():
        if name not in plan.expected:
            unused |= dict.fromkeys(load.names, name)
            continue
        expected = plan.expected[name]
        _check(name, expected, load, tensor, types.get(name, dtype_names(expected.dtype)))
        home = homes.get(name, name)
        if home == name or home not in results:
            moves += (move._replace(parameter=home) for move in tensor.moves)
    extra = _unknown(model, unused)
    if extra:
        raise UserError(
            f"the checkpoint has {some_weights(extra)}, unknown to {type(model).__name__} with "
            f"this config.json; {_ONE_MODEL}"
        )
    return in_file_order(moves)


def skipped_of(model: Any, found: Mapping[str, TensorInfo], skip: Skip) -> list[str]:
    """The tensors of a checkpoint that are of parts that are not wanted."""
    return _plan(model, found, skip).skipped


def sources_of(
    model: Any, found: Mapping[str, TensorInfo], skip: Skip = _none
) -> dict[str, tuple[str, ...]]:
    """The names of the tensors of a checkpoint of which each parameter is made."""
    results = _plan(model, found, skip).results()
    return {
        name: tuple(dict.fromkeys(move.source.name for move in tensor.moves))
        for name, (_, tensor) in results.items()
    }


def untie(model: Any, found: Mapping[str, TensorInfo], skip: Skip = _none) -> dict[str, str]:
    """Give tied parameters of which the checkpoint has several different ones a parameter each, as
    the library does behind a load.

    Returns:
        Their names, with a note for each.

    Raises:
        UserError: as ``moves_of``.
    """
    notes = dict[str, str]()
    for name, home, one, other in tied_tensors(model, found, skip):
        if one and other and equal_bits(_raw(one), _raw(other)):
            continue
        separate(model, name)
        notes[name] = (
            f"config.json ties {name} to {home}, but the checkpoint has another tensor for each: "
            "both are used, as by transformers 5; set tie_word_embeddings to false in config.json"
        )
    return notes


class TiedTensors(NamedTuple):
    """Parameters that the configuration ties, and the tensors of a checkpoint that would fill each;
    None for one that is made by more than copying a tensor as it is."""

    name: str
    home: str
    one: TensorInfo | None
    other: TensorInfo | None


def tied_tensors(
    model: Any, found: Mapping[str, TensorInfo], skip: Skip = _none
) -> list[TiedTensors]:
    """The tied parameters of which a checkpoint has both; errors are those of ``moves_of``."""
    if not model.all_tied_weights_keys:
        return []
    results = _plan(model, found, skip).results()
    return [
        TiedTensors(name, home, *(_as_it_is(results[key][1]) for key in (name, home)))
        for name, home in model.all_tied_weights_keys.items()
        if name in results and home in results
    ]


def separate(model: Any, name: str) -> None:
    """Give a parameter that is tied to another one a tensor of its own."""
    parent, _, kind = name.rpartition(".")
    own = nn.Parameter(torch.empty_like(model.get_parameter(name)), requires_grad=False)
    setattr(model.get_submodule(parent), kind, own)
    del model.all_tied_weights_keys[name]


def dtypes_of(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The type of each parameter and persistent buffer behind a load: that of the model, float32
    where its class asks for it.

    Args:
        model: built with ``dtype``.
    """
    from transformers.core_model_loading import build_glob_alternation

    asked = model._get_dtype_plan(dtype)
    pattern, names, _ = build_glob_alternation(list(asked))

    def of(name: str, tensor: Tensor) -> torch.dtype:
        match = pattern.search(name) if asked else None
        return asked[names[match.lastgroup or ""]] if match else tensor.dtype

    return {name: of(name, tensor) for name, tensor in model.state_dict().items()}


def _homes(model: Any) -> dict[str, str]:
    """The parameter whose name stands for each one that is the same."""
    homes: dict[str, str] = dict(model.all_tied_weights_keys)
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in homes:
            homes[name] = first.setdefault(id(tensor), name)
    return homes


def _plan(model: Any, found: Mapping[str, TensorInfo], skip: Skip) -> _Plan:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [transform for transform in mapping if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in mapping if isinstance(transform, WeightConverter)]
    of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    expected: dict[str, Tensor] = model.state_dict(keep_vars=True)
    place = model.base_model_prefix, expected
    plan = _Plan(model, expected, {}, {}, [])
    # A conversion stacks tensors in the order in which they come: experts by their numbers.
    for name in sorted(found, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, *place)
        if key not in expected and name in expected:
            key, pattern = rename_source_key(name, [], [], *place)
        if skip(key):
            plan.skipped.append(name)
            continue
        if key not in expected:
            plan.unused[name] = key
            continue
        if key not in plan.loads:
            conversion = deepcopy(of_pattern[pattern]) if pattern else None
            plan.loads[key] = _Load(key, conversion, {})
        load = plan.loads[key]
        if load.tensors and not (pattern and load.conversion):
            raise _two(key, load.names[0], name)
        load.tensors.setdefault(pattern or name, []).append(found[name])
    return plan


def _converted(model: Any, load: _Load) -> dict[str, TracedTensor]:
    """The parameters that a load fills, by their names."""
    conversion, dtype = load.conversion, model.dtype
    if conversion is None:
        (only,) = next(iter(load.tensors.values()))
        return {load.key: traced(only, dtype)}
    for pattern, infos in load.tensors.items():
        for info in infos:
            conversion.add_tensor(load.key, info.name, pattern, traced(info, dtype))
    operations = ", ".join(type(op).__name__ for op in conversion.operations)
    try:
        results = conversion.convert(load.key, model=model, config=model.config)
    except InexpressibleError as error:
        raise UserError(
            f"parameter {load.key} is made by {operations} of transformers, which is more than "
            f"copying slices ({error}); save the model as it is in memory: from_pretrained(...)"
            ".save_pretrained(..., save_original_format=False)"
        ) from error
    except Exception as error:
        raise UserError(
            f"the checkpoint's {some_weights(load.names)} cannot become {load.key} by "
            f"{operations} of transformers ({error}); {_ONE_MODEL}"
        ) from error
    return dict(_single(results))


def _single(results: Mapping[str, Any]) -> Iterator[tuple[str, TracedTensor]]:
    """Some conversions give lists of one tensor."""
    for name, tensor in results.items():
        yield name, tensor[0] if isinstance(tensor, list) else tensor


def _two(name: str, one: str, other: str) -> UserError:
    return UserError(
        f"the checkpoint's {one} and {other} are both {name} of the model; remove one of them"
    )


def _missing(
    plan: _Plan, results: Mapping[str, Any], homes: Mapping[str, str], skip: Skip
) -> list[str]:
    filled = {homes.get(name, name) for name in results}
    return [
        name
        for name, tensor in plan.expected.items()
        if homes[name] not in filled and homes[name] == name and tensor.numel() and not skip(name)
    ]


def _unknown(model: Any, unused: Mapping[str, str]) -> list[str]:
    """The unused tensors that the model's class does not leave out by itself."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), IGNORED.pattern]
    ignored = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return [name for name, key in unused.items() if not ignored.search(key)]


def _check(
    name: str, expected: Tensor, load: _Load, tensor: TracedTensor, dtypes: Sequence[str]
) -> None:
    """Raises if a parameter's tensors have another shape or type."""
    first = next(iter(load.tensors.values()))[0]
    subject = f"tensor {first.name} in {first.file} has"
    if load.conversion is not None:
        subject = f"the checkpoint's {some_weights(load.names)} for {name} have in all"
    if tensor.shape != expected.shape:
        raise UserError(
            f"{subject} shape {list(tensor.shape)}, expected {list(expected.shape)}; {_ONE_MODEL}"
        )
    for move in tensor.moves:
        if move.source.dtype not in dtypes:
            raise UserError(
                f"tensor {move.source.name} in {move.source.file} is of type {move.source.dtype}, "
                f"expected {' or '.join(dtypes)}; config.json must say what is quantized"
            )


def _as_it_is(tensor: TracedTensor) -> TensorInfo | None:
    """The tensor of the checkpoint that a parameter is; None unless it is one as it is."""
    if len(tensor.moves) != 1 or whole(source := tensor.moves[0].source) != tensor.moves:
        return None
    return source


def _raw(info: TensorInfo) -> RawTensor:
    return read_raw_header(info.file)[info.name]
