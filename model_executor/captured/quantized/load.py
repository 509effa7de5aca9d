"""Fills the quantized layers of a captured model from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....config.errors import UserError
from ....config.weight_format import StoredFormat
from ...checkpoint import F8_E4M3, FLOATS, TensorInfo, open_checkpoint_file
from ...experts import ExpertLinear
from ...layers import Linear
from ...quant.quantize import Staging, rescale
from ...quant.scales import INPUT_SCALES, WEIGHT_SCALES, check_scale, positive
from ...quant.scheme import QuantFormat
from ..linears import Sibling
from ..model import CapturedModel
from ..moves import Move, copy_moves, in_file_order, narrowed, permuted, shifted
from ..ranks.held import moves_of_rank, of_rank
from ..text_decoder import Stored
from .laid import fill_from_layouts
from .laid_experts import fill_experts
from .scales import by_units
from .stored import Gathered, one_tensor_a_weight, type_of

_ONE_MODEL = "config.json and weights must be of one model"


@dataclass(frozen=True)
class _Home:
    """Where a library's parameter is in a quantized layer: from a row on, and transposed."""

    name: str
    layer: Linear | ExpertLinear
    start: int = 0
    transposed: bool = False

    def move(self, move: Move) -> Move:
        """The move to the layer's weight, as [rows, columns], experts ahead of them."""
        if self.transposed:
            move = permuted(move, (0, 2, 1))
        return shifted(move._replace(parameter=f"{self.name}.weight"), -2, self.start)


_Moved = tuple[Move, _Home]
"""The move of a weight's numbers, and the layer that it is for."""


@dataclass(frozen=True)
class QuantizedMoves:
    """How a captured model of which layers are quantized is filled.

    Attributes:
        plain: the moves of all other tensors.
        weights: moves of the numbers of weights, each with the layer that they are for.
        gathered: the checkpoint.
    """

    plain: list[Move]
    weights: list[tuple[Move, _Home]]
    gathered: Gathered

    @property
    def nbytes(self) -> int:
        """Bytes that are read, but for scales."""
        each = (self.gathered.parts.get(m.source.name) for m, _ in self.weights)
        stored = sum(parts["weight"].nbytes for parts in each if parts)
        names = {move.source.name for move, _ in self.weights}
        for of_kind in (self.gathered.laid, self.gathered.experts):
            stored += sum(laid.nbytes for name, laid in of_kind.items() if name in names)
        unquantized = (m.nbytes for m, _ in self.weights if m.source.dtype in FLOATS)
        return sum(move.nbytes for move in self.plain) + stored + sum(unquantized)


def quantized_moves(
    model: CapturedModel, stored: Stored, found: Mapping[str, TensorInfo], rank: int = 0
) -> QuantizedMoves:
    """Plan how a captured model is filled.

    Args:
        model: on the meta device.
        stored: the same model as its checkpoint has it.

    Raises:
        UserError: as ``moves_of``; a weight lacks its scales, or is quantized where it should not
            be.
    """
    quant = model.spec.quant
    assert quant is not None
    homes = dict(_homes(model.library))
    gathered = Gathered(dict(found), {})
    if not quant.online:
        gathered = one_tensor_a_weight(found, quant.stored_as)
    types = {} if quant.online else {name: (_type(home),) for name, home in homes.items()}
    moves = stored.moves(gathered.tensors, types)
    plain = [move for move in moves if move.parameter not in homes]
    rules = {shard.name: shard.rule for shard in model.facts.shards}
    weights = []
    for move in moves:
        if (home := homes.get(move.parameter)) is None:
            continue
        # Blocks of experts find the place of a rank themselves.
        rule = None if move.source.name in gathered.experts else rules.get(move.parameter)
        weights += [(home.move(m), home) for m in of_rank(move, rule, rank, model.facts)]
    return QuantizedMoves(plain, weights, gathered)


def _type(home: _Home) -> str:
    form = home.layer.quant
    return form.name if isinstance(form, StoredFormat) else F8_E4M3


