"""``lm_head_argmax``: the last step of greedy decoding, without the logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ._launch import Launch
from ._op import Case, Cost, Implementation, OpDesc, SemanticOp
from ._skinny import refuses_bf16, rows_to_stream
from .argmax import OP as ARGMAX
from .launches import sampling


def lm_head_argmax(x: Tensor, weight: Tensor) -> Tensor:
    """``argmax(linear(x, weight))``: the most likely token of each row.

    Args:
        x: [num_seqs, hidden], floating point.
        weight: [vocab, hidden], same dtype.

    Returns:
        [num_seqs] int32: of the logits rounded to x's dtype the largest; the lowest index wins
        ties.  -1 for a row with a NaN among them, -2 for one of only -inf, as in ``argmax``.

    Raises:
        ValueError: x and weight disagree on hidden (native: PyTorch's RuntimeError).
    """
    return torch.ops.fw.lm_head_argmax.default(x, weight)  # type: ignore[no-any-return]


def _reference(x: Tensor, weight: Tensor) -> Tensor:
    token_ids: Tensor = ARGMAX.reference(F.linear(x, weight))
    return token_ids


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"lm_head_argmax: x is {list(x.shape)} and weight {list(weight.shape)}, expected "
            f"[num_seqs, {weight.shape[1]}]"
        )
    return x.new_empty(x.shape[0], dtype=torch.int32)


def _in_turn(x: Tensor, weight: Tensor) -> Tensor:
    """``F.linear``, then the argmax kernel."""
    launches, token_ids = sampling.argmax(F.linear(x, weight))
    for launch in launches:
        launch.run()
    return token_ids


def _skinny(x: Tensor, weight: Tensor) -> Tensor:
    """The streaming kernel for few rows, else one after the other."""
    rows = rows_to_stream(x, weight)
    if rows is None:
        return _in_turn(x, weight)
    return torch.ops.fw_cuda.skinny_argmax.default(rows, weight)  # type: ignore[no-any-return]


def _launches(x: Tensor, weight: Tensor) -> tuple[list[Launch], Tensor]:
    """What must be compiled: the argmax's launches."""
    return sampling.argmax(x.new_empty((x.shape[0], weight.shape[0])))


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    """Of small integers: their sums are exact in any order and in every dtype, and often equal."""

    def call(label: str, rows: int, vocab: int, hidden: int) -> Case:
        def draw(*shape: int) -> Tensor:
            return torch.randint(-1, 2, shape, generator=gen, device=device).to(dtype)

        return Case(label, (draw(rows, hidden), draw(vocab, hidden)))

    yield call("one row", 1, 100, 64)
    yield call("odd", 7, 1001, 77)
    yield call("one token", 3, 1, 8)

    def broken(label: str, vocab: int, hidden: int) -> Iterator[Case]:
        x, weight = call("", 4, vocab, hidden).args
        x[:, 0], weight[vocab - 10, 0] = torch.tensor([1, -1, 0, 1]), torch.inf  # 0 * inf is NaN
        yield Case(f"inf{label}", (x, weight))
        x, weight = call("", 4, vocab, hidden).args
        x[:, 0], weight[:, 0] = torch.tensor([1, -1, 1, 1]), -torch.inf
        yield Case(f"all -inf, all inf{label}", (x, weight))
        x, weight = call("", 4, vocab, hidden).args
        x[2, hidden - 1] = torch.nan
        yield Case(f"nan in a row{label}", (x, weight))
        x, weight = call("", 4, vocab, hidden).args
        weight[vocab - 10, 0] = torch.nan
        yield Case(f"nan in the weight{label}", (x, weight))

    yield from broken("", 300, 128)
    if device.type == "cuda":  # large enough for the streaming kernel
        for rows, vocab, hidden in [(1, 4099, 1088), (2, 32003, 192), (8, 8192, 1024)]:
            yield call(f"{rows} rows, {vocab}", rows, vocab, hidden)
        for rows, vocab, hidden in [(13, 50257, 192), (32, 8200, 1024), (33, 8192, 1024)]:
            yield call(f"{rows} rows, {vocab}", rows, vocab, hidden)
        yield from broken(", 16 MiB", 16000, 512)


def _cost(desc: OpDesc) -> Cost:
    x, weight = desc["x"], desc["weight"]
    rows, (vocab, hidden) = x.shape[0], weight.shape
    return Cost(bytes=x.nbytes + weight.nbytes + 4 * rows, flops=2 * rows * vocab * hidden)


OP = SemanticOp(
    name="lm_head_argmax",
    reference=_reference,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        Implementation("skinny", _skinny, refuses_bf16, devices=("cuda",), launches=_launches),
        Implementation("triton", _in_turn, devices=("cuda",), launches=_launches),
        Implementation("native", _reference, inline=True),
    ),
)
