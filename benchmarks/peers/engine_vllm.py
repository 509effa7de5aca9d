"""vLLM, by its defaults but for prefix caching."""

from __future__ import annotations

from collections.abc import Sequence

import vllm

from ...bench.workloads import Work
from .peer import PeerOptions, Sampling


class Engine:
    def __init__(self, options: PeerOptions) -> None:
        self.name = f"vllm {vllm.__version__}"
        self.llm = vllm.LLM(**options.for_llm(), skip_tokenizer_init=True)

    def generate(self, works: Sequence[Work], sampling: Sampling) -> list[int]:
        params = [
            vllm.SamplingParams(**sampling.for_request(work), detokenize=False) for work in works
        ]
        prompts = [{"prompt_token_ids": work.prompt_token_ids} for work in works]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]
