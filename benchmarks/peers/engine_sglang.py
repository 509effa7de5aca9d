"""SGLang, by its defaults but for the radix cache."""

from __future__ import annotations

from collections.abc import Sequence

import sglang

from ...bench.workloads import Work
from .peer import PeerOptions, Sampling


class Engine:
    def __init__(self, options: PeerOptions) -> None:
        self.name = f"sglang {sglang.__version__}"
        self.engine = sglang.Engine(
            model_path=options.model,
            context_length=options.max_model_len,
            load_format=options.load_format,
            quantization=options.quantization,
            kv_cache_dtype="fp8_e4m3" if options.kv_cache_dtype == "fp8" else "auto",
            mem_fraction_static=options.gpu_memory_utilization,
            disable_radix_cache=True,
            skip_tokenizer_init=True,
        )

    def generate(self, works: Sequence[Work], sampling: Sampling) -> list[int]:
        params = [
            {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_new_tokens": work.output_len,
                "ignore_eos": True,
            }
            for work in works
        ]
        outputs = self.engine.generate(
            input_ids=[work.prompt_token_ids for work in works], sampling_params=params
        )
        return [output["meta_info"]["completion_tokens"] for output in outputs]
