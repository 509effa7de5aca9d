"""The requests that ``bench serve`` and ``tune serve`` send, and their flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...config import EngineOptions, UserError
from ...config.numbers import MOST_REQUESTS, check_counts

if TYPE_CHECKING:
    from ...bench.workloads import Work

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
        Path | None,
        typer.Option(help='Of sharegpt; of sonnet: any text; of jsonl: {"prompt": "…"} a line.'),
    ] = None
    num_prompts: Annotated[int, typer.Option(help="Requests.")] = 500
    input_len: Annotated[int, typer.Option(help="Prompt tokens of random, prefix, sonnet.")] = 1024
    output_len: Annotated[
        int, typer.Option(help="Output tokens of random, prefix, sonnet, jsonl.")
    ] = 128
    request_rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests a second; inf: all at once. Several: a run each."),
    ] = None
    burstiness: Annotated[
        float, typer.Option(help="1: Poisson arrivals; less: bursts; inf: constant.")
    ] = 1.0

    def __post_init__(self) -> None:
        check_counts(1, MOST_REQUESTS, num_prompts=self.num_prompts)
        check_counts(1, input_len=self.input_len, output_len=self.output_len)
        for rate in (*self.rates, self.burstiness):
            if not rate > 0:
                raise UserError(f"request_rate or burstiness {rate}: expected more than 0")

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(self.request_rate or ())

    @property
    def implied(self) -> dict[str, Any]:
        """Engine options that hold unless others are given: the runs repeat their prompts."""
        return {"enable_prefix_caching": self.dataset == "prefix"}

    def works(self, options: dict[str, Any]) -> list[Work]:
        """The requests, in tokens of the model's folder."""
        from ...bench.datasets import make_works
        from ...engine.frontend.tokenizer import Tokenizer
        from ...model_executor.hf_config import model_folder, read_spec

        folder = model_folder(options.get("model", EngineOptions().model))
        spec = read_spec(folder)
        encode = None
        if self.dataset_path is not None:
            encode = Tokenizer(model_folder(options.get("tokenizer") or str(folder))).encode
        return make_works(
            self.dataset,
            self.num_prompts,
            vocab_size=spec.vocab_size,
            max_model_len=options.get("max_model_len") or spec.max_position_embeddings,
            input_len=self.input_len,
            output_len=self.output_len,
            file=self.dataset_path,
            encode=encode,
        )
