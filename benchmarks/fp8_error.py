"""FP8 beside the same weights in 16 bits: relative error of the logits, and time per output token.

``python -m fusewright.benchmarks.fp8_error MODEL --batch 1 64 --output FILE`` on random weights: a
scheme quantizes what the unquantized model draws from the same seed, so that the error is its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bench.environment import environment
from ..bench.latency import measure_latency
from ..engine.engine import Engine
from ..engine.llm import LLM

VARIANTS = (
    (None, "auto"),
    (None, "fp8"),
    ("fp8", "auto"),
    ("fp8", "fp8"),
    ("fp8_block", "auto"),
    ("fp8_block", "fp8"),
    ("fp8_static", "auto"),
    ("fp8_static", "fp8"),
)
PROMPT_TOKENS = (16, 64, 128, 256) * 4


@torch.inference_mode()
def prefill_logits(engine: Engine, prompts: list[list[int]]) -> Tensor:
    """[len(prompts), vocabulary] float32 on the CPU, of each prompt's last token, in one step of an
    engine at rest."""
    block_size = engine.config.cache.block_size
    needed = [-(-len(prompt) // block_size) for prompt in prompts]
    positions: list[int] = []
    slots: list[int] = []
    table: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        first = sum(needed[:i])
        positions += range(len(prompt))
        slots += range(first * block_size, first * block_size + len(prompt))
        table.append([*range(first, first + needed[i]), *[0] * (max(needed) - needed[i])])
    values: dict[str, Any] = {
        "input_ids": [token for prompt in prompts for token in prompt],
        "positions": positions,
        "slot_mapping": slots,
        "block_table": table,
        "seq_lens": [len(prompt) for prompt in prompts],
        "query_start_loc": [sum(map(len, prompts[:i])) for i in range(len(prompts) + 1)],
    }
    device = engine.config.hardware.device
    inputs = {k: torch.tensor(v, dtype=torch.int32, device=device) for k, v in values.items()}
    logits: Tensor = engine.compiled.program.run(inputs)
    return logits.float().cpu()


def relative_errors(got: Tensor, expected: Tensor) -> Tensor:
    """Norm of the difference over norm of what was expected, by row."""
    errors: Tensor = (got - expected).norm(dim=1) / expected.norm(dim=1)
    return errors


def measure(
    model: str, variant: tuple[str | None, str], batches: list[int], **options: Any
) -> tuple[dict[str, Any], Tensor]:
    """A row of results without its error, and the logits."""
    quantization, kv_cache_dtype = variant
    llm = LLM(
        model,
        load_format="dummy",
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        **options,
    )
    assert isinstance(llm.engine, Engine)
    vocab_size = llm.engine.inputs.vocab_size
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in range(n)] for n in PROMPT_TOKENS]
    logits = prefill_logits(llm.engine, prompts)
    if not logits.isfinite().all():
        raise RuntimeError(f"{quantization}, KV cache {kv_cache_dtype}: logits are not finite")
    report = llm.report()
    row = {
        "quantization": quantization or "none",
        "kv_cache_dtype": kv_cache_dtype,
        "weight_bytes": report["memory"]["weights"],
        "passes": report["passes"],
        "choices": report["choices"],
        "tpot": [measure_latency(llm, batch) for batch in batches],
    }
    return row, logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("-O", dest="level", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    expected: Tensor | None = None
    for variant in VARIANTS:
        row, logits = measure(
            args.model,
            variant,
            args.batch,
            optimization_level=args.level,
            max_model_len=args.max_model_len,
            gpu_memory_utilization=0.85,
        )
        expected = logits if expected is None else expected
        error = relative_errors(logits, expected)
        same = (logits.argmax(1) == expected.argmax(1)).float().mean()
        row |= {"error_median": error.median().item(), "error_max": error.max().item()}
        row["same_argmax"] = same.item()
        rows.append(row)
        print(json.dumps({k: v for k, v in row.items() if k not in ("passes", "choices")}))
        gc.collect()
        torch.cuda.empty_cache()
        if args.output:
            text = json.dumps({"environment": environment(), "rows": rows}, indent=1)
            args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
