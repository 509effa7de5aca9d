"""Claims about the tokens that answers say they took."""

from __future__ import annotations

from typing import Any

import httpx
import openai

from .server_process import stream


def test_continuous_usage_counts_up(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "37+58=", "temperature": 0, "stream_options": options}
    found = stream(http, "/v1/completions", **body)
    counts = [each["usage"]["completion_tokens"] for each in found]
    assert counts == sorted(counts) and counts[-1] == 3
    assert {each["usage"]["prompt_tokens"] for each in found} == {
        found[0]["usage"]["prompt_tokens"]
    }


def test_usage_counts_the_prompt_tokens_that_were_cached(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    """Blocks have 16 tokens, and the last token of a prompt is always computed."""
    ids = [40 + i % 7 for i in range(33)]
    asked: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "cache_salt": "usage"}
    for expected in (0, 32):
        usage = http.post("/v1/completions", json=asked).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": expected}
    options = {"stream_options": {"include_usage": True}}
    assert stream(http, "/v1/completions", **asked, **options)[-1]["usage"] == usage
    both = {**asked, "prompt": [ids, ids[::-1]]}
    counted = http.post("/v1/completions", json=both).json()["usage"]
    assert counted["prompt_tokens_details"] == {"cached_tokens": 32}
    salted: Any = {"model": "abacus", "extra_body": {"cache_salt": "usage"}}
    text = "37+58=" * 8
    for expected in (False, True):
        chat = client.chat.completions.create(
            messages=[{"role": "user", "content": text}], max_tokens=1, **salted
        )
        assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
        assert bool(chat.usage.prompt_tokens_details.cached_tokens) is expected
    answer = client.responses.create(input=text, max_output_tokens=1, **salted)
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens >= 32
