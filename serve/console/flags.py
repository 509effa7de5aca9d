"""Command-line flags made from option lists: ``EngineOptions`` is one, ``SAMPLING`` the other; and
those that several commands declare.

A flag that is not given stays ``None`` and is left out of what the command receives, so that
defaults live in one place and an explicit flag can win over its level.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import typer

from ...config import EngineOptions, OptionSpec, UserError, option_specs
from ...config.options import SYNONYMS
from ...config.ports import at_revision
from ...config.speculative import DRAFTERS, LOOKUP_METHODS, METHODS, with_fields
from ...config.weight_format import why_no_choice
from .help import HELP_ALL
from .options import merge

Command = Callable[..., Any]

_Model = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help=f"Same as --model. [default: {EngineOptions().model}]"),
]
TargetSm = Annotated[
    int | None, typer.Option(help="For this compute capability, such as 90, in place of the GPU's.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Print errors as numbers, and all that was recorded.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; all else goes to stderr.")]


def _sampling(name: str, kind: str, text: str, default: Any = None, flag: str = "") -> OptionSpec:
    flag = flag or "--" + name.replace("_", "-")
    return OptionSpec(name, flag, kind, default, "sampling", text, ())


DEFAULT_MAX_TOKENS = 256
"""Default of the command line.  ``SamplingParams`` has vLLM's 16, which is too short to read."""

SAMPLING: tuple[OptionSpec, ...] = (
    _sampling("max_tokens", "int", "most tokens to generate", DEFAULT_MAX_TOKENS),
    _sampling("temperature", "float", "0 is greedy", 1.0),
    _sampling("top_p", "float", "smallest set of tokens with this probability", 1.0),
    _sampling("top_k", "int", "most likely tokens to choose from; 0 is all", 0),
    _sampling("min_p", "float", "least probability, as a share of the best token's", 0.0),
    _sampling(
        "seed",
        "int",
        "of the random choices of each request; --seed is the engine's",
        flag="--sampling-seed",
    ),
    _sampling("stop", "list[str]", "stop before this text (repeatable)"),
    _sampling("ignore_eos", "bool", "generate on past the end-of-sequence token", False),
    _sampling("repetition_penalty", "float", "above 1 discourages what occurred", 1.0),
    _sampling("presence_penalty", "float", "subtracted once from what was generated", 0.0),
    _sampling("frequency_penalty", "float", "subtracted per occurrence generated", 0.0),
    _sampling("logprobs", "int", "log probabilities of this many tokens a step; needs --json"),
    _sampling("n", "int", "outputs a prompt", 1),
)

REVISION = OptionSpec(
    "revision", "--revision", "str", None, "model", "branch, tag or commit on the Hub", ()
)


def _spec(name: str, kind: str, text: str) -> OptionSpec:
    return OptionSpec(name, "--" + name.replace("_", "-"), kind, None, "scheduler", text, ())


_METHOD = f"method of --speculative-config: {', '.join(METHODS)}"
_NONE = {"no model": ", ".join(LOOKUP_METHODS)}
_LOADED = {drafter: method for method, drafter in DRAFTERS.items() if drafter}
_DRAFTER = "; ".join(f"{drafter} ({methods})" for drafter, methods in (_LOADED | _NONE).items())
DRAFT_FLAGS = {
    "method": _spec("spec_method", "str", _METHOD),
    "num_speculative_tokens": _spec("spec_k", "int", "its num_speculative_tokens"),
    "model": _spec("spec_model", "str", f"its model, DIR or ORG/NAME: {_DRAFTER}"),
}
"""Short flags for fields of ``speculative_config``."""
ENGINE_FLAGS = (*option_specs(), REVISION, *DRAFT_FLAGS.values())

_SHORT = {"optimization_level": "-O"}
_METAVARS = {
    "model": "DIR|ORG/NAME|abacus",
    "quantization": "FORMAT",
    "tokenizer": "DIR|ORG/NAME",
    "passes": "PASS,…",
    "disable_passes": "PASS,…",
    "require_fusion": "PASS[:N],…",
    "kernels": "OP=IMPL,…",
    "compile_cache_dir": "DIR,…",
    "trusted_keys": "PEM,…",
}
_HELP_ALL = inspect.Parameter(
    HELP_ALL,
    inspect.Parameter.KEYWORD_ONLY,
    default=typer.Option(False, f"--{HELP_ALL.replace('_', '-')}", help="Show every option."),
    annotation=bool,
)


def takes_flags(**lists: Iterable[OptionSpec]) -> Callable[[Command], Command]:
    """Replaces each named parameter of a command by the flags of a list.

    ``@takes_flags(engine=option_specs())`` on ``def f(prompt, engine)`` gives a command with one
    flag an option; ``engine`` arrives as a dict of the options that were given.
    """
    flags = {parameter: tuple(specs) for parameter, specs in lists.items()}

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapper(**arguments: Any) -> Any:
            del arguments[HELP_ALL]  # GroupedHelp has answered it
            for parameter, specs in flags.items():
                values = {s.name: _joined(s, arguments.pop(_dest(s))) for s in specs}
                arguments[parameter] = {k: v for k, v in values.items() if v not in (None, [])}
            return command(**arguments)

        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p for p in own if p.name not in flags]
        parameters.append(_HELP_ALL)
        parameters += [_parameter(s) for specs in flags.values() for s in specs]
        return _declared(wrapper, parameters)

    return decorate


