"""Computes the oracles of the ops that accept, place and make drafts, row by row."""

from __future__ import annotations

from itertools import takewhile

import numpy as np

from ...config.step_fields import (
    MOST_LOOKS,
    NO_DRAFT,
    NO_SAMPLE,
    NO_SLOT,
    NOT_DRAFTED,
    ON_DEVICE,
    REJECTED,
)
from ._call import Array, Call, Expected
from .tokens import mix


def _chance(seed: int, position: int) -> float:
    return int(mix(mix(seed ^ 0x9E3779B9) ^ position) >> 8) / 2.0**24


def accept_tokens(call: Call) -> Expected:
    last, lengths = call["last_tokens"].copy(), call["lengths"].copy()
    history, chances = call["history"].copy(), call["chances"]
    result: list[int] = []
    sampled, inputs = call["token_ids"].tolist(), call["input_ids"].tolist()
    rows = zip(call["slots"].tolist(), call["order"].tolist(), strict=True)
    is_kept = False
    for row, (slot, number) in enumerate(rows):
        position = int(call["seq_lens"][row])
        if number == NO_SAMPLE:
            result.append(sampled[row])
            continue
        if number == NO_DRAFT:
            is_kept = False
            result.append(NOT_DRAFTED)
            continue
        if number == 0:
            is_kept = True
        elif chances is not None and call["judged"][slot] >= 0:
            seed = int(call["judged"][slot])
            is_kept &= _chance(seed, position - 1) < float(chances[number - 1])
        else:
            is_kept &= inputs[row] == sampled[row - 1]
        result.append(sampled[row] if is_kept else REJECTED)
        if is_kept:
            last[slot], lengths[slot] = max(sampled[row], 0), position + 1
            if position < history.shape[1]:
                history[slot, position] = max(sampled[row], 0)
    kept = np.array(result)
    return {
        "last_tokens": last,
        "lengths": lengths,
        "history": history,
        "kept": kept,
        "read": kept,
    }


def place_rows(call: Call) -> Expected:
    size, tables, drafts = call["block_size"], call["tables"], call["drafts"]
    names = ("order", "input_ids", "positions", "seq_lens", "mappings")
    order, ids, positions, lens, mappings = (call[name].copy() for name in names)
    for row, slot in enumerate(call["slots"].tolist()):
        number = int(order[row]) - ON_DEVICE
        if number < 0:
            continue
        place = int(call["lengths"][slot]) - 1 + number
        order[row], positions[row], lens[row] = number, place, place + 1
        for group, mapping in enumerate(mappings[:, row].tolist()):
            if mapping != NO_SLOT:
                block = tables[row, group, place // size]
                mappings[group, row] = block * size + place % size
        if number > 0:
            draft = int(drafts[number - 1, slot])
            ids[row] = max(draft, 0)
            order[row] = NO_DRAFT if draft < 0 else number
    return dict(zip(names, (order, ids, positions, lens, mappings), strict=True))


def _own_place(known: list[int], shortest: int, longest: int) -> tuple[int, int]:
    """(tokens that are the same, place) of a sequence's own place; (0, 0) if there is none."""
    looks: list[tuple[int, int]] = []
    for at in range(len(known) - 1, shortest - 1, -1):
        pairs = zip(known[:at][::-1][:longest], known[::-1], strict=False)
        count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if count >= shortest and len(looks) < MOST_LOOKS:
            looks.append((count, at))
    return max(looks, default=(0, 0))


def propose_ngrams(call: Call) -> Expected:
    drafts: Array = call["drafts"].copy()
    has_drafts: list[int] = []
    for slot, order in zip(call["slots"].tolist(), call["order"].tolist(), strict=True):
        has_drafts.append(0)
        if order != 0:
            continue
        known = call["history"][slot].tolist()[: int(call["lengths"][slot])]
        count, at = _own_place(known, call["shortest"], call["longest"])
        drafts[:, slot] = -1
        if count:
            tail = known[at:]
            while len(tail) < len(drafts):
                tail += tail[: len(drafts) - len(tail)]
            drafts[:, slot], has_drafts[-1] = tail[: len(drafts)], 1
    return {"drafts": drafts, "has_drafts": np.array(has_drafts)}


def propose_suffix(call: Call) -> Expected:
    """From the ring's oldest place to its newest, each output by itself."""
    own = propose_ngrams(call)
    drafts, has_drafts = own["drafts"], own["has_drafts"]
    head = int(call["head"][0])
    tokens = [*call["ring"][head:].tolist(), *call["ring"][:head].tolist()]
    owners = [*call["owners"][head:].tolist(), *call["owners"][:head].tolist()]
    shortest, longest = call["shortest"], call["longest"]
    for row, (slot, order) in enumerate(
        zip(call["slots"].tolist(), call["order"].tolist(), strict=True)
    ):
        if order != 0:
            continue
        known = call["history"][slot].tolist()[: int(call["lengths"][slot])]
        best = _own_place(known, shortest, longest)[0], -1
        for at in range(1, len(tokens)):
            if tokens[at] < 0 or owners[at] != call["salts"][slot]:
                continue
            pairs = zip(tokens[:at][::-1][:longest], known[::-1], strict=False)
            count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if count >= shortest and count >= best[0] + (best[1] < 0):
                best = count, at
        if best[1] >= 0:
            rest = [*takewhile(lambda token: token >= 0, tokens[best[1] :])][: len(drafts)]
            drafts[:, slot], has_drafts[row] = -1, 1
            drafts[: len(rest), slot] = rest
    return {"found": np.zeros_like(call["found"]), "drafts": drafts, "has_drafts": has_drafts}
