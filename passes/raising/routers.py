"""Reads how the experts of each token are chosen and weighed, in the spellings that routers have.

Scores are the softmax or the logistic function of logits, of all or of the chosen ones alone.  The
best are chosen by logits, by scores, or by scores with a bias, among all or among those of the best
groups; their weights may be divided by their sum, and scaled.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...config.routing import Routing
from ..canonicalize import argument, cast_source, is_same, kind, tensor, widened, with_number
from ..rule import is_call
from ..sites import Miss

_ATEN = torch.ops.aten
_NOT = (_ATEN.bitwise_not.default, _ATEN.logical_not.default)
_LEAST_SUM = 1e-9
"""Up to this, what is added to a sum of weights, or bounds it, only keeps 0 from dividing."""
_BELOW_ALL = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Router:
    """One router: its ``logits`` [num_tokens, num_experts], the bias that is added to scores for
    the choice, how it chooses, and the node of the chosen ids, which are int64."""

    logits: fx.Node
    bias: fx.Node | None
    how: Routing
    ids: fx.Node


@dataclass(frozen=True)
class _Scores:
    """``scoring`` of ``logits``; "" stands for the logits themselves."""

    scoring: str
    logits: fx.Node


@dataclass(frozen=True)
class _Choice:
    """What the best are taken of: scores with a bias or without, in some of ``groups``."""

    scores: _Scores
    bias: fx.Node | None = None
    groups: tuple[int, int] = (1, 1)


def read_router(weights: fx.Node) -> Router:
    """Read the router that makes these weights; raises ``Miss`` if ``route`` chooses otherwise."""
    node, renormalized, scaling = _chosen_scores(weights)
    best, scores = _weighed(node)
    choice = _choice(best.args[0])
    if scores is None:
        scores = choice.scores
        if choice.bias is not None:
            raise Miss(f"the weights are taken of {best.args[0]}, which has a bias")
    elif scores.scoring == "softmax of chosen":
        renormalized = True
    scoring = scores.scoring.removesuffix(" of chosen")
    if not scoring:
        raise Miss("the weights are logits, not scores")
    if not is_same(scores.logits, choice.scores.logits):
        raise Miss(f"{choice.scores.logits} is chosen by, {scores.logits} makes the weights")
    if choice.bias is not None and choice.scores.scoring != scoring:
        what = choice.scores.scoring or "logits"
        raise Miss(f"the bias is added to {what}, the op's to the {scoring} that makes the weights")
    logits: fx.Node = widened(scores.logits)
    value = tensor(logits)
    if value.dim() != 2 or not isinstance(value.shape[1], int):
        raise Miss(f"the logits are {[*value.shape]}, expected [num_tokens, num_experts]")
    top_k: Any = best.args[1]
    how = Routing(top_k, scoring, renormalized, *choice.groups, scaling)
    if reason := how.why_not(value.shape[1]):
        raise Miss(reason)
    ids = next((user for user in best.users if _is_item(user, 1)), None)
    if ids is None:
        raise Miss(f"nothing reads the ids of {best}")
    return Router(logits, choice.bias, how, ids)


def _chosen_scores(weights: fx.Node) -> tuple[fx.Node, bool, float]:
    """(the chosen scores, whether they are divided by their sum, what they are multiplied by)."""
    node: Any = weights
    renormalized, scaling = False, 1.0
    while True:
        number = with_number(node)[1] if kind(node) in ("mul", "div") else None
        if kind(node) == "cast" and cast_source(node) is not node:
            node = cast_source(node)
        elif number is not None and not renormalized:
            scaling *= number if kind(node) == "mul" else 1 / number
            node = with_number(node)[0]
        elif kind(node) == "div" and number is None and not renormalized:
            _check_sum(node.args[1], node.args[0])
            node, renormalized = node.args[0], True
        else:
            return node, renormalized, scaling


def _check_sum(divisor: Any, summed: Any) -> None:
    total: Any = cast_source(divisor)
    if kind(total) in ("add", "clamp"):
        least = with_number(total)[1] if kind(total) == "add" else argument(total, 1, "min")
        bounded = kind(total) == "clamp" and argument(total, 2, "max") is not None
        if bounded or not isinstance(least, (int, float)) or not 0 <= least <= _LEAST_SUM:
            raise Miss(f"{total} bounds the sum of the weights by {least}")
        total = cast_source(argument(total, 0, "input"))
    if kind(total) != "sum" or cast_source(total.args[0]) is not cast_source(summed):
        raise Miss(f"the weights are divided by {total}, not by their sum")
    if argument(total, 1, "dim") not in ([-1], [1]) or argument(total, 2, "keepdim") is not True:
        raise Miss(f"{total} is not the sum of each token's weights")


def _weighed(node: fx.Node) -> tuple[fx.Node, _Scores | None]:
    """(the ``topk`` that chooses, the scores that are taken); None: what is chosen by."""
    if _is_item(node, 0):
        return _topk(node.args[0]), None
    scoring, source = _scoring(node)
    if scoring:  # of the chosen logits alone
        if _is_item(source, 0):
            best = _topk(source.args[0])
            return best, _Scores(f"{scoring} of chosen", best.args[0])  # type: ignore[arg-type]
        logits, best = _gathered(source)
        return best, _Scores(f"{scoring} of chosen", logits)
    scores, best = _gathered(node)
    return best, _Scores(*_scoring(scores))


def _gathered(node: Any) -> tuple[fx.Node, fx.Node]:
    if not is_call(node, _ATEN.gather.default) or node.args[1] not in (-1, 1):
        raise Miss(f"{node} makes the weights, not the scores of chosen experts")
    scores, _, ids = node.args
    if not _is_item(ids, 1):
        raise Miss(f"the ids come from {ids}, not from the best scores")
    return scores, _topk(ids.args[0])  # type: ignore[return-value, union-attr]


def _scoring(node: Any) -> tuple[str, fx.Node]:
    """("softmax" or "sigmoid", what it is of), or ("", the node itself)."""
    if is_call(node, _ATEN._softmax.default) and node.args[1] in (-1, tensor(node).dim() - 1):
        return "softmax", widened(node.args[0])
    if kind(node) == "sigmoid":
        return "sigmoid", widened(node.args[0])
    return "", node


def _is_item(node: Any, index: int) -> bool:
    return is_call(node, operator.getitem) and bool(node.args[1] == index)


def _topk(node: Any, count: int | None = None) -> fx.Node:
    """The call that takes the best of the last dimension; raises ``Miss`` for any other."""
    if not is_call(node, _ATEN.topk.default) or node.kwargs:
        raise Miss(f"{node} chooses, not the largest ones")
    source, best = node.args[:2]
    last = argument(node, 2, "dim", -1) in (-1, tensor(source).dim() - 1)
    if not last or argument(node, 3, "largest", True) is not True:
        raise Miss(f"{node} does not take the largest of each token's")
    if count not in (None, best):
        raise Miss(f"{node} takes {best} of a group, expected {count}")
    return node


def _choice(choice: Any) -> _Choice:
    if tensor(choice).dtype != torch.float32 and _scoring(choice)[0]:
        raise Miss(f"experts are chosen by scores in {tensor(choice).dtype}, which tie by rounding")
    if not is_call(choice, _ATEN.masked_fill.Scalar):
        return _biased(choice)
    scores, mask, fill = choice.args
    found = _biased(scores)
    least = 0.0 if found.scores.scoring and found.bias is None else _BELOW_ALL
    if fill > least:  # type: ignore[operator]
        raise Miss(f"experts outside of the best groups count {fill}, others may count less")
    groups = _groups(mask, scores, biased=found.bias is not None)
    return _Choice(found.scores, found.bias, groups)


def _biased(choice: Any) -> _Choice:
    if kind(choice) != "add" or with_number(choice)[1] is not None:
        return _Choice(_Scores(*_scoring(choice)))
    pair = [argument(choice, 0, "input"), argument(choice, 1, "other")]
    scores, bias = pair if tensor(pair[1]).dim() == 1 else reversed(pair)
    floats = tensor(bias).dtype.is_floating_point and tensor(choice).dtype == torch.float32
    if tensor(bias).dim() != 1 or argument(choice, 2, "alpha", 1) != 1 or not floats:
        return _Choice(_Scores(*_scoring(choice)))
    return _Choice(_Scores(*_scoring(scores)), bias)


def _groups(mask: Any, choice: Any, *, biased: bool) -> tuple[int, int]:
    """(number of groups, how many of them are chosen from) of a mask of all other experts."""
    if not is_call(mask, *_NOT):
        raise Miss(f"{mask} masks experts, not those outside of the best groups")
    node = mask.args[0]
    while kind(node) in ("cast", "view", "clone"):
        node = node.args[0]  # type: ignore[union-attr]
    spread = tensor(node).shape
    if kind(node) != "expand" or tensor(node).dim() != 3:
        raise Miss(f"{node} masks experts, expected a mask of groups")
    added: Any = node.args[0]  # type: ignore[union-attr]
    if kind(added) != "unsqueeze" or argument(added, 1, "dim") not in (-1, 2):
        raise Miss(f"{added} does not spread a mask of groups over their experts")
    kept = argument(added, 0, "input")
    if not is_call(kept, _ATEN.scatter.value) or kept.args[1] not in (-1, 1) or kept.args[3] != 1:
        raise Miss(f"{kept} does not mark the best groups")
    zeros, _, ids, _ = kept.args
    if not is_call(zeros, _ATEN.zeros_like.default) or not _is_item(ids, 1):
        raise Miss(f"{kept} does not mark the best groups in zeros")
    best = _topk(ids.args[0])  # type: ignore[union-attr]
    _check_worth(best.args[0], choice, tuple(spread[1:]), biased=biased)
    return int(spread[1]), int(best.args[1])  # type: ignore[arg-type]


def _check_worth(worth: Any, choice: Any, sizes: tuple[Any, ...], *, biased: bool) -> None:
    """Check that a group counts as ``route`` has it: by its two best with a bias, else by its
    best."""
    if kind(worth) == "sum" and argument(worth, 1, "dim") in ([-1], [2]):
        two: Any = worth.args[0]
        source = _topk(two.args[0], 2).args[0] if _is_item(two, 0) else None
        count = 2
    elif _is_item(worth, 0) and is_call(worth.args[0], _ATEN.max.dim):
        source, dim = worth.args[0].args[:2]
        count = 1 if dim in (-1, 2) else 0
    elif is_call(worth, _ATEN.amax.default) and argument(worth, 1, "dim") in ([-1], [2]):
        source, count = worth.args[0], 1
    else:
        source, count = None, 0
    if count != (2 if biased else 1):
        expected = "the sum of its two best, as there is a bias" if biased else "its best"
        raise Miss(f"{worth} is what a group counts, expected {expected}")
    if kind(source) != "view" or source.args[0] is not choice:  # type: ignore[union-attr]
        raise Miss(f"groups are not of {choice}")
    if tuple(tensor(source).shape[1:]) != sizes:
        raise Miss(f"groups of {[*tensor(source).shape[1:]]} are masked as {[*sizes]}")
