"""vLLM's dialect of flags, rewritten into ours before they are parsed: underscores, short names,
``--config FILE.yaml``, and flags that are not there, by the tables of ``config/vllm/``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...config import UserError
from ...config.ports import ported
from ...config.vllm import ENGINE, SERVE, Argument

_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-asc": "--api-server-count",
    "-q": "--quantization",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-sc": "--speculative-config",
}
_CONFIG = "--config"


def rewritten(args: Sequence[str], known: Mapping[str, bool], command: str) -> list[str]:
    """The arguments of a command in our own flags.

    Args:
        known: flag of the command -> whether it takes a value.
        command: its name behind the program's, such as "serve" or "bench latency".

    Raises:
        UserError: a flag of vLLM's asks for what is not there, or a ``--config`` file is bad.
    """
    has_engine = "--max-model-len" in known
    more: dict[str, Argument] = SERVE if command == "serve" else {}
    if command.startswith("bench "):
        from ...config.vllm.bench import BENCH

        more = BENCH
    table = ENGINE | more if has_engine else {}
    out: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            return [*out, arg, *rest]
        flag, equals, value = _flag(arg, known)
        if flag in known:
            out.append(flag + equals + value)
            if known[flag] and not equals and rest:
                out.append(rest.pop(0))
            continue
        if flag == _CONFIG and has_engine and (equals or rest):
            file = value if equals else rest.pop(0)
            present = {_flag(each, known)[0] for each in (*out, *rest)}
            rest = [*_from_file(Path(file), present, {*known, *_flags_of(table)}), *rest]
            continue
        argument, says_no = _argument(flag, table)
        if argument is None:
            out.append(arg)
        elif argument.switch:
            out += _ours(argument, not says_no, known)
        else:
            if not equals and not rest:
                raise UserError(f"{flag}: expected a value")
            out += _ours(argument, value if equals else rest.pop(0), known)
    return out


def _flag(arg: str, known: Mapping[str, bool]) -> tuple[str, str, str]:
    """A flag as it is known here, the = behind it and the value behind that; no flag: all of it."""
    if not arg.startswith("-"):
        return arg, "", ""
    name, equals, value = arg.partition("=")
    if name not in known:
        name = _SHORT.get(name, name)
    if name.startswith("--") and name not in known:
        name = name.replace("_", "-")
    return name, equals, value


def _argument(flag: str, table: Mapping[str, Argument]) -> tuple[Argument | None, bool]:
    """What is said of a flag, and whether it is the ``--no-`` of one."""
    if not flag.startswith("--"):
        return None, False
    name = flag.removeprefix("--").replace("-", "_")
    if name not in table and name.startswith("no_"):
        return table.get(name.removeprefix("no_")), True
    return table.get(name), False


def _ours(argument: Argument, value: Any, known: Mapping[str, bool]) -> list[str]:
    flags = []
    for name, each in ported(argument, value).items():
        text = ",".join(map(str, each)) if isinstance(each, list | tuple) else str(each)
        flag = "--" + name.replace("_", "-")
        if flag not in known:
            raise UserError(
                f"{argument.name}={value!r}: is {flag} here, which this command does not have"
            )
        flags += [flag, text]
    return flags


def _flags_of(table: Mapping[str, Argument]) -> list[str]:
    return ["--" + name.replace("_", "-") for name in table]


def _from_file(file: Path, present: set[str], flags: set[str]) -> Iterator[str]:
    """The flags of a YAML file whose keys are flags; those that the command line has win.

    Raises:
        UserError: it cannot be read, or a key is no flag.
    """
    import yaml

    try:
        values = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"--config {file}: cannot be read: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(values, dict):
        raise UserError(f"--config {file}: expected flags as keys, such as 'max-model-len: 4096'")
    for key, value in values.items():
        flag = "--" + str(key).replace("_", "-")
        if flag not in flags:
            raise UserError(f"--config {file}: {key}: no such flag; --help-all lists them")
        if flag in present or value is None:
            continue
        if isinstance(value, bool):
            yield flag if value else f"--no-{flag.removeprefix('--')}"
            continue
        for each in value if isinstance(value, list) else [value]:
            yield flag
            yield json.dumps(each) if isinstance(each, dict) else str(each)
