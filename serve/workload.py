"""The requests that ``bench serve`` and ``tune serve`` send, and their flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import EngineOptions, UserError
from ..config.numbers import MOST_REQUESTS, check_counts

if TYPE_CHECKING:
    from ..bench.workloads import Work

Dataset = Annotated[
    str,
    typer.Option(help="chat, prefill-heavy, decode-heavy, random, prefix, sharegpt, sonnet, jsonl"),
]
DatasetPath = Annotated[
    Path | None,
    typer.Option(help='Of sharegpt; of sonnet: any text; of jsonl: {"prompt": "…"} a line.'),
]
NumPrompts = Annotated[int, typer.Option(help="Requests.")]
InputLen = Annotated[int, typer.Option(help="Prompt tokens of random, prefix, sonnet.")]
OutputLen = Annotated[int, typer.Option(help="Output tokens of random, prefix, sonnet, jsonl.")]
Burstiness = Annotated[
    float, typer.Option(help="1: Poisson arrivals; less: bursts; inf: constant.")
]
GOODPUT_HELP = "Limits in ms that a good request keeps: ttft:500, tpot, itl (longest), e2e."


@dataclass(frozen=True)
class Workload:
    """Which requests, and how they arrive.

    Raises:
        UserError: a number is out of its range.
    """

    dataset: str
    dataset_path: Path | None
    num_prompts: int
    input_len: int
    output_len: int
    request_rate: tuple[float, ...]
    burstiness: float

    def __post_init__(self) -> None:
        check_counts(1, MOST_REQUESTS, num_prompts=self.num_prompts)
        check_counts(1, input_len=self.input_len, output_len=self.output_len)
        for rate in (*self.request_rate, self.burstiness):
            if not rate > 0:
                raise UserError(f"request_rate or burstiness {rate}: expected more than 0")

    @property
    def implied(self) -> dict[str, Any]:
        """Engine options that hold unless others are given: the runs repeat their prompts."""
        return {"enable_prefix_caching": self.dataset == "prefix"}

    def works(self, options: dict[str, Any]) -> list[Work]:
        """The requests, in tokens of the model's folder."""
        from ..bench.datasets import make_works
        from ..engine.frontend.tokenizer import Tokenizer
        from ..model_executor.hf_config import model_folder, read_spec

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