def _homes(library: nn.Module) -> Iterator[tuple[str, _Home]]:
    """The places of the library's parameters in quantized layers."""
    names = {id(module): name for name, module in library.named_modules()}
    for name, module in library.named_modules():
        if isinstance(module, Sibling) and (layer := module.shared.linear).quant:
            yield f"{name}.weight", _Home(names[id(layer)], layer, module.rows[0])
        elif isinstance(module, Linear) and module.quant and "+" not in name:
            yield f"{name}.weight", _Home(name, module)
        elif isinstance(module, ExpertLinear) and module.quant:
            experts: Any = library.get_submodule(name.rpartition(".")[0])
            yield name, _Home(name, module, transposed=experts.is_transposed)


@torch.no_grad()
def fill_quantized(
    model: CapturedModel, moves: QuantizedMoves, advance: Callable[[int], Any], rank: int = 0
) -> None:
    """Fill a model that has memory, or what a rank holds of one.

    Raises:
        UserError: a scale is missing or bad, or cannot go where its weight goes.
    """
    assert model.spec.quant is not None
    plain = moves_of_rank(moves.plain, model.spec, rank)
    copy_moves(plain, model.library_tensors(), advance)
    if model.spec.quant.online:
        _quantize(moves.weights, model.spec.dtype, advance)
        return
    tensors = {**dict(model.library.named_parameters()), **dict(model.library.named_buffers())}
    gathered = moves.gathered
    of_experts, laid, stored = list[_Moved](), list[_Moved](), list[_Moved]()
    for each in moves.weights:
        if (name := each[0].source.name) in gathered.experts:
            of_experts.append(each)
        elif name in gathered.laid:
            laid.append(each)
        elif isinstance(each[1].layer.quant, StoredFormat):
            stored.append(each)
    fill_experts(
        [(m, h.name, h.layer) for m, h in of_experts if isinstance(h.layer, ExpertLinear)],
        gathered.experts,
        tensors,
        advance,
        (rank, model.facts.ranks),
    )
    fill_from_layouts([(m, h.name, h.layer) for m, h in laid], gathered.laid, tensors, advance)
    copy_moves(in_file_order(_stored(stored, moves.gathered)), tensors, advance)
    for move, home in (*laid, *stored):
        _input_scale(move, home.layer, moves.gathered)
    fp8 = [each for each in moves.weights if isinstance(each[1].layer.quant, QuantFormat)]
    rescaled = _scales(fp8, moves.gathered)

    def filled(move: Move, part: Tensor) -> None:
        if pair := rescaled.get((move.source.name, move.parameter, move.dest_start)):
            rescale(part.reshape(-1, 1) if part.dim() < 2 else part, *pair)

    copy_moves(in_file_order(move for move, _ in fp8), tensors, advance, filled)


def _quantize(
    weights: Iterable[tuple[Move, _Home]], dtype: torch.dtype, advance: Callable[[int], Any]
) -> None:
    """Read weights in the model's dtype, and quantize each layer, or each expert, when it is all
    there."""
    layers: dict[str, Any] = {}
    moves: list[Move] = []
    for move, home in weights:
        if isinstance(home.layer, Linear):
            layers[move.parameter] = home.layer
            moves.append(move)
            continue
        for number in home.layer.numbers:
            for part in _of_expert(move, number):
                layers[part.parameter] = home.layer.expert(number)
                moves.append(part)
    staging = Staging(layers, {}, (move.parameter for move in moves), dtype)
    copy_moves(
        in_file_order(moves), staging, advance, lambda move, part: staging.filled(move.parameter)
    )


def _of_expert(move: Move, number: int) -> Iterator[Move]:
    """The parts of a move that fill one expert, as moves to its matrix."""
    for part in narrowed(move, 0, number, 1):
        yield part._replace(
            parameter=f"{move.parameter}[{number}]",
            dest_start=part.dest_start[1:],
            axes=tuple(axis._replace(dest_dim=axis.dest_dim - 1) for axis in part.axes),
        )


