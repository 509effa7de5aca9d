"""A server of the bundled model for all tests of a worker, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from .server_process import ADMIN_KEY, KEY, OTHER_KEY, ServerProcess


def pytest_configure(config: pytest.Config) -> None:
    ServerProcess.drafts = config.option.fw_drafts


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    made = ServerProcess(
        *("--api-key", OTHER_KEY, "--api-key", KEY, "--admin-api-key", ADMIN_KEY),
        *("--served-model-name", "abacus", "--served-model-name", "second"),
        *("--max-waiting-requests", "64", "--max-num-seqs", "16", "--dtype", "float32"),
        *("--max-body-mb", "0.5", "--tool-call-parser", "hermes"),
    ).wait_ready()
    yield made
    assert made.stop() == 0
    assert not [line for line in made.lines if "Traceback" in line]


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client(headers={"authorization": f"Bearer {KEY}"}) as made:
        yield made
