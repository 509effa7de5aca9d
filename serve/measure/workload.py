"""The requests that benches of throughput and ``tune serve`` make, how often, and their flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...config import EngineOptions, UserError
from ...config.numbers import MOST_REQUESTS, check_counts

if TYPE_CHECKING:
    from ...bench.workloads import Work

_INPUT_LEN, _OUTPUT_LEN = 1024, 128
_OWN = ("chat", "prefill-heavy", "decode-heavy", "sharegpt")
_OWN_LENGTHS = {"input_len": (*_OWN, "jsonl"), "output_len": _OWN}
"""The data sets that have lengths of their own, by the flag that says none to them."""
_INFINITE = {"request_rate": "all at once", "burstiness": "constant arrivals"}
GOODPUT_HELP = "Limits in ms that a good request keeps: ttft:500, tpot, itl (longest), e2e."


@dataclass(frozen=True)
class Workload:
    """Which requests, and how they arrive; flags are made of the fields (``takes_fields``).

    Raises:
        UserError: a number is out of its range.
    """

    dataset: Annotated[
        str,
        typer.Option(
            help="chat, prefill-heavy, decode-heavy, random, prefix, sharegpt, sonnet, jsonl"
        ),
    ] = "chat"
    dataset_path: Annotated[
        Path | None, typer.Option(help="File of sharegpt, sonnet (any text) or jsonl.")
    ] = None
    num_prompts: Annotated[int, typer.Option(help="Requests.")] = 500
    input_len: Annotated[
        int | None,
        typer.Option(help="Of prompts: random, prefix, sonnet. [default: 1024]"),
    ] = None
    output_len: Annotated[
        int | None, typer.Option(help="Of outputs: the same, and jsonl. [default: 128]")
    ] = None
    request_rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests a second; inf: at once. Several: a run each."),
    ] = None
    burstiness: Annotated[float, typer.Option(help="1: Poisson; less: bursts; inf: even.")] = 1.0

    def __post_init__(self) -> None:
        check_counts(1, MOST_REQUESTS, num_prompts=self.num_prompts)
        for name, ignored_by in _OWN_LENGTHS.items():
            length = getattr(self, name)
            check_counts(1, **({} if length is None else {name: length}))
            if length is not None and self.dataset in ignored_by:
                raise UserError(
                    f"{name}={length}: requests of the data set {self.dataset} have lengths of "
                    "their own; add --dataset random, or leave it out"
                )
        for name, values in (("request_rate", self.rates), ("burstiness", (self.burstiness,))):
            for value in values:
                if not value > 0:
                    raise UserError(
                        f"{name}={value}: expected more than 0; inf is {_INFINITE[name]}"
                    )

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(self.request_rate or ())

    @property
    def implied(self) -> dict[str, Any]:
        """Engine options that hold unless others are given: the runs repeat their prompts."""
        return {"enable_prefix_caching": self.dataset == "prefix"}

    def about(self, rate: float) -> dict[str, Any]:
        """What a row of a result says of its requests."""
        return {"workload": self.dataset, "request_rate": None if rate == inf else rate}

    def works(self, options: dict[str, Any], say: Callable[[str], None]) -> list[Work]:
        """The requests, in tokens of the model's folder.

        Args:
            options: engine options.
            say: is told if the lengths are scaled.
        """
        from ...bench.datasets import make_works
        from ...engine.frontend.tokenizer import Tokenizer
        from ...model_executor.hf_config import model_folder, read_spec

        folder = model_folder(options.get("model", EngineOptions().model))
        spec = read_spec(folder)
        encode = None
        if self.dataset_path is not None:
            encode = Tokenizer(model_folder(options.get("tokenizer") or str(folder))).encode
        max_model_len = options.get("max_model_len") or spec.max_position_embeddings
        works, scale = make_works(
            self.dataset,
            self.num_prompts,
            vocab_size=spec.vocab_size,
            max_model_len=max_model_len,
            input_len=self.input_len or _INPUT_LEN,
            output_len=self.output_len or _OUTPUT_LEN,
            file=self.dataset_path,
            encode=encode,
        )
        if scale < 1:
            say(
                f"{self.dataset}: all lengths are multiplied by {scale:.3f}, so that the longest "
                f"request fits into {max_model_len=}"
            )
        return works


@dataclass(frozen=True)
class Runs:
    """Flags of the runs that are measured.

    Raises:
        UserError: a number is out of its range.
    """

    goodput: Annotated[list[str] | None, typer.Option(help=GOODPUT_HELP)] = None
    repeats: Annotated[int, typer.Option(help="Runs of each, of which the best counts.")] = 1

    def __post_init__(self) -> None:
        check_counts(1, repeats=self.repeats)
