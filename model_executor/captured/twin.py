"""A twin of a captured model: small, with random weights, run by us and by its unmodified self.

Several sequences arrive in chunks and then decode together, over a paged KV cache, as the engine
schedules them; the logits of each step's last tokens have to be those of the library's module for
the whole sequence.  A mask, scale, window, offset or order that is wrong shows here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...config import UserError
from ..attention import AttentionInputs, CacheInputs
from ..kv_cache import allocate_kv_caches
from ..loader import materialize
from ..spec import ModelSpec
from .library import first_line, unmodified
from .linears import tensors_of
from .model import CapturedModel, position_arguments
from .random_weights import randomize
from .read import spec_of
from .shrink import shrunk
from .text_decoder import stored_model

Step: TypeAlias = Callable[[Tensor, Tensor, AttentionInputs, list[Tensor]], Tensor]
"""Computes a step: (ids, positions, attention, KV caches) -> logits, as ``CapturedModel`` does."""

ATOL, RTOL = 1e-4, 1e-4
"""The most that logits may differ, in float32; a wrong feature moves them by a hundred times as
much, since weights are drawn so wide."""
LENGTHS = (44, 1, 21, 9, 33)
"""Tokens of each sequence; windows and chunks of a twin are much shorter."""
_BLOCK, _CHUNK = 8, 13
_PLACEHOLDER = re.compile(r"_token_(id|index)$")


class ProofError(RuntimeError):
    """A captured model does not compute what its unmodified implementation does."""


@dataclass(frozen=True)
class Twin:
    """Both sides of a comparison, in float32 on the CPU, with equal weights."""

    spec: ModelSpec
    ours: CapturedModel
    unmodified: nn.Module


@dataclass(frozen=True)
class Agreement:
    """What a comparison found: the largest difference of logits, and how many were compared."""

    error: float
    tokens: int
    layers: int


def make_twin(config: Any, what: str) -> Twin:
    """The twin of a configuration of the library.

    Raises:
        UserError: there is none, or the engine lacks what it needs; says what.
    """
    try:
        small = shrunk(config)
        small.dtype = "float32"
        module: Any = unmodified(small, torch.float32)
    except Exception as error:
        raise UserError(
            f"{what}: no small model of its kind can be made: {first_line(error)}"
        ) from error
    randomize(module)
    spec = spec_of(small, what, type(module).__name__)
    ours = CapturedModel(spec)
    materialize(ours, None, "cpu")
    theirs, names = tensors_of(module), stored_model(ours.facts, torch.float32).names
    in_whole = {own: name for name, own in names.items()}
    with torch.no_grad():
        for name, tensor in tensors_of(ours.library).items():
            tensor.copy_(theirs[in_whole.get(name, name)])
    return Twin(spec, ours.eval(), module)


@torch.inference_mode()
def compare(twin: Twin, step: Step, what: str, lengths: Sequence[int] = LENGTHS) -> Agreement:
    """Run ``step`` as an engine would, and compare its logits with the unmodified module's.

    Raises:
        ProofError: they differ by more than rounding; names the first module that does.
    """
    with _one_thread():
        return _compare(twin, step, what, lengths)


def _compare(twin: Twin, step: Step, what: str, lengths: Sequence[int]) -> Agreement:
    spec = twin.spec
    vocab = twin.unmodified.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    generator = torch.Generator().manual_seed(5)
    words = torch.tensor(sorted({*range(3, vocab)} - _placeholders(twin.unmodified.config)))
    sequences = [words[torch.randint(len(words), (n,), generator=generator)] for n in lengths]
    expected = [_unmodified(twin, ids) for ids in sequences]
    blocks = [-(-n // _BLOCK) for n in lengths]
    caches = allocate_kv_caches(
        spec.cache_groups, len(spec.cache_groups) * sum(blocks) + 1, _BLOCK, "cpu"
    )
    worst, tokens = 0.0, 0
    for counts in _schedule(lengths):
        ids, positions, attention, ends = _step_inputs(spec, sequences, blocks, counts)
        logits = step(ids, positions, attention, caches)
        for row, (sequence, end) in zip(logits, ends, strict=True):
            reference = expected[sequence][end - 1]
            error = float((row - reference).abs().max())
            if not error <= ATOL + RTOL * float(reference.abs().max()):
                raise ProofError(
                    f"{what}: the logits of token {end} of a sequence of {lengths[sequence]} are "
                    f"off by {error:.3g} in its twin, which has {spec.num_layers} layers; "
                    f"{_first_difference(twin, sequences[0])}"
                )
            worst, tokens = max(worst, error), tokens + 1
    return Agreement(worst, tokens, spec.num_layers)


def _placeholders(config: Any) -> set[int]:
    """The tokens that stand for images and other things than text, if there are any."""
    if config.get_text_config(decoder=True) is config:
        return set()
    ids = (value for name, value in vars(config).items() if _PLACEHOLDER.search(name))
    return {value for value in ids if isinstance(value, int)}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors of a twin are so small that threads cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _unmodified(twin: Twin, ids: Tensor) -> Tensor:
    """Logits of all tokens of a sequence, at the positions that ``generate`` gives them."""
    positions = position_arguments(twin.unmodified, torch.arange(len(ids)))
    out = twin.unmodified(input_ids=ids[None], use_cache=False, **positions)
    return out.logits[0]  # type: ignore[no-any-return]


def _schedule(lengths: Sequence[int]) -> Iterator[dict[int, tuple[int, int]]]:
    """Steps as {sequence: (start, stop)}: prompts of two thirds in chunks, later ones joining as
    earlier ones go on, then decodes."""
    done = [0] * len(lengths)
    prompts = [max(1, 2 * n // 3) for n in lengths]
    number = 0
    while done != list(lengths):
        number += 1
        step: dict[int, tuple[int, int]] = {}
        for sequence, length in enumerate(lengths):
            if sequence > number or done[sequence] == length:
                continue
            left = prompts[sequence] - done[sequence]
            count = min(_CHUNK - 2 * sequence, left) if left > 0 else 1
            step[sequence] = done[sequence], done[sequence] + count
            done[sequence] += count
        yield step


def _step_inputs(
    spec: ModelSpec,
    sequences: Sequence[Tensor],
    blocks: Sequence[int],
    counts: dict[int, tuple[int, int]],
) -> tuple[Tensor, Tensor, AttentionInputs, list[tuple[int, int]]]:
    """The inputs of a step; every sequence has blocks of its own in each group, in no order."""
    total = sum(blocks)
    offsets = [sum(blocks[:s]) for s in range(len(blocks))]
    ids = torch.cat([sequences[s][a:b] for s, (a, b) in counts.items()]).int()
    positions = torch.cat([torch.arange(a, b) for a, b in counts.values()]).int()
    groups = []
    for group in range(len(spec.cache_groups)):
        table = torch.zeros(len(counts), max(blocks), dtype=torch.int32)
        for row, s in enumerate(counts):
            own = torch.arange(blocks[s]).flip(0) + offsets[s] + group * total + 1
            table[row, : blocks[s]] = own.int()
        slots = torch.cat(
            [
                table[row, torch.arange(a, b) // _BLOCK] * _BLOCK + torch.arange(a, b) % _BLOCK
                for row, (a, b) in enumerate(counts.values())
            ]
        )
        groups.append(CacheInputs(slots.int(), table))
    lengths = torch.tensor([b for _, b in counts.values()], dtype=torch.int32)
    starts = [0]
    for a, b in counts.values():
        starts.append(starts[-1] + b - a)
    attention = AttentionInputs(tuple(groups), lengths, torch.tensor(starts, dtype=torch.int32))
    return ids, positions, attention, [(s, b) for s, (_, b) in counts.items()]


def _first_difference(twin: Twin, ids: Tensor) -> str:
    """Where a whole sequence in one step first differs, module by module."""
    if twin.ours.facts.whole:
        names = (type(module).__name__ for module in (twin.ours.library, twin.unmodified))
        return "its text decoder {} does not compute alone what {} does".format(*names)
    seen: list[dict[str, Tensor]] = []
    for model in (twin.unmodified, twin.ours.library):
        outputs: dict[str, Tensor] = {}
        hooks = [
            module.register_forward_hook(_keep(name, outputs))
            for name, module in model.named_modules()
            if name and "+" not in name
        ]
        try:
            if model is twin.unmodified:
                _unmodified(twin, ids)
            else:
                number = len(ids)
                blocks = [-(-number // _BLOCK)]
                caches = allocate_kv_caches(
                    twin.spec.cache_groups,
                    len(twin.spec.cache_groups) * blocks[0] + 1,
                    _BLOCK,
                    "cpu",
                )
                given = _step_inputs(twin.spec, [ids], blocks, {0: (0, number)})
                twin.ours(*given[:3], caches)
        finally:
            for hook in hooks:
                hook.remove()
        seen.append(outputs)
    theirs, ours = seen
    for name, expected in theirs.items():
        made = ours.get(name)
        if made is None or made.shape != expected.shape:
            continue
        error = float((made - expected).abs().max())
        if not error <= ATOL + RTOL * float(expected.abs().max()):
            kind = type(twin.unmodified.get_submodule(name)).__name__
            return f"the first module that differs is {name} ({kind}), by {error:.3g}"
    return "run in one step, no module differs: chunks, decodes or passes are wrong"


def _keep(name: str, outputs: dict[str, Tensor]) -> Any:
    def hook(module: nn.Module, args: Any, out: Any) -> None:
        value = out[0] if isinstance(out, tuple) and out else out
        if isinstance(value, Tensor) and name not in outputs:
            outputs[name] = value.detach().clone()

    return hook
