"""Asks a server of the bundled model through LiteLLM's router and LangChain's ChatOpenAI.

``python tools/gateway_clients.py URL``, in the environment of ``tools/clients.txt``. Prints a line,
or fails with what was not as expected.
"""

from __future__ import annotations

import os
import sys

# LiteLLM would fetch its table of prices, LangChain send traces.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}

import litellm
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

ASKED, ANSWER = "37+58=", "95"


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")
    is_right: bool


def same(what: str, answer: object, expected: object = ANSWER) -> None:
    if answer != expected:
        raise SystemExit(f"{what}: {answer!r}, expected {expected!r}")


def ask_router(url: str) -> None:
    """A deployment answers still when a client has asked for what is not served, and has sent what
    is refused: it is one server for many clients."""
    parameters = {"model": "openai/abacus", "api_base": f"{url}/v1", "api_key": "none"}
    router = litellm.Router(
        [{"model_name": "sums", "litellm_params": parameters}], num_retries=0, cooldown_time=60
    )
    messages = [{"role": "user", "content": ASKED}]
    for mistake in (
        lambda: router.embedding(model="sums", input=["x"]),
        lambda: router.completion(model="sums", messages=messages, max_tokens=-1),
    ):
        try:
            mistake()
        except litellm.BadRequestError:
            continue
        raise SystemExit("LiteLLM: a mistake was answered")
    asked = {"model": "sums", "messages": messages, "temperature": 0}
    same("LiteLLM", router.completion(**asked).choices[0].message.content)
    pieces = router.completion(**asked, stream=True)
    same("LiteLLM's stream", "".join(piece.choices[0].delta.content or "" for piece in pieces))
    theirs = {"model": "anthropic/abacus", "api_base": url, "api_key": "none", "max_tokens": 8}
    answer = litellm.completion(**theirs, messages=messages, temperature=0)
    same("LiteLLM, as Anthropic's", answer.choices[0].message.content)


def ask_langchain(url: str) -> None:
    settings = {"base_url": f"{url}/v1", "api_key": "none", "model": "abacus", "temperature": 0}
    model = ChatOpenAI(**settings)
    same("LangChain", model.invoke(ASKED).content)
    whole = AIMessageChunk("")
    for piece in model.stream(ASKED, stream_usage=True):
        whole += piece
    same("LangChain's stream", whole.content)
    same("LangChain's usage", (whole.usage_metadata or {}).get("output_tokens"), 3)
    formed = model.with_structured_output(Sum, method="json_schema").invoke(ASKED)
    same("LangChain's structured output", type(formed), Sum)
    answer = ChatOpenAI(**settings, use_responses_api=True).invoke(ASKED)
    same("LangChain, by responses", answer.text)


if __name__ == "__main__":
    ask_router(sys.argv[1])
    ask_langchain(sys.argv[1])
    print("LiteLLM's router and LangChain: right answers, and mistakes that stop no deployment")
