"""A storm: requests of all kinds at once, many of which are cancelled, cut off, read slowly or
malformed, over a KV cache that is too small for them.  Every answer is the one that a server
without drafts gives to the same request alone, and nothing is lost.

``--fw-storm 20000 -s`` runs the full size and prints the memory of both processes at each quarter.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from .server_process import JSON, TIMEOUT_S, ServerProcess, is_idle, wait_for
from .test_tool_calls import CHAT

PROMPTS = [f"{a}{op}{b}=" for a in range(3, 60, 4) for b in range(2, 40, 7) for op in "+-"]
TEXTS = ["a b a b a b a", "12+12=24\n12+12=", "sort 5 3 9 1="]
BAD = [b"{", b"[]", b'{"prompt": ""}', b'{"prompt": "1", "n": -1}', b'{"prompt": "\xff"}']
CLIENTS = 48
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
REGEX = '[{]"sum": [0-9]{1,3}, "digits": (one|two|three)[}]'
NAME, AGES = {"enum": ["xa", "xb"]}, {"type": "array", "items": {"type": "integer"}, "maxItems": 3}
SCHEMA = {
    "type": "object",
    "properties": {"first name": NAME, "ages": AGES},
    "required": ["first name", "ages"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
ON = {"ignore_eos": True, "max_tokens": 40, "temperature": 0.0}
WRITTEN: dict[str, dict[str, Any]] = {
    "on and on": ON,
    "sampled": ON | {"temperature": 1.0, "seed": 3, "logprobs": 2},
    "several": ON | {"temperature": 0.9, "seed": 4, "n": 3, "top_p": 0.9, "top_k": 20},
    "stops": ON | {"stop": ["9", "b a", "1 "], "logprobs": 0},
    "stops late": ON | {"temperature": 2.0, "seed": 5, "stop": ["7"], "min_tokens": 12},
    "penalties": ON | {"repetition_penalty": 1.2, "frequency_penalty": 0.4},
    "bad words": ON | {"bad_words": ["58", "a b"], "logit_bias": {"49": 3.0}},
    "regex": {"structured_outputs": {"regex": REGEX}, "max_tokens": 60, "seed": 6},
    "schema": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60, "seed": 7, "n": 2},
}
SAID: dict[str, dict[str, Any]] = {
    "logprobs": ON | {"temperature": 1.0, "seed": 8, "logprobs": True, "top_logprobs": 2},
    "format": {"response_format": FORMAT, "seed": 9, "max_tokens": 60},
    "a call": {"tools": CHAT["tools"], "tool_choice": "required", "seed": 2, "max_tokens": 90},
}


@dataclass
class Choice:
    """One output's facts, whole or put together from the chunks of a stream."""

    text: str = ""
    calls: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    end: tuple[Any, Any] = (None, None)
    tokens: list[tuple[str, float]] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        self.text += message.get("content") or ""
        for place, call in enumerate(message.get("tool_calls") or ()):
            written = call["function"]
            said = (written.get("name") or "") + (written.get("arguments") or "")
            self.calls[call.get("index", place)] += said
        if choice["finish_reason"]:
            self.end = choice["finish_reason"], choice.get("stop_reason")
        told = choice.get("logprobs") or {}
        self.tokens += [(each["token"], each["logprob"]) for each in told.get("content") or ()]
        self.tokens += zip(told.get("tokens", ()), told.get("token_logprobs", ()), strict=True)

    def facts(self) -> Any:
        return self.text, dict(self.calls), self.end, [token for token, _ in self.tokens]

    def equals(self, other: Choice) -> bool:
        pairs = zip(self.tokens, other.tokens, strict=False)
        is_near = all(abs(a - b) < 1e-3 for (_, a), (_, b) in pairs)
        return is_near and self.facts() == other.facts()


