"""Claims about `chat` and `run-batch`, against the shared server and with a model of their own."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from fusewright.serve.cli import main

from .server_process import KEY, ServerProcess

Capture = pytest.CaptureFixture[str]
CPU = ("--device", "cpu", "-O0")
TALK = "37+58=\n/clear\n\nsort 5 3 9 1=\n"


def request(name: str, **fields: object) -> dict[str, object]:
    body = {"prompt": "37+58=", "temperature": 0, "model": "second"}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body, **fields}


@pytest.mark.parametrize("where", ["model", "server"])
def test_chat_answers_the_lines_of_a_pipe(
    where: str, server: ServerProcess, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(TALK))
    flags = CPU if where == "model" else ("--url", server.url, "--api-key", KEY)
    assert main(["chat", *flags, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "95\n1 3 5 9\n"


def test_lines_of_a_slash_and_a_word_are_no_messages(
    server: ServerProcess, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("/help\n37+58=\n/halp\n/exit\n37+58=\n"))
    flags = ("--url", server.url, "--api-key", KEY, "--temperature", "0")
    assert main(["chat", *flags]) == 0
    said = capsys.readouterr()
    assert said.out == "95\n"
    listed, mistake = said.err.splitlines()
    assert listed.startswith("/clear forgets") and "/exit ends" in listed
    assert mistake == f"error: /halp is no command; {listed}"


def test_a_batch_is_answered_in_order_by_a_server_that_is_there(
    server: ServerProcess, tmp_path: Path, capsys: Capture
) -> None:
    chat = {"messages": [{"role": "user", "content": "37+58="}], "model": "abacus"}
    records = [
        *(request(str(number)) for number in range(20)),
        request("chat", url="/v1/chat/completions", body={**chat, "temperature": 0}),
        request("bad", body={"prompt": "1", "model": "abacus", "temperature": -1}),
    ]
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    files = ("-i", str(asked), "-o", str(answered))
    assert main(["run-batch", *files, "--url", server.url, "--api-key", KEY]) == 0
    assert "22 requests, 1 of them failed" in capsys.readouterr().err
    answers = [json.loads(line) for line in answered.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [
        record["custom_id"] for record in records
    ]
    for answer in answers[:20]:
        assert answer["response"]["body"]["choices"][0]["text"] == "95" and answer["error"] is None
    assert answers[20]["response"]["body"]["choices"][0]["message"]["content"] == "95"
    assert answers[21]["response"]["status_code"] == 400


def test_a_batch_starts_a_server_of_all_the_models_that_it_names(tmp_path: Path) -> None:
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text(json.dumps(request("a")) + "\n")
    assert main(["run-batch", *CPU, "-i", str(asked), "-o", str(answered)]) == 0
    (answer,) = map(json.loads, answered.read_text().splitlines())
    assert answer["response"]["body"]["choices"][0]["text"] == "95"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "in.jsonl:1: not JSON"),
        ("[]", "in.jsonl:1: expected an object with custom_id, url and body"),
        (json.dumps(request("a", url="/v1/embeddings")), "expected one of /v1/chat/completions"),
        (json.dumps(request("a", method="GET")), "method='GET': expected POST"),
        (json.dumps(request("a", body={"stream": True})), "stream: an answer of a batch is one"),
        ("\n".join([json.dumps(request("a"))] * 2), "in.jsonl:2: custom_id='a' is that of"),
        ("", "holds no request"),
    ],
)
def test_a_bad_line_of_a_batch_is_named(
    line: str, told: str, tmp_path: Path, capsys: Capture
) -> None:
    asked = tmp_path / "in.jsonl"
    asked.write_text(line)
    assert main(["run-batch", "-i", str(asked), "-o", str(tmp_path / "o")]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("chat --url nowhere", "url='nowhere': expected http://HOST:PORT"),
        ("chat --url http://127.0.0.1:1", "http://127.0.0.1:1 cannot be asked"),
        ("chat --url http://a --max-num-seqs 4", "--max-num-seqs: the server of --url has its own"),
        ("chat --api-key k", "--api-key: without --url no server is asked"),
        ("chat --n 2", "--n: a chat has one answer"),
    ],
)
def test_what_chat_cannot_do_is_one_line(line: str, told: str, capsys: Capture) -> None:
    assert main(line.split()) in (1, 2)
    assert told in capsys.readouterr().err
