"""What an operator reads: the log of a server and of an ``LLM``."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fusewright import LLM, SamplingParams
from fusewright.config import UserError
from fusewright.config.process.logs import (
    VARIABLE,
    LogStyle,
    be_quiet,
    write_log,
    write_log_by_default,
)
from fusewright.engine.frontend.engine_log import Load
from fusewright.serve.http.intake.answer_log import AnswerLog, LogSettings
from fusewright.serve.http.jobs import stats

from .server_process import LONG, ServerProcess, stream, wait_for

SECRET = "sort 5 3 9 1="


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    made = ServerProcess(
        *("--log-format", "json", "--log-stats-interval", "0.2", "--enable-log-requests"),
        *("--disable-access-log-for-endpoints", "/health"),
    )
    wait_for(lambda: any("url" in line for line in lines(made)))
    made.url = next(line["url"] for line in lines(made) if "url" in line)
    yield made
    assert made.stop() == 0


def lines(server: ServerProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in list(server.lines)]


def test_a_start_says_what_runs(server: ServerProcess) -> None:
    said = {name: line for line in lines(server) for name in line}
    assert {"model", "kv_cache", "fusions", "artifact", "startup", "url"} <= set(said)
    model, kv = said["model"]["model"], said["kv_cache"]["kv_cache"]
    assert (model["dtype"], model["max_model_len"], model["level"]) == ("bfloat16", 512, 0)
    assert kv["full_requests"] == kv["tokens"] / 512
    assert said["url"]["message"] == f"serving abacus at {server.url}"
    assert {line["level"] for line in lines(server)} == {"info"}


def test_load_is_told_while_something_runs(server: ServerProcess) -> None:
    def told() -> list[dict[str, Any]]:
        return [line for line in lines(server) if "running" in line]

    with server.client() as http:
        stream(http, "/v1/completions", **LONG)
        wait_for(lambda: any(line["running"] == 0 for line in told()))
        busy = [line for line in told() if line["running"] == 1]
        assert max(line["output_tokens_per_s"] for line in busy) > 0
        assert sum(line["prompt_tokens_per_s"] > 0 for line in told()) == 1
        number = len(told())
        for _ in range(4):
            http.get("/metrics")
            time.sleep(0.2)
        assert len(told()) <= number + 1, "an idle server says nothing"


def test_the_last_line_of_load_says_that_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, said: list[logging.LogRecord]
) -> None:
    """Also where an interval ended between the last token and what an engine tells of itself."""
    loads = [Load(), Load(4, 9, num_running=1), Load(4, 10, num_running=1), *[Load(4, 10)] * 3]

    async def load_of(_: object) -> Load:
        if not loads:
            raise asyncio.CancelledError
        return loads.pop(0)

    monkeypatch.setattr(stats, "load_of", load_of)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stats.log_loads(None, 0.001))  # type: ignore[arg-type]
    assert [record.getMessage()[:9] for record in said] == ["running 1"] * 2 + ["running 0"]


def test_answers_have_lines_and_refusals_reasons(server: ServerProcess) -> None:
    def answers() -> list[dict[str, Any]]:
        return [line for line in lines(server) if "status" in line]

    number = len(answers())
    with server.client() as http:
        good = http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 4})
        http.get("/health")
        bad = http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": -1})
        lost = http.get("/nowhere", headers={"x-request-id": "mine"})
    wait_for(lambda: len(answers()) == number + 3)
    done, refused, missing = answers()[number:]
    assert (done["request"], done["status"]) == ("POST /v1/completions", 200)
    assert done["request_id"] == good.headers["x-request-id"] and done["seconds"] > 0
    assert refused["reason"] == "max_tokens=-1: expected at least 1"
    assert refused["request_id"] == bad.headers["x-request-id"]
    assert (missing["status"], missing["request_id"]) == (404, "mine")
    assert lost.headers["x-request-id"] == "mine"
    (asked,) = [line for line in lines(server) if line.get("max_tokens") == 4]
    assert asked["request_id"] == done["request_id"] and len(asked["prompt_tokens"]) == 1
    assert not [line for line in server.lines if SECRET in line]


def test_a_message_that_is_not_http_has_a_line_too(server: ServerProcess) -> None:
    with server.client() as http:
        assert http.get("/", headers=[(f"h{n}", "") for n in range(300)]).status_code == 431
    wait_for(lambda: any(line.get("status") == 431 for line in lines(server)))


def test_a_flood_of_refusals_is_counted(said: list[logging.LogRecord]) -> None:
    log = AnswerLog(LogSettings(answers=False))
    for _ in range(1000):
        log.write("GET /", "/", 400, reason="no")
        log.write("GET /", "/", 200)
    assert len(said) == 200
    log._began_s -= 11
    log.write("GET /", "/", 503, reason="later")
    assert said[200].getMessage() == "800 more refusals have no line of their own"
    assert (said[201].levelname, said[201].getMessage()) == ("WARNING", '- "GET /" 503: later')


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """That of the package, in a program that has set up no logging."""
    monkeypatch.setattr("fusewright.config.process.logs._quiet", False)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.delenv(VARIABLE, raising=False)
    made = logging.getLogger("fusewright")
    before = made.handlers, made.level, made.propagate
    made.handlers = []
    made.setLevel(logging.NOTSET)
    yield made
    made.handlers, made.propagate = before[0], before[2]
    made.setLevel(before[1])


@pytest.mark.parametrize(
    ("silenced", "expected"),
    [("", True), ("environment", False), ("level", False), ("basicConfig", False), ("cli", False)],
)
def test_an_llm_tells_its_start_unless_it_is_silenced(
    logger: logging.Logger,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    silenced: str,
    expected: bool,
) -> None:
    if silenced == "environment":
        monkeypatch.setenv(VARIABLE, "error")
    elif silenced == "level":
        logger.setLevel("ERROR")
    elif silenced == "basicConfig":
        logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    elif silenced == "cli":
        be_quiet()
    with LLM("abacus", device="cpu", optimization_level=0, dtype="float32") as llm:
        llm.generate("1+1=", SamplingParams(max_tokens=1), use_tqdm=False)
    told = capsys.readouterr().err
    assert bool(told) == expected, told
    if expected:
        first, *_ = told.splitlines()
        assert re.fullmatch(
            r"INFO \d\d-\d\d \d\d:\d\d:\d\d model abacus: LlamaForCausalLM, 5 layers, float32, "
            r"-O0 on \S+, max_model_len=512",
            first,
        )


def test_no_text_of_a_client_ends_a_line_or_drives_a_terminal(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(LogStyle("warning", process="api 1"))
    logger.warning("%s", "a\nb\x1b[31m\x9bc")
    assert re.fullmatch(
        r"WARNING \S+ \S+ \[api 1\] a\\x0ab\\x1b\[31m\\x9bc\n", capsys.readouterr().err
    )


def test_a_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "loud")
    with pytest.raises(UserError, match=f"{VARIABLE}=loud: expected one of debug, info"):
        write_log_by_default()
