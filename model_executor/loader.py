"""Loads a checkpoint into a module: parameters get memory, then tensors are copied one by one.

Every name, type and shape is checked against the checkpoint files' headers before the first byte is
copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from ..config.errors import UserError
from ..ops.core.float8 import E4M3
from .captured.described import Lookup, nowhere
from .checkpoint import TensorInfo, open_checkpoint_file, read_headers
from .dummy import fill_dummy
from .experts import ExpertLinear, expert_shares
from .laid_out import fill_laid_out, laid_out_reads
from .layers import Embedding, Linear, rules_of
from .models.decoder import DecoderModel
from .models.moe import Experts
from .parallel import TensorParallelRank
from .quant.layer import Quantizable
from .quant.quantize import Staging, rescale
from .quant.scales import find_scales, read_scales
from .slots import Read, all_slots, elsewhere, names_in, plan_reads, stored_buffers
from .spec import ModelSpec, stage_of

# The rest of `captured/`, some thirty modules, is imported where such a model is made.
if TYPE_CHECKING:
    from .captured.model import CapturedModel
    from .captured.moves import Move
    from .captured.skeleton import Skeleton
    from .captured.text_decoder import Stored

Model: TypeAlias = "DecoderModel | CapturedModel | Skeleton"
ProgressBar: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[int], Any]]]
"""Takes a label and a total.  The context manager that it returns gives a function, which advances
the bar by a number of units."""


@contextmanager
def no_progress(label: str, total: int) -> Iterator[Callable[[int], Any]]:
    """Shows nothing."""
    yield lambda count: None


def load_model(
    spec: ModelSpec,
    folder: Path | str,
    device: torch.device | str,
    *,
    load_format: str = "auto",
    seed: int = 0,
    progress: ProgressBar = no_progress,
    rank: int = 0,
    lookup: Lookup = nowhere,
) -> Model:
    """Build the model of ``spec`` on ``device`` with the weights of ``folder``, or one rank's part
    of them.

    Args:
        spec: from ``read_spec(folder)``; weights are cast to its ``dtype``, or quantized by its
            ``quant``, one parameter at a time.
        folder: holds ``model.safetensors``, or ``model.safetensors.index.json`` and its files.
        device: where the parameters live; tensors go there one at a time.
        load_format: "auto" or "safetensors" reads the folder; "dummy" reads nothing and fills
            the weights at random from ``seed``: FP8 ones are those of the same model without
            ``quant``, quantized.
        progress: shows the bytes that are loaded, see ``ProgressBar``.
        rank: number of this rank among all that hold the model, those of the first stage first.
            It reads only its slices of its stage's layers.
        lookup: finds artifacts that describe a captured model.  One that is described is only its
            tensors, without code, and its library is not imported; random weights need the library.

    Raises:
        UserError: a checkpoint file is missing or damaged, its tensors are not those of the model,
            or the device has no room for them.
    """
    if spec.captured:
        if load_format == "dummy":
            return _dummy_captured(spec, device, seed, rank)
        return _load_captured(spec, Path(folder), device, progress, lookup, rank)
    stage, tp_rank = divmod(rank, spec.tensor_parallel_size)
    try:
        model = DecoderModel(stage_of(spec, stage))
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise UserError(
            f"no room for the cosines and sines of max_position_embeddings = "
            f"{spec.max_position_embeddings}; lower it in {Path(folder) / 'config.json'}"
        ) from error
    tp = TensorParallelRank(tp_rank, spec.tensor_parallel_size)
    place_experts(model, tp)
    others = [
        # Their parameters alone are of use, not the tables of cosines and sines.
        DecoderModel(replace(stage_of(spec, number), max_position_embeddings=1))
        for number in range(spec.pipeline_parallel_size)
        if number != stage
    ]
    if load_format == "dummy":
        materialize(model, spec.dtype, device)
        fill_dummy(model, spec.dtype, seed, tp, others[:stage])
    elif load_format in ("auto", "safetensors"):
        load_weights(model, read_headers(Path(folder)), device, progress, tp, others)
    else:
        raise UserError(f"load_format={load_format!r}: expected auto, safetensors or dummy")
    set_rank(model, tp)
    return model.eval()


def _dummy_captured(
    spec: ModelSpec, device: torch.device | str, seed: int, rank: int
) -> CapturedModel:
    from .captured.model import CapturedModel, fill_captured
    from .captured.ranks.held import set_captured_rank

    model = CapturedModel(spec)
    materialize(model, None, device)
    fill_captured(model, seed)
    set_captured_rank(model, rank)
    return model


def _load_captured(
    spec: ModelSpec,
    folder: Path,
    device: torch.device | str,
    progress: ProgressBar,
    lookup: Lookup,
    rank: int,
) -> CapturedModel | Skeleton:
    from .captured.model import CapturedModel
    from .captured.skeleton import planned
    from .captured.text_decoder import stored_model

    if described := planned(spec, folder, lookup):
        _copy(described.model, described.moves, device, progress, rank)
        return described.model
    model = CapturedModel(spec)
    stored = stored_model(model.facts, spec.dtype)
    load_captured(model, stored, read_headers(folder), device, progress, rank)
    return model


def load_captured(
    model: CapturedModel,
    stored: Stored,
    found: Mapping[str, TensorInfo],
    device: torch.device | str,
    progress: ProgressBar,
    rank: int = 0,
) -> None:
    """Give a captured model memory, and fill it from a checkpoint that has it as ``stored``.

    Raises:
        UserError: as ``load_model``.
    """
    if not model.spec.quant:
        _copy(model, stored.moves(found), device, progress, rank)
        return
    from .captured.quantized.load import fill_quantized, quantized_moves
    from .captured.ranks.held import set_captured_rank

    quantized = quantized_moves(model, stored, found, rank)
    materialize(model, None, device)
    with progress("Loading weights", quantized.nbytes) as advance:
        fill_quantized(model, quantized, advance, rank)
    set_captured_rank(model, rank)


def _copy(
    model: CapturedModel | Skeleton,
    moves: list[Move],
    device: torch.device | str,
    progress: ProgressBar,
    rank: int,
) -> None:
    """Fill a model of which nothing is quantized."""
    from .captured.moves import copy_moves
    from .captured.ranks.held import moves_of_rank, set_captured_rank

    materialize(model, None, device)
    moves = moves_of_rank(moves, model.spec, rank)
    set_captured_rank(model, rank)
    with progress("Loading weights", sum(move.nbytes for move in moves)) as advance:
        copy_moves(moves, model.library_tensors(), advance)


def place_experts(model: nn.Module, tp: TensorParallelRank) -> None:
    """Say which experts are to be loaded."""
    for module in model.modules():
        if isinstance(module, ExpertLinear):
            module.place(tp.rank)


def set_rank(model: DecoderModel, tp: TensorParallelRank) -> None:
    """Fill what tells one rank from another beside the slices of weights: the first id of its part
    of the vocabulary and of its experts, and zeros for what another rank adds to a sum."""
    for module in model.modules():
        if isinstance(module, Embedding) and module.first_id is not None:
            module.first_id.fill_(tp.rank * module.weight.shape[0])
        if isinstance(module, Experts) and module.first_expert is not None:
            module.first_expert.fill_(module.down.first)
        for kind, rule in rules_of(module).items():
            param = getattr(module, kind, None)
            if rule.once and tp.rank > 0 and param is not None:
                param.detach().zero_()


def load_weights(
    model: DecoderModel,
    found: Mapping[str, TensorInfo],
    device: torch.device | str,
    progress: ProgressBar,
    tp: TensorParallelRank | None = None,
    others: Sequence[DecoderModel] = (),
) -> None:
    """Check the checkpoint's tensors against the model, give it memory and fill it.

    Args:
        others: the other stages; their tensors are checked here, and read by their ranks.

    Raises:
        UserError: as ``load_model``.
    """
    tp = tp or TensorParallelRank()
    spec, modules = model.spec, dict(model.named_modules())
    online = spec.quant is not None and spec.quant.online
    needed, of_scales = all_slots(model, tp, found)
    for other in others:
        weights, more = all_slots(other, tp, found)
        needed = {name: elsewhere(slot) for name, slot in weights.items()} | needed
        of_scales += [replace(slot, elsewhere=True) for slot in more]
    scales = find_scales(of_scales, found)
    laid, used = laid_out_reads(model, tp, names_in(found, spec), found)
    for other in others:
        used |= laid_out_reads(other, tp, names_in(found, other.spec), found)[1]
    used |= {read.source.name for read in scales}
    reads = plan_reads(needed, {n: info for n, info in found.items() if n not in used}, spec)
    materialize(model, spec.dtype, device)
    scale_shares = dict(expert_shares(model, "weight_scale"))
    combined = read_scales(scales, {**dict(model.named_buffers()), **scale_shares})
    staging = Staging(
        dict(_quantized(modules)) if online else {},
        {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(expert_shares(model, "weight")),
            **dict(stored_buffers(model)),
        },
        (read.slot.parameter for read in reads),
        spec.dtype,
    )

    def filled(read: Read, part: Tensor) -> None:
        if (scale_pair := combined.get(read.source.name)) is not None:
            rescale(part, *scale_pair)
        staging.filled(read.slot.parameter)

    total = sum(r.nbytes for r in reads) + sum(r.nbytes for r in laid)
    with progress("Loading weights", total) as advance:
        stream(staging, reads, advance, filled)
        fill_laid_out(laid, advance)


def _quantized(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Quantizable]]:
    """FP8 layers by the names of their weights: a layer of experts as a whole, then each expert."""
    for name, module in modules.items():
        if isinstance(module, Linear | ExpertLinear) and module.quant:
            yield f"{name}.weight", module
        if isinstance(module, ExpertLinear) and module.quant:
            for number in module.numbers:
                yield f"{name}.weight[{number}]", module.expert(number)


def make_model(spec: ModelSpec) -> DecoderModel | CapturedModel:
    """The modules of a model, or of a stage of it, on the meta device."""
    if spec.head and spec.captured:
        from .heads.captured import CapturedHead

        return CapturedHead(spec)
    if spec.head:
        from .models.draft_head import DraftHead

        return DraftHead(spec)
    if not spec.captured:
        return DecoderModel(spec)
    from .captured.model import CapturedModel

    return CapturedModel(spec)


def fake_model(spec: ModelSpec, device: torch.device) -> DecoderModel | CapturedModel:
    """The model with uninitialized weights of the right shapes; under ``FakeTensorMode`` they have
    no memory either."""
    model = make_model(spec)
    dtype = None if spec.captured else spec.dtype
    _replace_tensors(
        model,
        lambda param: _empty_like(param, dtype, device),
        lambda buffer: torch.empty(buffer.shape, dtype=buffer.dtype, device=device),
    )
    return model.eval()


def materialize(model: nn.Module, dtype: torch.dtype | None, device: torch.device | str) -> None:
    """Give every meta parameter uninitialized memory; tied parameters stay one.  Buffers move.

    Raises:
        UserError: the device has no room.
    """
    try:
        _replace_tensors(
            model,
            lambda param: _empty_like(param, dtype, device),
            lambda buffer: (
                _empty_like(buffer, None, device) if buffer.is_meta else buffer.to(device)
            ),
        )
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        needed = sum(p.numel() * _dtype(p, dtype).itemsize for p in model.parameters())
        raise UserError(
            f"{device} has no room for {needed / 1e9:.1f} GB of weights; free memory there, or use "
            "a smaller model or a larger device"
        ) from error


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; that of the CPU has no class of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "can't allocate memory" in str(error)


def _dtype(param: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Quantized weights keep their dtype, others are of the model's; with None all keep theirs."""
    if dtype is None:
        return param.dtype
    return dtype if param.is_floating_point() and param.dtype != E4M3 else param.dtype


