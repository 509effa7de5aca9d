"""Computes the oracles of the ops that choose, count and move tokens."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ._call import Array, Call, Expected, Floats

_MASK = 0xFFFFFFFF
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_CLOSE = 1e-5
"""Scores that differ by less may swap in float32."""


def largest(rows: Floats) -> Array:
    """The first of each row's largest; -1 where one is NaN, -2 where all are -inf."""
    found = []
    for row in np.minimum(rows, _FLOAT32_MAX).tolist():
        if any(value != value for value in row):
            found.append(-1)
        else:
            best = max(row)
            found.append(-2 if best == -np.inf else row.index(best))
    return np.array(found)


def argmax(call: Call) -> Expected:
    return {0: largest(call["logits"])}


def mix(h: Any) -> Any:
    """lowbias32 (C. Wellons, 2018), of an int or of uint64s."""
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
    return h ^ (h >> 16)


def gumbel(seed: int, position: int, vocab: int) -> Floats:
    """-log(-log(u)) of u = 1 - w, where w is the hash of (seed, position, index) as a fraction."""
    low, high, place = seed & _MASK, (seed >> 32) & _MASK, position & _MASK
    first = mix(mix(mix(low ^ 0x9E3779B9) ^ high) ^ place)
    second = mix(mix((mix(high ^ 0x85EBCA6B) + low) & _MASK) ^ (~place & _MASK))
    index = np.arange(vocab, dtype=np.uint64)
    hashes = mix((mix(index ^ np.uint64(first)) + np.uint64(second)) & _MASK)
    w: Floats = np.minimum((hashes + 0.5) / 2.0**32, 1 - 2.0**-24)
    noise: Floats = -np.log(-np.log1p(-w))
    return noise


def _filtered(
    row: Floats, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Array, bool]:
    """Return a mask of the tokens that the filters keep, and whether float32 must agree on it."""
    order = np.argsort(-row, kind="stable")
    weight = np.exp((row - row.max()) / temperature)
    kept = weight >= min_p if min_p > 0 else np.ones(len(row), bool)
    certain = min_p <= 0 or bool((np.abs(weight - min_p) > _CLOSE * min_p).all())
    if 0 < top_k < len(row):
        kept &= row >= row[order[top_k - 1]]
    if top_p < 1:
        mass = np.cumsum(np.where(kept, weight, 0)[order])
        target = top_p * mass[-1]
        last = min(int((mass < target).sum()), len(row) - 1)
        kept &= row >= row[order[last]]
        certain &= bool((np.abs(mass / mass[-1] - top_p) > _CLOSE).all())
    return kept, certain


def sample(call: Call) -> Expected:
    """Filter by sorted probabilities, then take the token with the largest logit plus noise."""
    tokens: list[float] = []
    filters = [call["top_k"], call["top_p"], call["min_p"]]
    for i, row in enumerate(call["logits"]):
        temperature = call["temperature"][i]
        greedy = temperature < 1e-5
        (token,) = largest(row[None]).tolist()
        if token < 0 or greedy:
            tokens.append(token)
            continue
        if row.max() == np.inf:
            tokens.append(-1)
            continue
        of_row = [off if f is None else f[i] for f, off in zip(filters, (0, 1, 0), strict=True)]
        kept, certain = _filtered(row, temperature, *of_row)
        noise = gumbel(int(call["seeds"][i]), int(call["positions"][i]), len(row))
        score = np.where(kept, row / temperature + noise, -np.inf)
        best = np.sort(score)[-2:]
        certain &= len(best) < 2 or bool(best[1] - best[0] > _CLOSE * max(abs(best[1]), 1.0))
        tokens.append(int(score.argmax()) if certain else np.nan)
    return {0: np.array(tokens, np.float64)}


def token_logprobs(call: Call) -> Expected:
    rows, ids, k = call["logits"], call["token_ids"], call["num_logprobs"]
    chosen, ranks, tops, top_ids = [], [], np.zeros((len(rows), k)), np.zeros((len(rows), k), int)
    for i, row in enumerate(rows):
        clean = np.where(np.isnan(row), -np.inf, np.minimum(row, _FLOAT32_MAX))
        best = max(clean.max(), -_FLOAT32_MAX)
        mass = np.exp(clean - best).sum()
        logprobs = np.full(len(row), -np.inf)
        if mass > 0:
            logprobs = clean - best - np.log(mass)
        order = np.argsort(-clean, kind="stable")
        chosen.append(logprobs[ids[i]])
        ranks.append(1 + order.tolist().index(ids[i]))
        top_ids[i], tops[i] = order[:k], logprobs[order[:k]]
    return {0: np.array(chosen), 1: np.array(ranks), 2: tops, 3: top_ids}


def apply_penalties(call: Call) -> Expected:
    logits = call["logits"].copy()
    for i, slot in enumerate(call["slots"].tolist()):
        if slot < 0:
            continue
        counts, row = call["output_counts"][slot], logits[i]
        seen = (counts > 0) | call["prompt_mask"][slot]
        penalty = call["repetition_penalty"][i]
        row[seen & (row > 0)] /= penalty
        row[seen & (call["logits"][i] <= 0)] *= penalty
        row -= call["frequency_penalty"][i] * counts + call["presence_penalty"][i] * (counts > 0)
    return {"logits": logits}


def count_tokens(call: Call) -> Expected:
    counts = call["output_counts"].copy()
    for token, slot in zip(call["token_ids"].tolist(), call["slots"].tolist(), strict=True):
        if token >= 0 and slot >= 0:
            counts[slot, token] += 1
    return {"output_counts": counts}


def keep_tokens(call: Call) -> Expected:
    last = call["last_tokens"].copy()
    for slot, token in zip(call["slots"].tolist(), call["token_ids"].tolist(), strict=True):
        last[slot] = max(token, 0)
    return {"last_tokens": last, "read": call["token_ids"]}


def write_inputs(call: Call) -> Expected:
    packed, at = call["packed"].tolist(), 0
    per_token, num_tokens = call["tokens"].shape
    num_seqs, num_tables, _ = call["tables"].shape

    def take(count: int) -> list[int]:
        nonlocal at
        at += count
        return packed[at - count : at]  # type: ignore[no-any-return]

    tokens = np.array([take(num_tokens) for _ in range(per_token)])
    for token, slot in enumerate(take(num_tokens)):
        if slot >= 0:
            tokens[0, token] = call["last_tokens"][slot]
    rows = np.array([take(num_seqs + 1) for _ in call["rows"]])
    tables = call["tables"].copy()
    columns = (len(packed) - at) // (num_seqs * num_tables)
    for sequence in range(num_seqs):
        for table in range(num_tables):
            tables[sequence, table, :columns] = take(columns)
    return {"tokens": tokens, "rows": rows, "tables": tables}


def embedding(call: Call) -> Expected:
    weight, ids = call["weight"], call["ids"].tolist()
    if call["first_id"] is not None:
        table = dict(enumerate(weight, start=int(call["first_id"][0])))
        rows = [table.get(i, np.zeros_like(weight[0])) for i in ids]
    else:
        rows = [weight[min(max(i, 0), len(weight) - 1)] for i in ids]
    return {0: np.array(rows).reshape(len(rows), weight.shape[1])}


def gather_last_token(call: Call) -> Expected:
    """Take each sequence's last row.  The row of a sequence without tokens is undefined (NaN)."""
    hidden, starts = call["hidden"], call["query_start_loc"].tolist()
    nothing = np.full(hidden.shape[1], np.nan)
    pairs = itertools.pairwise(starts)
    return {0: np.array([hidden[end - 1] if end > start else nothing for start, end in pairs])}
