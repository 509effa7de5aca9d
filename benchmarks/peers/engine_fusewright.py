"""This package, every graph captured before the first request."""

from __future__ import annotations

from collections.abc import Sequence

from ...bench.environment import commit
from ...bench.serving import capture_graphs
from ...bench.workloads import Work
from ...engine.llm import LLM
from ...engine.messages.sampling_params import SamplingParams
from .peer import PeerOptions, Sampling


class Engine:
    def __init__(self, options: PeerOptions) -> None:
        self.name = f"fusewright {commit()}"
        self.llm = LLM(**options.for_llm())
        capture_graphs(self.llm.engine)

    def generate(self, works: Sequence[Work], sampling: Sampling) -> list[int]:
        params = [SamplingParams(**sampling.for_request(work)) for work in works]
        prompts = [{"prompt_token_ids": work.prompt_token_ids} for work in works]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]
