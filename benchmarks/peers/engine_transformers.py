"""``transformers``' own ``generate`` over a static cache.

For such a cache ``generate`` itself compiles the decode step by ``torch.compile`` with CUDA graphs,
on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from ...bench.workloads import Work
from ...config import UserError
from .peer import PeerOptions, Sampling


class Engine:
    def __init__(self, options: PeerOptions) -> None:
        if options.quantization or options.kv_cache_dtype != "auto":
            raise UserError("transformers is measured without --quantization and --kv-cache-dtype")
        self.name = f"transformers {transformers.__version__}, static cache, torch.compile"
        auto: Any = transformers.AutoModelForCausalLM
        with torch.device("cuda"):
            if options.load_format == "dummy":
                config = transformers.AutoConfig.from_pretrained(options.model)
                self.model = auto.from_config(config, dtype=config.dtype or torch.bfloat16)
            else:
                self.model = auto.from_pretrained(options.model, dtype="auto")
        self.model.eval()

    def generate(self, works: Sequence[Work], sampling: Sampling) -> list[int]:
        """Raises:
        UserError: the prompts or outputs are not all of one length: ``generate`` would compute
            padding, which is no fair comparison.
        """
        lengths = {(len(work.prompt_token_ids), work.output_len) for work in works}
        if len(lengths) > 1:
            raise UserError(
                "transformers is compared by requests of one length; give --throughput nothing"
            )
        ids = torch.tensor([work.prompt_token_ids for work in works], device="cuda")
        [(input_len, output_len)] = lengths
        outputs = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=sampling.temperature > 0,
            cache_implementation="static",
            max_new_tokens=output_len,
            min_new_tokens=output_len,
        )
        return [len(row) - input_len for row in outputs.tolist()]
