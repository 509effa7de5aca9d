"""A storm: requests of all kinds at once, many of which are cancelled, cut off, read slowly or
malformed, over a KV cache that is too small for them.  Every answer is right, and nothing is lost.

``--fw-storm 20000 -s`` runs the full size and prints the memory of both processes at each quarter.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from fusewright import LLM, SamplingParams

from .server_process import JSON, TIMEOUT_S, ServerProcess, is_idle, wait_for

PROMPTS = [f"{a}{op}{b}=" for a in range(3, 60, 4) for b in range(2, 40, 7) for op in "+-"]
BAD = [b"{", b"[]", b'{"prompt": ""}', b'{"prompt": "1", "n": -1}', b'{"prompt": "\xff"}']
CLIENTS = 48
FORM = '[{]"sum": [0-9]{1,3}, "digits": (one|two|three)[}]'


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


class Storm:
    """Clients that send requests drawn at a fixed seed; ``wrong`` has what they did not expect."""

    def __init__(self, url: str, expected: dict[str, str]) -> None:
        self.url, self.expected = url, expected
        self.wrong: list[str] = []
        self.answered = self.left = self.refused = self.cancelled = 0

    def __str__(self) -> str:
        ends = f"{self.left} left, {self.cancelled} cancelled, {self.refused} refused"
        return f"{self.answered} answers right but {len(self.wrong)}, {ends}"

    async def run(self, numbers: range) -> None:
        """Send the requests of these seeds, ``CLIENTS`` at a time."""
        limits = httpx.Limits(max_connections=CLIENTS + 1)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=TIMEOUT_S, limits=limits, trust_env=False
        ) as client:
            each = iter(numbers)
            await asyncio.gather(*(self._client(client, each) for _ in range(CLIENTS)))

    async def _client(self, client: httpx.AsyncClient, numbers: Any) -> None:
        right = (self._whole, self._streamed, self._chat, self._form)
        kinds = (*right, self._leave, self._cancel, self._bad)
        for number in numbers:
            rng = random.Random(number)
            kind = rng.choice(kinds)
            try:
                await kind(client, rng)
            except httpx.HTTPError as error:
                self.wrong.append(f"{kind.__name__}: {error!r}")
            if number % 16 == 0 and (await client.get("/health")).status_code != 200:
                self.wrong.append("not healthy")

    def _check(self, prompt: str, text: str) -> None:
        self.answered += 1
        if text != self.expected[prompt]:
            self.wrong.append(f"{prompt} {text!r}, expected {self.expected[prompt]!r}")

    async def _whole(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        prompts = rng.sample(PROMPTS, rng.choice((1, 3)))
        answer = await client.post("/v1/completions", json={"prompt": prompts, "temperature": 0})
        for prompt, choice in zip(prompts, answer.json()["choices"], strict=True):
            self._check(prompt, choice["text"])

    async def _chat(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        prompt = rng.choice(PROMPTS)
        body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0}
        answer = await client.post("/v1/chat/completions", json=body)
        self._check(prompt, answer.json()["choices"][0]["message"]["content"])

    async def _streamed(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        prompt, text, is_done = rng.choice(PROMPTS), "", False
        body = {"prompt": prompt, "temperature": 0, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if rng.random() < 0.2:
                    await asyncio.sleep(0.02)  # a slow reader
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                is_done = is_done or line == "data: [DONE]"
        if not is_done:
            self.wrong.append(f"{prompt}: no end of the stream")
        self._check(prompt, text)

    async def _leave(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        body = {"prompt": rng.choice(PROMPTS), "ignore_eos": True, "n": rng.choice((1, 4))}
        body |= {"max_tokens": 200, "stream": rng.random() < 0.5, "seed": 1}
        try:
            async with asyncio.timeout(rng.random() * 0.3):
                await client.post("/v1/completions", json=body)
        except TimeoutError:
            self.left += 1

    async def _cancel(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        """Ends a request by its id after its first token."""
        body = {"prompt": rng.choice(PROMPTS), "ignore_eos": True, "max_tokens": 100}
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            events: list[dict[str, Any]] = []
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
                    if len(events) == 1:
                        ids = [events[0]["id"]]
                        await client.post("/abort_requests", json={"request_ids": ids})
        self.cancelled += 1
        ends_early = events[-1].get("error", {}).get("code") == "aborted"
        if not ends_early and events[-1]["choices"][0]["finish_reason"] != "length":
            self.wrong.append(f"a cancelled stream ended with {events[-1]}")

    async def _form(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        """A form, some of which is forced."""
        body = {"prompt": rng.choice(PROMPTS), "seed": rng.randrange(99), "max_tokens": 60}
        body |= {"structured_outputs": {"regex": FORM}, "temperature": rng.choice((0, 1))}
        answer = await client.post("/v1/completions", json=body)
        self.answered += 1
        if not re.fullmatch(FORM, text := answer.json()["choices"][0]["text"]):
            self.wrong.append(f"{text!r} is not of the form")

    async def _bad(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        answer = await client.post("/v1/completions", content=rng.choice(BAD), headers=JSON)
        self.refused += 1
        if answer.status_code != 400:
            self.wrong.append(f"{answer.status_code} for a bad body")


DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "adaptive": False,
}


@pytest.mark.product
@pytest.mark.parametrize(
    "flags", [(), ("--speculative-config", json.dumps(DRAFTS))], ids=["plain", "drafts"]
)
def test_a_storm_loses_no_answer_and_no_block(
    flags: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--fw-storm")
    llm = LLM("abacus", device="cpu", optimization_level=0, dtype="float32")
    greedy = SamplingParams(temperature=0.0)
    outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
    expected = {o.prompt or "": o.outputs[0].text for o in outputs}
    # 48 requests of up to 210 tokens would need 672 blocks.
    limits = ("--max-num-seqs", "32", "--num-gpu-blocks-override", "64", "--dtype", "float32")
    server = ServerProcess(*limits, *flags).wait_ready()
    try:
        pids = {"API": server.process.pid, "engine": server.engine_pid}
        storm = Storm(server.url, expected)
        memory = [{name: resident_bytes(pid) for name, pid in pids.items()}]
        for first, end in itertools.pairwise([count * quarter // 4 for quarter in range(5)]):
            asyncio.run(storm.run(range(first, end)))
            memory.append({name: resident_bytes(pid) for name, pid in pids.items()})
            print(
                f"{end} requests: {storm}; MB: { {k: v // 10**6 for k, v in memory[-1].items()} }"
            )
        assert not storm.wrong
        assert storm.answered > count / 3 and storm.left > count / 20
        assert storm.refused > count / 10 and storm.cancelled > count / 10
        with server.client() as client:
            wait_for(lambda: is_idle(client))
            assert client.get("/health").status_code == 200
        for name, was in memory[1].items():
            assert memory[-1][name] < was + 40e6, memory
        assert server.stop() == 0
        assert not [line for line in server.lines if "Traceback" in line or "error" in line]
    finally:
        server.kill()