def _empty_like(like: Tensor, dtype: torch.dtype | None, device: torch.device | str) -> Tensor:
    if like.is_contiguous():  # ``empty_like`` of a meta tensor imports sympy
        return torch.empty(like.shape, dtype=_dtype(like, dtype), device=device)
    # Experts' weights that a library has transposed keep their strides.
    return torch.empty_like(like, dtype=_dtype(like, dtype), device=device)


def _replace_tensors(
    model: nn.Module,
    new_param: Callable[[Tensor], Tensor],
    new_buffer: Callable[[Tensor], Tensor],
) -> None:
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in made:
                made[id(param)] = nn.Parameter(new_param(param), requires_grad=False)
            setattr(module, name, made[id(param)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, new_buffer(buffer))


def stream(
    params: Mapping[str, Tensor],
    reads: Iterable[Read],
    advance: Callable[[int], Any],
    filled: Callable[[Read, Tensor], None] = lambda read, part: None,
) -> None:
    """Copy tensors into their parameters and cast them, with one tensor in memory at a time.

    ``reads`` are in file order.  After each, ``advance`` is told its bytes, and ``filled`` the part
    of a parameter that now holds it.
    """
    for file, of_file in groupby(reads, key=lambda read: read.source.file):
        with open_checkpoint_file(file) as opened, torch.no_grad():
            for read in of_file:
                place = read.slot.placement
                index = [slice(None)] * len(read.slot.shape)
                index[place.dim] = slice(place.source_start, place.source_start + place.length)
                tensor = opened.get_slice(read.source.name)[tuple(index)]
                param = params[read.slot.parameter]
                part = param.narrow(place.dim, place.dest_start, place.length)
                part.copy_(tensor)
                filled(read, part)
                advance(read.nbytes)
