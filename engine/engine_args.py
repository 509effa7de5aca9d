"""``EngineArgs`` and ``AsyncEngineArgs``: vLLM's names for the keywords of an ``LLM``, and their
flags for scripts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from ..config import EngineOptions, option_specs
from ..config.vllm import ENGINE

_TYPES = {"int": int, "float": float}
_SPECS = {spec.name: spec for spec in option_specs()}
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys([*_SPECS, *ENGINE]),
    "model": EngineOptions().model,
}


@dataclass
class EngineArgs:
    """Keywords of an ``LLM`` as an object: ``LLM(**vars(args))``, ``LLM(**asdict(args))`` or
    ``LLM.from_engine_args(args)``.  Its fields are those of ``EngineOptions``, and vLLM's others;
    None asks for nothing."""

    __annotations__ = dict.fromkeys(_DEFAULTS, Any)
    vars().update(_DEFAULTS)

    if TYPE_CHECKING:

        def __init__(self, model: str = "abacus", **options: Any) -> None: ...

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each field to a parser of a script."""
        group = parser.add_argument_group("engine options")
        for each in fields(cls):
            spec, more = _SPECS.get(each.name), dict[str, Any]()
            if spec.type == "bool" if spec else ENGINE[each.name].switch:
                more["action"] = argparse.BooleanOptionalAction
            elif spec and spec.type.startswith("tuple"):
                more |= {"nargs": "+", "type": int if "int" in spec.type else str}
            elif spec:
                more["type"] = _TYPES.get(spec.type.removesuffix(" | None"), str)
            says = spec.help if spec else ENGINE[each.name].says
            flag = "--" + each.name.replace("_", "-")
            group.add_argument(flag, default=each.default, help=says.replace("%", "%%"), **more)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The fields that parsed arguments have."""
        named: dict[str, Any] = {f.name: getattr(args, f.name, f.default) for f in fields(cls)}
        return cls(**named)


class AsyncEngineArgs(EngineArgs):
    """The keywords of an ``AsyncLLM``."""
