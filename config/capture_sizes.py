"""Chooses the numbers of tokens that are captured unless an option names them."""

from __future__ import annotations

from .resolved import ModelLimits

_MOST_BY_ROWS, _MOST_CAPTURED, _LARGE_STEP = 512, 4096, 128
_LAUNCH_FLOPS, _LAUNCH_FLOPS_FP8 = 3e11, 5e11
"""The FLOPs for which a GPU takes as long as the host takes to launch one layer's kernels without a
graph: ten launches of 50 us, at an H200's 600 TFLOP/s, or 1,000 in FP8
(docs/decisions/graphs-are-captured-when-needed.md)."""


def capture_sizes(max_num_rows: int, most_tokens: int = 0) -> tuple[int, ...]:
    """1, 2, 4, 8..248 by 8, then 256.. by 16, up to min(2 x max_num_rows, 512), ascending;
    always with ``max_num_rows`` itself when it is within that limit.  Where it is 512, there are
    more by 128, up to ``most_tokens`` or 4096."""
    limit = min(2 * max_num_rows, _MOST_BY_ROWS)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16)}
    kept = sorted(s for s in {*sizes, max_num_rows} if s <= limit)
    most = min(most_tokens, _MOST_CAPTURED) if limit == _MOST_BY_ROWS else 0
    return (*kept, *range(_MOST_BY_ROWS + _LARGE_STEP, most + 1, _LARGE_STEP))


def most_rows(
    max_num_seqs: int, num_drafts: int, max_num_tokens: int, sizes: tuple[int, ...]
) -> int:
    """Rows of a step: a decode's token and each of its drafts are one.  Beyond one a sequence there
    are as many as have graphs.

    Args:
        num_drafts: most drafts of a sequence.
        max_num_tokens: most tokens of a step.
        sizes: captured numbers of rows; empty: as of ``capture_sizes``.
    """
    wanted = max_num_seqs * (1 + num_drafts)
    return max(max_num_seqs, min(wanted, max(sizes, default=_MOST_BY_ROWS), max_num_tokens))


def launch_bound_tokens(limits: ModelLimits, weights: str) -> int:
    """Number of tokens up to which a step without a graph waits for its launches: then the host
    takes longer to launch a layer than the GPU to multiply.  0: not known.

    Args:
        weights: as of ``Precision``.
    """
    if not limits.layer_params:
        return 0
    flops = _LAUNCH_FLOPS_FP8 if weights.startswith("fp8") else _LAUNCH_FLOPS
    return int(flops / (2 * limits.layer_params))