def choices(bodies: list[dict[str, Any]]) -> list[Choice]:
    """The outputs of an answer, or of the chunks of a stream."""
    found: defaultdict[int, Choice] = defaultdict(Choice)
    for choice in (each for body in bodies for each in body["choices"]):
        found[choice["index"]].add(choice)
    return [found[index] for index in sorted(found)]


@dataclass
class Question:
    """A request that has one right answer."""

    path: str
    body: dict[str, Any]
    answer: list[Choice]


def questions(server: ServerProcess) -> Iterator[Question]:
    """All questions, answered one at a time by ``server``."""
    with server.client() as client:
        asked = client.post(COMPLETIONS, json={"prompt": PROMPTS, "temperature": 0}).json()
        sums = choices([asked])
        for count in (1, 3):
            for first in range(0, len(PROMPTS), count):
                body = {"prompt": PROMPTS[first : first + count], "temperature": 0}
                yield Question(COMPLETIONS, body, sums[first : first + count])
        for text in TEXTS:
            said = {"messages": [{"role": "user", "content": text}]}
            bodies = [(COMPLETIONS, {"prompt": text} | each) for each in WRITTEN.values()]
            bodies += [(CHATS, said | each) for each in SAID.values()]
            bodies += [(CHATS, said | {"temperature": 0})]
            for path, body in bodies:
                answer = client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                yield Question(path, body, choices([answer.json()]))


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


