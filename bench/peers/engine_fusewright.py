"""This package, every graph captured before the first request."""

from __future__ import annotations

from collections.abc import Sequence

from ...engine.llm import LLM
from ...engine.messages.sampling_params import SamplingParams
from ..environment import commit
from ..serving import capture_graphs
from ..workloads import Work
from .peer import PeerOptions, Sampling


class Engine:
    def __init__(self, options: PeerOptions) -> None:
        self.name = f"fusewright {commit()}"
        self.llm = LLM(
            model=options.model,
            max_model_len=options.max_model_len,
            load_format=options.load_format,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
            gpu_memory_utilization=options.gpu_memory_utilization,
            enable_prefix_caching=False,
        )
        capture_graphs(self.llm.engine)

    def generate(self, works: Sequence[Work], sampling: Sampling) -> list[int]:
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=work.output_len,
                ignore_eos=True,
            )
            for work in works
        ]
        prompts = [{"prompt_token_ids": work.prompt_token_ids} for work in works]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]