def engine_flags(command: Command) -> Command:
    """``takes_flags`` for a command whose parameter ``engine`` holds engine options, and
    ``takes_fields`` for its other ones."""
    return takes_flags(engine=ENGINE_FLAGS)(_takes_revision(takes_fields(command)))


def model_flags(command: Command) -> Command:
    """``engine_flags`` for a command that may name its model by an argument too."""
    return takes_flags(engine=ENGINE_FLAGS)(takes_model(takes_fields(command)))


def takes_model(command: Command) -> Command:
    """Gives a command the argument MODEL, which says what ``--model`` of its ``engine`` does."""
    command = _takes_revision(command)

    @functools.wraps(command)
    def wrapper(*, model_argument: str | None, **arguments: Any) -> Any:
        arguments["engine"] = merge(arguments["engine"], model=model_argument)
        return command(**arguments)

    keyword = inspect.Parameter.KEYWORD_ONLY
    model = inspect.Parameter("model_argument", keyword, default=None, annotation=_Model)
    own = inspect.signature(command, eval_str=True).parameters.values()
    return _declared(wrapper, [model, *own])


def _takes_revision(command: Command) -> Command:
    """Makes ``--revision`` a part of the model's name, and the short flags of drafts one of
    ``--speculative-config``."""

    @functools.wraps(command)
    def wrapper(*, engine: dict[str, Any], **arguments: Any) -> Any:
        engine = dict(engine)
        if (revision := engine.pop(REVISION.name, None)) is not None:
            engine["model"] = at_revision(engine.get("model", EngineOptions().model), revision)
        short = {name: engine.pop(spec.name, None) for name, spec in DRAFT_FLAGS.items()}
        if short := {name: value for name, value in short.items() if value is not None}:
            engine["speculative_config"] = with_fields(engine.get("speculative_config"), short)
        return command(engine=engine, **arguments)

    return _declared(wrapper, inspect.signature(command, eval_str=True).parameters.values())


def takes_fields(command: Command) -> Command:
    """Replaces each parameter of a command that is a dataclass by a flag for each of its fields.

    The types of the fields are as typer wants them, and the command receives the dataclass.
    """
    own = inspect.signature(command, eval_str=True).parameters
    kinds: dict[str, Any] = {
        p.name: p.annotation for p in own.values() if is_dataclass(p.annotation)
    }

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> Any:
        for parameter, kind in kinds.items():
            values = {f.name: arguments.pop(f.name) for f in fields(kind)}
            arguments[parameter] = kind(**values)
        return command(**arguments)

    parameters: list[inspect.Parameter] = []
    for parameter in own.values():
        kind = kinds.get(parameter.name)
        flags = inspect.signature(kind, eval_str=True).parameters if kind else {"": parameter}
        parameters += flags.values()
    return _declared(wrapper, parameters)


def _declared(wrapper: Command, parameters: Iterable[inspect.Parameter]) -> Command:
    """``wrapper`` with these parameters, as typer reads them."""
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _dest(spec: OptionSpec) -> str:
    return spec.flag.removeprefix("--").replace("-", "_")


def _joined(spec: OptionSpec, value: Any) -> Any:
    """A flag's value; of a list that is repeated, all items."""
    if value and spec.type.startswith("tuple"):
        return tuple(item for items in value for item in items)
    return value


def _parameter(spec: OptionSpec) -> inspect.Parameter:
    kind, parser, metavar = _TYPES[spec.type.removesuffix(" | None")]
    if spec.choices:
        parser, metavar = functools.partial(_choice, spec), "|".join(spec.choices)
    metavar = _METAVARS.get(spec.name, metavar)
    names = [f"{spec.flag}/--no-{spec.flag.removeprefix('--')}" if kind is bool else spec.flag]
    if spec.alias:
        names.append(spec.alias)
    if spec.name in _SHORT:
        names.insert(0, _SHORT[spec.name])
    shown = "on" if spec.default is True else spec.default
    default = f" [default: {shown}]" if shown is not False and shown not in (None, ()) else ""
    option = typer.Option(
        None,
        *names,
        help=spec.help + default,
        parser=parser,
        metavar=metavar,
        show_default=False,
        rich_help_panel=f"{spec.group.capitalize()} options",
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(_dest(spec), keyword, default=option, annotation=kind | None)


def _choice(spec: OptionSpec, text: str) -> str:
    text = SYNONYMS.get(spec.name, {}).get(text, text)
    if text not in spec.choices:
        if spec.name == "quantization" and (why := why_no_choice(text)):
            raise UserError(f"quantization={text!r}: {why}")
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(spec.choices)}.")
    return text


_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def _integer(text: str) -> int:
    """A number, or one of thousands: ``8k`` is 8000 and ``8K`` 8192, as in vLLM."""
    try:
        if text[-1:] in _UNITS:
            return int(float(text[:-1]) * _UNITS[text[-1]])
        return int(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not an integer such as 8192, 8k or 8K.") from None


def strings(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(item) for item in strings(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of integers such as 1,2,4.") from None


_TYPES: dict[str, tuple[Any, Callable[[str], Any] | None, str | None]] = {
    "str": (str, None, "TEXT"),
    "int": (int, _integer, "INT"),
    "float": (float, None, "FLOAT"),
    "bool": (bool, None, None),
    "list[str]": (list[str], None, "TEXT"),
    # Repeatable lists, each of which is parsed to a tuple: see `_joined`.
    "tuple[str, ...]": (list[str], strings, "A,B,…"),
    "tuple[int, ...]": (list[str], _integers, "1,2,…"),
}