class Storm:
    """Clients that send requests drawn at a fixed seed; ``wrong`` has what they did not expect."""

    def __init__(self, url: str, asked: list[Question]) -> None:
        self.url, self.asked = url, asked
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        return f"{counts}; {len(self.wrong)} wrong"

    async def run(self, numbers: range) -> None:
        """Send the requests of these seeds, ``CLIENTS`` at a time."""
        limits = httpx.Limits(max_connections=CLIENTS + 1)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=TIMEOUT_S, limits=limits, trust_env=False
        ) as client:
            each = iter(numbers)
            await asyncio.gather(*(self._client(client, each) for _ in range(CLIENTS)))

    async def _client(self, client: httpx.AsyncClient, numbers: Iterator[int]) -> None:
        kinds = (self._whole, self._streamed, self._leave, self._cancel, self._bad)
        for number in numbers:
            rng = random.Random(number)
            (kind,) = rng.choices(kinds, (5, 5, 2, 2, 2))
            question = rng.choice(self.asked)
            try:
                await kind(client, rng, question)
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self.wrong.append(f"{number} {kind.__name__} of {question.body}: {error!r}")
            if number % 16 == 0 and (await client.get("/health")).status_code != 200:
                self.wrong.append("not healthy")

    def _check(self, question: Question, answer: list[Choice]) -> None:
        self.counts["answered"] += 1
        pairs = zip(answer, question.answer, strict=False)
        if len(answer) != len(question.answer) or not all(a.equals(b) for a, b in pairs):
            self.wrong.append(f"{question.body}: {answer}, expected {question.answer}")

    async def _whole(self, client: httpx.AsyncClient, rng: random.Random, asked: Question) -> None:
        answer = await client.post(asked.path, json=asked.body)
        self._check(asked, choices([answer.json()]))

    async def _stream(
        self, client: httpx.AsyncClient, asked: Question, wait: Callable[[str], Any]
    ) -> list[dict[str, Any]]:
        """The chunks of a stream; ``wait`` is awaited with the id at each."""
        chunks, is_done = [], False
        async with client.stream("POST", asked.path, json=asked.body | {"stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunks.append(json.loads(line[6:]))
                    await wait(chunks[0]["id"])
                is_done = is_done or line == "data: [DONE]"
        if not is_done:
            self.wrong.append(f"{asked.body}: no end of the stream")
        return chunks

    async def _streamed(
        self, client: httpx.AsyncClient, rng: random.Random, asked: Question
    ) -> None:
        async def read_slowly(_: str) -> None:
            if rng.random() < 0.2:
                await asyncio.sleep(0.02)

        self._check(asked, choices(await self._stream(client, asked, read_slowly)))

    async def _leave(self, client: httpx.AsyncClient, rng: random.Random, asked: Question) -> None:
        body = asked.body | {"stream": rng.random() < 0.5}
        try:
            async with asyncio.timeout(rng.random() * 0.3):
                await client.post(asked.path, json=body)
        except TimeoutError:
            self.counts["left"] += 1

    async def _cancel(self, client: httpx.AsyncClient, rng: random.Random, asked: Question) -> None:
        """Ends a request by its id after some chunks; what came until then is right."""
        left = rng.randrange(1, 6)

        async def cancel(name: str) -> None:
            nonlocal left
            left -= 1
            if not left:
                await client.post("/abort_requests", json={"request_ids": [name]})

        chunks = await self._stream(client, asked, cancel)
        if "error" not in chunks[-1]:
            self._check(asked, choices(chunks))  # it was faster
            return
        if chunks.pop()["error"].get("code") != "aborted":
            self.wrong.append(f"{asked.body}: a cancelled stream ended with {chunks}")
        self.counts["cancelled"] += 1
        begun = choices(chunks)
        pairs = zip(begun, asked.answer, strict=False)
        if not all(whole.text.startswith(part.text) for part, whole in pairs):
            self.wrong.append(f"{asked.body}: {begun}, expected {asked.answer}")

    async def _bad(self, client: httpx.AsyncClient, rng: random.Random, _: Question) -> None:
        answer = await client.post(COMPLETIONS, content=rng.choice(BAD), headers=JSON)
        self.counts["refused"] += 1
        if answer.status_code != 400:
            self.wrong.append(f"{answer.status_code} for a bad body")


DRAFTS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
    "suffix": {"method": "suffix", "num_speculative_tokens": 3, "suffix_cached_tokens": 4000},
    "model": {"method": "draft_model", "model": "abacus-draft", "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def asked() -> Iterator[list[Question]]:
    server = ServerProcess("--dtype", "float32").wait_ready()
    try:
        yield [*questions(server)]
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_a_storm_loses_no_answer_and_no_block(
    drafts: dict[str, Any], asked: list[Question], request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--fw-storm")
    flags = ["--speculative-config", json.dumps(drafts | {"adaptive": False})] if drafts else []
    # 48 requests of up to 100 tokens would need 336 blocks.
    limits = ("--max-num-seqs", "32", "--num-gpu-blocks-override", "48", "--dtype", "float32")
    server = ServerProcess(*limits, *flags).wait_ready()
    try:
        pids = {"API": server.process.pid, "engine": server.engine_pid}
        storm, began = Storm(server.url, asked), time.monotonic()
        memory = [{name: resident_bytes(pid) for name, pid in pids.items()}]
        for first, end in itertools.pairwise([count * quarter // 4 for quarter in range(5)]):
            asyncio.run(storm.run(range(first, end)))
            memory.append({name: resident_bytes(pid) for name, pid in pids.items()})
            sizes = {name: size // 10**6 for name, size in memory[-1].items()}
            print(f"{end} requests, {time.monotonic() - began:.0f} s: {storm}; MB: {sizes}")
        assert not storm.wrong, storm.wrong[:5]
        assert storm.counts["answered"] > count / 3 and storm.counts["left"] > count / 50
        assert storm.counts["refused"] > count / 20 and storm.counts["cancelled"] > count / 50
        with server.client() as client:
            wait_for(lambda: is_idle(client))
            assert client.get("/health").status_code == 200
        if drafts:
            names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
            found = {name: server.metric(f"vllm:spec_decode_{name}_total") for name in names}
            print(found)
            assert 0 < found["num_accepted_tokens"] < found["num_draft_tokens"]
        for name, was in memory[1].items():
            assert memory[-1][name] < was + 40e6, memory
        assert server.stop() == 0
        assert not [line for line in server.lines if "Traceback" in line or "error" in line]
    finally:
        server.kill()
