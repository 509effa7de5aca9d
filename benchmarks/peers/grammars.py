"""Measures llguidance, which structured output uses, beside xgrammar: the time to compile a schema,
the time of each token's mask, and whether right documents pass and wrong ones do not.

``python -m fusewright.benchmarks.peers.grammars TOKENIZER_FOLDER…`` in an environment that has both
packages and transformers prints a table of each tokenizer, and every schema as a JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...engine.frontend.grammar import json_grammar

Case = tuple[str, dict[str, Any], Any, Any]
"""Name, schema, a document that it permits and one that it does not."""
_COMPILES = 5


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    closed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed, **more}


def _nested(depth: int) -> tuple[dict[str, Any], Any, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    right: Any = 7
    wrong: Any = "seven"
    for _ in range(depth):
        schema, right, wrong = _object({"inner": schema}), {"inner": right}, {"inner": wrong}
    return schema, right, wrong


def cases() -> Iterator[Case]:
    """Schemas from one value to hundreds of fields, with what function calls and extraction use."""
    text, number = {"type": "string"}, {"type": "integer"}
    person = _object({"name": text, "age": number})
    yield "integer", number, -12, 1.5
    yield "string", text, "a few words, and ünïcode", 3
    yield "flat object, 2 fields", person, {"name": "Ada", "age": 36}, {"name": "Ada"}
    for count in (10, 50, 200):
        fields = {f"field_{n}": text if n % 2 else number for n in range(count)}
        right = {name: "some text" if n % 2 else n for n, name in enumerate(fields)}
        yield f"flat object, {count} fields", _object(fields), right, {**right, "field_0": "x"}
    for depth in (5, 20):
        yield f"nested {depth} deep", *_nested(depth)
    many = [{"name": f"Person {n}", "age": n} for n in range(30)]
    yield "array of objects", {"type": "array", "items": person}, many, [*many, {"name": "x"}]
    few = {"type": "array", "items": number, "minItems": 2, "maxItems": 8}
    yield "array of 2 to 8", few, list(range(8)), list(range(9))
    for count in (10, 1000):
        words = [f"category {n * 7919 % 10007}" for n in range(count)]
        yield (
            f"enum of {count}",
            _object({"kind": {"enum": words}}),
            {"kind": words[-1]},
            {"kind": ""},
        )
    range_of = {"type": "integer", "minimum": -5, "maximum": 12345}
    yield "integer of a range", _object({"n": range_of}), {"n": 12345}, {"n": 12346}
    date = {"type": "string", "format": "date-time"}
    yield "date-time", _object({"at": date}), {"at": "2026-11-23T19:05:00Z"}, {"at": "yesterday"}
    phone = {"type": "string", "pattern": "^\\+[0-9]{2} [0-9]{3,12}$"}
    yield "pattern", _object({"phone": phone}), {"phone": "+49 30123456"}, {"phone": "49"}
    short = {"type": "string", "minLength": 1, "maxLength": 500}
    yield "string of 1 to 500", _object({"s": short}), {"s": "ab " * 60}, {"s": ""}
    node = _object(
        {"value": number, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}
    )
    chain: Any = None
    for n in range(15):
        chain = {"value": n, "next": chain}
    yield (
        "recursive",
        {"$ref": "#/$defs/node", "$defs": {"node": node}},
        chain,
        {"value": 1, "next": 2},
    )
    tools = [
        _object(
            {"tool": {"const": f"tool_{n}"}, "arguments": _object({f"a{n}": text, "b": number})}
        )
        for n in range(16)
    ]
    call = {"tool": "tool_15", "arguments": {"a15": "x", "b": 1}}
    yield "one of 16 tools", {"anyOf": tools}, call, {**call, "tool": "tool_14"}
    optional = {**_object({f"f{n}": number for n in range(20)}), "required": ["f3"]}
    yield "optional fields", optional, {"f3": 1, "f9": 2, "f19": 3}, {"f9": 2}
    free = {"type": "object", "additionalProperties": number}
    yield "free keys", free, {f"key {n}": n for n in range(20)}, {"key": "x"}
    both = {"allOf": [_object({"a": number}, additionalProperties=True), {"required": ["b"]}]}
    yield "allOf", both, {"a": 1, "b": 2}, {"a": 1}


class LLGuidance:
    """llguidance, called as the engine calls it."""

    def __init__(self, folder: str, vocab_size: int) -> None:
        from llguidance import LLTokenizer

        self._tokenizer = LLTokenizer(f"{folder}/tokenizer.json", vocab_size)
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)

    def compile(self, schema: dict[str, Any]) -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(self._tokenizer, json_grammar(schema), log_level=0)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error().splitlines()[0])

    def fill(self) -> np.ndarray[Any, Any]:
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        return self._mask

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.consume_token(token_id))

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())


class XGrammar:
    """xgrammar with one thread and no cache, so that every schema counts as new."""

    def __init__(self, folder: str, vocab_size: int) -> None:
        import xgrammar
        from transformers import PreTrainedTokenizerFast

        self._stop = vocab_size - 1
        fast = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
        info = xgrammar.TokenizerInfo.from_huggingface(
            fast, vocab_size=vocab_size, stop_token_ids=[vocab_size - 1]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._new = xgrammar.GrammarMatcher
        self._mask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def compile(self, schema: dict[str, Any]) -> None:
        self._matcher = self._new(self._compiler.compile_json_schema(json.dumps(schema)))

    def fill(self) -> np.ndarray[Any, Any]:
        self._matcher.fill_next_token_bitmask(self._mask)
        return self._mask[0].numpy()  # type: ignore[no-any-return]

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def may_end(self) -> bool:
        return bool(self._matcher.is_completed() or self._matcher.accept_token(self._stop))


def _us(run: Callable[[], Any]) -> float:
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1e3


def permits(engine: Any, token_ids: list[int], times: list[float] | None = None) -> bool:
    """Whether the masks let the tokens through, one after another, and the end behind them."""
    for token_id in token_ids:
        start = time.perf_counter_ns()
        mask = engine.fill()
        if times is not None:
            times.append((time.perf_counter_ns() - start) / 1e3)
        if not int(mask[token_id // 32]) >> (token_id % 32) & 1 or not engine.accept(token_id):
            return False
    return bool(engine.may_end())


def measure(engine: Any, case: Case, encode: Callable[[Any], list[int]]) -> dict[str, Any]:
    """Compile and mask times of a schema in microseconds, and whether its documents are told
    apart."""
    name, schema, right, wrong = case
    found: dict[str, Any] = {"schema": name, "characters": len(json.dumps(schema))}
    try:
        found["compile_us"] = statistics.median(
            _us(lambda: engine.compile(schema)) for _ in range(_COMPILES)
        )
    except Exception as error:  # each package has errors of its own
        return {**found, "refused": str(error)[:200]}
    masks: list[float] = []
    found["passes"] = permits(engine, encode(right), masks)
    engine.compile(schema)
    found["holds"] = not permits(engine, encode(wrong))
    points = np.percentile(masks, (50, 99)) if masks else (0.0, 0.0)
    found |= {"tokens": len(masks), "mask_p50_us": points[0], "mask_p99_us": points[1]}
    return {**found, "mask_max_us": max(masks, default=0.0), "mask_all_us": sum(masks)}


def main(folders: list[str]) -> None:
    from tokenizers import Tokenizer

    for folder in folders:
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        vocab_size = (tokenizer.get_vocab_size() // 32 + 1) * 32

        def encode(document: Any, tokenizer: Any = tokenizer) -> list[int]:
            text = json.dumps(document, ensure_ascii=False)
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        heading = [
            "schema",
            "tokens",
            *(
                f"{package} {what}"
                for package in ("llguidance", "xgrammar")
                for what in ("compile", "p50", "p99", "max", "documents")
            ),
        ]
        rows = [heading]
        engines = (LLGuidance(folder, vocab_size), XGrammar(folder, vocab_size))
        for case in cases():
            row, cells = [case[0], str(len(encode(case[2])))], []
            for engine in engines:
                found = measure(engine, case, encode)
                print(json.dumps({"engine": type(engine).__name__, "folder": folder, **found}))
                cells += _cells(found)
            rows.append([*row, *cells])
        print(f"{folder}, {vocab_size} tokens; microseconds", file=sys.stderr)
        for line in rows:
            print(" | ".join(line), file=sys.stderr)


def _cells(found: dict[str, Any]) -> list[str]:
    if "refused" in found:
        return ["refused", "", "", "", ""]
    names = ("compile_us", "mask_p50_us", "mask_p99_us", "mask_max_us")
    verdict = "right" if found["passes"] and found["holds"] else ""
    verdict = verdict or ("passes wrong" if found["passes"] else "refuses right")
    return [*(f"{found[name]:.0f}" for name in names), verdict]


if __name__ == "__main__":
    main(sys.argv[1:])
