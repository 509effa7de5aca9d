"""Log probabilities over HTTP are by token: names, bytes and places of tokens that are parts of a
character."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from .test_server import stream

TEXT = "aé😀b"
BYTES = [[byte] for byte in TEXT.encode()]
OFFSETS = [0, 1, 1, 2, 2, 2, 2, 3]
NAMES = ["a", r"bytes:\xc3", r"bytes:\xa9", *(rf"bytes:\x{b:02x}" for b in "😀".encode()), "b"]
ASKED: dict[str, Any] = {
    "structured_outputs": {"choice": [TEXT]},
    "max_tokens": 20,
    "temperature": 0,
}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("echo", [False, True], ids=["", "echo"])
def test_names_and_places_of_the_parts_of_a_character(
    http: httpx.Client, streamed: bool, echo: bool
) -> None:
    prompt = "ü=" if echo else "1"
    body = {"prompt": prompt, "logprobs": 4, "echo": echo, **ASKED}
    if streamed:
        pieces = [each["choices"][0] for each in stream(http, "/v1/completions", **body)]
    else:
        pieces = http.post("/v1/completions", json=body).json()["choices"]
    names = [name for piece in pieces for name in piece["logprobs"]["tokens"]]
    offsets = [at for piece in pieces for at in piece["logprobs"]["text_offset"]]
    echoed = ["<|bos|>", r"bytes:\xc3", r"bytes:\xbc", "="] if echo else []
    assert names[: len(echoed)] == echoed
    assert names[len(echoed) : -1] == NAMES
    shift = len(prompt) if echo else 0
    expected = [0, 0, 0, 1] if echo else []
    assert offsets == expected + [shift + at for at in [*OFFSETS, len(TEXT)]]
    for piece in pieces:
        found = piece["logprobs"]
        for name, own, top in zip(
            found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
        ):
            assert top is None or (top[name] == own and len(top) >= 4)


def test_a_chat_has_the_bytes_of_its_tokens(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "1"}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 3, **ASKED}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["message"]["content"] == TEXT
    content = choice["logprobs"]["content"]
    assert [each["bytes"] for each in content[:-1]] == BYTES
    for each in content:
        values = [top["logprob"] for top in each["top_logprobs"]]
        assert len(values) == 3 and values == sorted(values, reverse=True)
    body["return_tokens_as_token_ids"] = True
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert [each["token"] for each in choice["logprobs"]["content"][:-1]] == [
        f"token_id:{byte}" for (byte,) in BYTES
    ]
