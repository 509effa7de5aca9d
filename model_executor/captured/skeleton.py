"""Writes the description of a captured model, and makes a model of it without the library.

Such a model has all parameters and buffers under the names that a program knows, and the moves that
fill them from the checkpoint.  It has no code: a program runs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import safetensors.torch
import torch
from torch import Tensor, nn

from ...config.errors import UserError
from ..checkpoint import read_headers
from ..hf_json import HfConfig, read_json
from ..spec import ModelSpec
from .described import (
    BUFFERS,
    MODEL,
    SPEC,
    DescribedSpec,
    Lookup,
    Tied,
    artifacts_of,
    described_folder,
    raw_headers,
)
from .linears import Sibling, rows_in_memory
from .model import CapturedModel
from .moves import Move
from .read import captured_spec
from .stored_moves import dump_moves, load_moves
from .text_decoder import stored_model

_LIBRARY = "library."


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A parameter or a buffer.  ``value`` names a buffer's value, "" where the checkpoint has it;
    ``home`` is the first name of the same parameter.  One ``by_output`` is stored by input, and
    lies in memory by output."""

    name: str
    home: str
    is_buffer: bool
    shape: tuple[int, ...]
    dtype: str
    value: str
    by_output: bool = False


class _Rows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a tensor that the library has under a name of their own."""

    name: str
    whole: str
    start: int
    length: int


class DescribedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A captured model as data.

    Attributes:
        spec: as it is loaded.
        tensors: all parameters and buffers.
        rows: what is moved to a part of a tensor.
        gathered: the tensors of which a step reads a few rows alone.
        moves: see ``stored_moves``.
    """

    spec: ModelSpec
    tensors: tuple[_Tensor, ...]
    rows: tuple[_Rows, ...]
    gathered: tuple[str, ...]
    moves: str


class Skeleton(nn.Module):
    """The tensors of a captured model, made on the meta device; buffers that no checkpoint has are
    on the CPU."""

    def __init__(
        self, spec: ModelSpec, described: DescribedModel, values: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.spec, self._described = spec, described
        parameters: dict[str, nn.Parameter] = {}
        for each in described.tensors:
            *path, last = each.name.split(".")
            parent: nn.Module = self
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent._modules[part]  # type: ignore[assignment]
            empty = torch.empty(each.shape, dtype=getattr(torch, each.dtype), device="meta")
            empty = rows_in_memory(empty) if each.by_output else empty
            if each.is_buffer:
                parent.register_buffer(last, values[each.value].clone() if each.value else empty)
                continue
            if each.home not in parameters:
                parameters[each.home] = nn.Parameter(empty, requires_grad=False)
            parent.register_parameter(last, parameters[each.home])

    def gathered(self) -> list[Tensor]:
        """The tensors of which a step reads a few rows alone."""
        return [self.get_parameter(name) for name in self._described.gathered]

    def library_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers under the library's names, as ``linears.tensors_of``."""
        tensors = {
            name.removeprefix(_LIBRARY): tensor
            for name, tensor in [*self.named_parameters(), *self.named_buffers()]
        }
        return tensors | {
            rows.name: tensors[rows.whole].detach()[rows.start : rows.start + rows.length]
            for rows in self._described.rows
        }


@dataclass(frozen=True)
class Planned:
    """A model on the meta device, and how its tensors are filled."""

    model: Skeleton
    moves: list[Move]


def planned(spec: ModelSpec, folder: Path, lookup: Lookup) -> Planned | None:
    """The model of ``spec`` as some artifact describes it; None if none does.

    Raises:
        UserError: the folder has no checkpoint that can be read.
    """
    headers = raw_headers(folder)
    if headers is None or not is_describable(spec):
        return None
    values, wanted = read_json(folder / "config.json"), _weights_of(spec)
    found = read_headers(folder)
    for name, artifact in artifacts_of(values, headers, lookup, spec.tensor_parallel_size):
        with suppress(UserError, msgspec.MsgspecError, KeyError, AttributeError, ValueError):
            described = msgspec.json.decode(artifact.read(name + MODEL), type=DescribedModel)
            moves = load_moves(described.moves, found)
            if described.spec == wanted and moves is not None:
                buffers = safetensors.torch.load(artifact.read(name + BUFFERS))
                return Planned(Skeleton(spec, described, buffers), moves)
    return None


def is_describable(spec: ModelSpec) -> bool:
    """Whether a rank loads tensors, or slices of them, as they are."""
    return spec.captured is not None and spec.quant is None


def describe(spec: ModelSpec, folder: Path) -> dict[str, bytes]:
    """The files that describe a captured model in its artifact; none where it cannot be described,
    such as without a checkpoint.

    Args:
        spec: as it is loaded, with the precision that the options say.
        folder: the model's.

    Raises:
        UserError: the checkpoint is not the model's, as ``moves_of``.
    """
    headers = raw_headers(folder)
    if headers is None or not is_describable(spec):
        return {}
    assert spec.captured is not None
    config = HfConfig(folder / "config.json", read_json(folder / "config.json"))
    found = read_headers(folder)
    stated = captured_spec(config, spec.architecture, spec.tensor_parallel_size)
    stored = stored_model(spec.captured, spec.dtype)
    moves = dump_moves(stored.moves(found), found)
    if spec.captured.untied:
        stored = stored_model(replace(spec.captured, untied=()), spec.dtype)
    tied = tuple(
        Tied(one.name, other.name, name not in spec.captured.untied)
        for name, _, one, other in stored.tied(found)
        if one and other
    )
    values: dict[str, Tensor] = {}
    model = CapturedModel(spec)
    tensors = tuple(_tensors(model, values))
    gathered = {id(tensor) for tensor in model.gathered()}
    described = DescribedModel(
        spec=_weights_of(spec),
        tensors=tensors,
        rows=tuple(_rows(model.library)),
        gathered=tuple(name for name, p in model.named_parameters() if id(p) in gathered),
        moves=moves,
    )
    name = described_folder(config.values, headers, spec.tensor_parallel_size)
    return {
        name + SPEC: msgspec.json.encode(DescribedSpec(stated, tied)),
        name + MODEL: msgspec.json.encode(described),
        name + BUFFERS: safetensors.torch.save(values),
    }


def _weights_of(spec: ModelSpec) -> ModelSpec:
    """The spec without what weights do not depend on."""
    return replace(spec, fp8_kv_cache=False, notes=())


def _tensors(model: nn.Module, values: dict[str, Tensor]) -> Iterator[_Tensor]:
    """Describe a model's tensors; puts the values of buffers into ``values``, equal ones once."""
    homes: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        home = homes.setdefault(id(param), name)
        facts = (tuple(param.shape), _dtype_name(param), "", not param.is_contiguous())
        yield _Tensor(name, home, False, *facts)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        value = "" if buffer.is_meta else _digest(buffer)
        if value:
            values.setdefault(value, buffer.detach().contiguous().clone())
        yield _Tensor(name, name, True, tuple(buffer.shape), _dtype_name(buffer), value)


def _rows(library: nn.Module) -> Iterator[_Rows]:
    names = {id(param): name for name, param in library.named_parameters()}
    for name, module in library.named_modules():
        if not isinstance(module, Sibling):
            continue
        for kind in ("weight", "bias"):
            whole = getattr(module.shared.linear, kind)
            if whole is not None:
                yield _Rows(f"{name}.{kind}", names[id(whole)], *module.rows)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    facts = f"{_dtype_name(tensor)}{list(tensor.shape)}".encode()
    return hashlib.sha256(facts + data).hexdigest()[:32]
