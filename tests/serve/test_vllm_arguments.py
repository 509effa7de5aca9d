"""The tables of vLLM's arguments say what is true of our signatures and flags, the flags of vLLM's
command line are understood, and the page is rendered from the tables."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fusewright import LLM, SamplingParams
from fusewright.config import EngineOptions, UserError, engine_options
from fusewright.config.ports import check_call, ported
from fusewright.config.vllm import (
    CALLS,
    ENGINE,
    METHODS,
    SAMPLING,
    SERVE,
    Argument,
    Port,
)
from fusewright.config.vllm.bench import BENCH
from fusewright.config.weight_format import STORED_FORMATS
from fusewright.serve.cli import main
from fusewright.serve.console.ports import rewritten

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import reference_page  # type: ignore[import-not-found] # noqa: E402
from vllm_page import PAGE, page  # type: ignore[import-not-found] # noqa: E402

OPTIONS = {f.name for f in fields(EngineOptions)}
FIELDS = {f.name for f in fields(SamplingParams)}
TABLES = {
    "engine": ENGINE,
    "serve": SERVE,
    "bench": BENCH,
    "sampling": SAMPLING,
    "methods": METHODS,
    "calls": CALLS,
}
EVERY = [
    pytest.param(table, argument, id=f"{table}-{name}")
    for table, arguments in TABLES.items()
    for name, argument in arguments.items()
]
READ = ("compilation_config", "distributed_executor_backend", "dataset_name")
"""Their values decide."""


@pytest.fixture(scope="module")
def flags() -> dict[str, set[str]]:
    """The flags of ``serve``, and those of all benches."""
    found = {"serve": {"--config"}, "bench": set[str]()}
    for command in reference_page.commands():
        if command.info_name == "serve" or "bench" in command.command_path:
            kind = "bench" if "bench" in command.command_path else "serve"
            for parameter in command.command.params:
                found[kind] |= {*parameter.opts, *parameter.secondary_opts}
    return found


def exists(table: str, argument: Argument, flags: set[str]) -> bool:
    """Whether a name is one of ours."""
    name = argument.name
    if table == "engine":
        llm = {*inspect.signature(LLM.__init__).parameters, "revision"}
        return name in OPTIONS or name in llm or "--" + name.replace("_", "-") in flags
    if table in ("serve", "bench"):
        return "--" + name.replace("_", "-") in flags
    if table == "sampling":
        return name in FIELDS
    if table == "methods":
        return callable(getattr(LLM, name, None))
    calls = (LLM.generate, LLM.chat, LLM.beam_search)
    return any(name in inspect.signature(call).parameters for call in calls) or name == "tools"


@pytest.mark.parametrize(("table", "argument"), EVERY)
def test_each_entry_is_true(table: str, argument: Argument, flags: dict[str, set[str]]) -> None:
    own = flags["bench" if table == "bench" else "serve"]
    asks: Any = {"asks": "for it"}
    if argument.port is Port.SAME:
        assert exists(table, argument, own)
        return
    if argument.port is not Port.OTHER:
        assert not exists(table, argument, set()), "it is there: say so"
    if table != "methods" and argument.name not in READ:
        for nothing in (None, False, 0, "", *argument.off):
            assert ported(argument, nothing) == {}
    if argument.port is Port.IGNORED:
        assert argument.says and ported(argument, asks) == {}
    elif argument.port is Port.REFUSED and table == "methods":
        with pytest.raises(AttributeError) as missing:
            getattr(object.__new__(LLM), argument.name)
        assert argument.says in str(missing.value)
    elif argument.port is Port.REFUSED:
        with pytest.raises(UserError) as error:
            _give(table, argument.name, asks)
        assert argument.says in str(error.value) and "\n" not in str(error.value)
    elif argument.says.isidentifier():
        flag = "--" + argument.says.replace("_", "-")
        assert argument.says in OPTIONS | FIELDS | {"report"} or flag in own


def _give(table: str, name: str, value: Any) -> None:
    if table == "engine":
        engine_options("abacus", {name: value})
    elif table == "sampling":
        SamplingParams(**{name: value})
    elif table == "calls":
        check_call("LLM.generate", {name: value})
    else:
        switch = TABLES[table][name].switch
        argv = [f"--{name.replace('_', '-')}", *([] if switch else [str(value)])]
        command = "serve" if table == "serve" else "bench serve"
        rewritten(argv, {"--max-model-len": True}, command)


def test_the_pages_are_current() -> None:
    assert PAGE.read_text() == page(), "run `make vllm-page`"
    current = reference_page.page()
    assert reference_page.PAGE.read_text() == current, "run `make reference`"


KNOWN = {
    "--max-model-len": True,
    "--tensor-parallel-size": True,
    "--served-model-name": True,
    "--enforce-eager": False,
    "--no-enforce-eager": False,
    "-p": True,
    "-O": True,
}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("m --max_model_len 4 --max_model_len=4", "m --max-model-len 4 --max-model-len=4"),
        ("-tp 2 -O3 --enforce_eager", "--tensor-parallel-size 2 -O3 --enforce-eager"),
        ("-p --swap_space --swap-space 4 m", "-p --swap_space m"),
        ("--enable-auto-tool-choice --swap-space=4 m", "m"),
        ("--no-enable-lora --enable_chunked_prefill m", "--enable_chunked_prefill m"),
        ("--compilation-config 3", "--optimization-level 3"),
        ("--cc 3", "--cc 3"),
        ('-cc {"cudagraph_mode":"NONE"}', "--cudagraph-mode NONE"),
        ("--distributed-executor-backend ray", "--distributed-executor ray"),
        ("--cpu-offload-gb 0 --tokenizer-mode auto --hf-token None m", "m"),
        ("-- --swap-space 4", "-- --swap-space 4"),
        ("--uvicorn-log-level warning", ""),
    ],
)
def test_vllms_flags_become_ours(line: str, expected: str) -> None:
    targets = ("--enable_chunked_prefill", "--distributed-executor", "--cudagraph-mode")
    known = KNOWN | dict.fromkeys((*targets, "--optimization-level"), True)
    assert rewritten(line.split(), known, "serve") == expected.split()


def test_flags_of_the_engine_mean_nothing_where_there_is_none() -> None:
    assert rewritten(["--swap-space", "4", "--a_b"], {"--a-b": False}, "ls") == [
        *("--swap-space", "4", "--a-b")
    ]


def test_a_file_has_flags_as_keys_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "max_model_len: 128\ntensor-parallel-size: 2\nserved-model-name: [a, b]\n"
        "enforce-eager: false\nswap-space: 4\ncompilation-config: {cudagraph_mode: NONE}\n"
    )
    known = KNOWN | {"--cudagraph-mode": True}
    given = rewritten(["--config", str(file), "-tp", "4"], known, "serve")
    assert " ".join(given) == (
        "--max-model-len 128 --served-model-name a --served-model-name b --no-enforce-eager "
        "--cudagraph-mode NONE --tensor-parallel-size 4"
    )
    for text, message in (("a: [", "cannot be read"), ("- a", "expected flags"), ("b: 1", "b: no")):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            rewritten([f"--config={file}"], KNOWN, "serve")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("serve --enable-lora", "enable_lora=True: LoRA adapters are not served; merge"),
        ('serve --hf-overrides {"a":1', "hf_overrides='{\"a\":1': not JSON: Expecting"),
        (f"serve --hf-overrides {'[' * 9999}", "nested too deeply; expected an object, such as"),
        ('serve --hf-overrides {"a":1,"a":2}', "hf_overrides: has 'a' twice; leave one of"),
        ("serve --spec-k 2 --speculative-config=", "speculative_config='': not JSON"),
        ("serve --hf-overrides [1]", "hf_overrides='[1]': expected an object, such as"),
        ('run -p 1 --hf-overrides {"vocab_size":-1}', "vocab_size"),
        ("serve --chat-template no.jinja", "chat_template='no.jinja': no such file"),
        ("serve --kv-transfer-config", "--kv-transfer-config: expected a value"),
        ("serve --config none.yaml", "--config none.yaml: cannot be read"),
        ("serve --max-model-len 8X", "'8X' is not an integer such as 8192, 8k or 8K"),
        ("serve --max-model-len 8K", "max_model_len=8192: the model was made for 512"),
        ("run -p 1 --max-model-len 1.5k", "max_model_len=1500: the model was made for 512"),
        ("run -p 1 --dtype int8", "'int8' is not one of auto, bfloat16, float16, float32"),
        ("run -p 1 abacus --revision v1", "revision='v1': expected a branch, tag or commit"),
        ("bench latency --revision v1", "revision='v1': expected a branch, tag or commit"),
    ],
)
def test_what_is_not_there_is_one_line(
    line: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert told in capsys.readouterr().err


def test_no_quantization_is_called_missing_that_loads() -> None:
    """As the page did of GPTQ, AWQ, MXFP4 and NVFP4, long after checkpoints of them were read."""
    section = page().split("## What is missing")[1].split("## ")[0]
    missing = " ".join(row.split("|")[1].lower() for row in section.splitlines() if "|" in row)
    words = set(re.findall(r"[\w-]+", missing))
    assert "bitsandbytes" in words
    loads = {"gptq", "awq", "autoawq", "compressed-tensors", "modelopt", *STORED_FORMATS}
    assert not words & {*loads, "int4", "int8", "gguf"}
