"""vLLM, by its defaults but for prefix caching."""

from __future__ import annotations

from collections.abc import Sequence

import vllm

from ..workloads import Work
from .peer import PeerOptions, Sampling


class Engine:
    def __init__(self, options: PeerOptions) -> None:
        self.name = f"vllm {vllm.__version__}"
        self.llm = vllm.LLM(
            model=options.model,
            max_model_len=options.max_model_len,
            load_format=options.load_format,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
            gpu_memory_utilization=options.gpu_memory_utilization,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )

    def generate(self, works: Sequence[Work], sampling: Sampling) -> list[int]:
        params = [
            vllm.SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=work.output_len,
                ignore_eos=True,
                detokenize=False,
            )
            for work in works
        ]
        prompts = [{"prompt_token_ids": work.prompt_token_ids} for work in works]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]
