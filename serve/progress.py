"""A batch through the engine, with a bar on a terminal and nothing in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..engine.outputs import RequestOutput
    from ..engine.sampling_params import SamplingParams
    from .prompts import Prompt

# Requests handed over between two looks at the bar; many times what runs at once would be idle
# at each seam, so it is large against the usual batch.
_CHUNK = 1024


def generate(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> list[RequestOutput]:
    """``llm.generate`` over all prompts, in their order."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    outputs: list[RequestOutput] = []
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("requests", total=len(prompts))
        for start in range(0, len(prompts), _CHUNK):
            outputs += llm.generate(prompts[start : start + _CHUNK], params)
            bar.update(task, completed=len(outputs))
    return outputs