def _stored(weights: Iterable[tuple[Move, _Home]], gathered: Gathered) -> Iterator[Move]:
    """The moves of all tensors of weights in admitted formats."""
    for move, home in weights:
        form = home.layer.quant
        assert isinstance(form, StoredFormat)
        rows, columns = move.source.shape
        for kind, tensor in form.tensors.items():
            info = gathered.parts[move.source.name][kind]
            try:
                if info.shape != (shape := tensor.shape(rows, columns)):
                    raise UserError(
                        f"tensor {info.name} in {info.file} has shape {list(info.shape)}, expected "
                        f"{list(shape)}; {_ONE_MODEL}"
                    )
                part = by_units(move, tensor.steps, (rows, columns), swapped=tensor.transposed)
            except ValueError as error:
                raise _parts(info, home, error) from error
            if info.dtype != type_of(tensor):
                raise UserError(f"tensor {info.name} is of type {info.dtype}; {_ONE_MODEL}")
            yield part._replace(source=info, parameter=f"{home.name}.{kind}")


def _parts(info: TensorInfo, home: _Home, error: ValueError) -> UserError:
    return UserError(
        f"tensor {info.name} in {info.file} cannot go to {home.name}, which is made of parts of "
        f"several weights: {error}; use weights with a scale for each channel"
    )


_Rescaled = dict[tuple[str, str, tuple[int, ...]], tuple[float, float]]


def _scales(weights: Iterable[tuple[Move, _Home]], gathered: Gathered) -> _Rescaled:
    """Read the scales of FP8 weights, which are small, ahead of the weights.

    Returns:
        (its scale, the scale of the merged weight) of every move for which the two differ.
    """
    own: dict[tuple[str, str, tuple[int, ...]], tuple[float, Tensor]] = {}
    for move, home in weights:
        quant, layer = home.layer.quant, home.layer
        assert isinstance(quant, QuantFormat)
        rows, columns = move.source.shape
        shape = quant.scale_shape(rows, columns)
        scale = _scale(move, gathered, "weight_scale", shape, per_block=quant.blocks)
        try:
            part = by_units(move, (quant.rows, quant.columns), (rows, columns))
        except ValueError as error:
            raise _parts(move.source, home, error) from error
        dest = part.part_of(layer.weight_scale)
        value = part.part_read(scale[part.read_index()]).to(dest.device)
        if quant.rows:
            dest.copy_(value)
        else:
            dest.copy_(torch.maximum(dest, value))
            own[move.source.name, move.parameter, move.dest_start] = scale.item(), dest
        _input_scale(move, layer, gathered)
    pairs = {key: (scale, float(dest)) for key, (scale, dest) in own.items()}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _input_scale(move: Move, layer: Linear | ExpertLinear, gathered: Gathered) -> None:
    """Read the scale of a layer's input if the format has one; of several parts, the largest."""
    if layer.quant is not None and layer.quant.static:
        scale = _scale(move, gathered, "input_scale", (1, 1)).to(layer.input_scale.device)
        layer.input_scale.copy_(torch.maximum(layer.input_scale, scale))


def _scale(
    move: Move, gathered: Gathered, kind: str, shape: tuple[int, int], *, per_block: bool = False
) -> Tensor:
    """A scale of a source, float32 and expanded to ``shape``."""
    weight = move.source
    info = gathered.parts[weight.name].get(kind)
    if info is None:
        module = weight.name.removesuffix(".weight")
        names = WEIGHT_SCALES if kind == "weight_scale" else INPUT_SCALES
        raise UserError(
            f"the checkpoint has no scale for {weight.name} in {weight.file}, expected "
            f"{' or '.join(f'{module}.{name}' for name in names)}; {_ONE_MODEL}"
        )
    check_scale(info, shape, per_block=per_block)
    with open_checkpoint_file(info.file) as opened:
        scale = positive(opened.get_tensor(info.name).float(), info)
    return scale.view(shape if scale.numel() > 1 else (1, 1)).expand(shape)
