"""Time per output token as ../shared/NUMBERS.md defines it: a batch of equal requests, 128 tokens
in; (time for 129 tokens out minus time for 1) / 128, best of two.

``python -m fusewright.bench.tpot MODEL -O 2 --batch 1 64 --json FILE``
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from ..engine.llm import LLM
from ..engine.sampling_params import SamplingParams
from .environment import environment

INPUT_TOKENS = 128
OUTPUT_TOKENS = 129


def measure_tpot(llm: LLM, batch: int, *, vocab_size: int, repeats: int = 2) -> dict[str, float]:
    """Milliseconds a token, and to the first token, for ``batch`` equal requests."""
    rng = random.Random(batch)
    prompts: list[Any] = [
        {"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(INPUT_TOKENS)]}
        for _ in range(batch)
    ]

    def seconds(output_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        if lengths != {output_tokens}:
            raise RuntimeError(f"asked for {output_tokens} tokens, got {sorted(lengths)}")
        return elapsed

    seconds(OUTPUT_TOKENS)
    runs = [(seconds(OUTPUT_TOKENS), seconds(1)) for _ in range(repeats)]
    tpot_ms = min((full - first) / (OUTPUT_TOKENS - 1) * 1e3 for full, first in runs)
    return {"batch": batch, "tpot_ms": tpot_ms, "ttft_ms": min(first for _, first in runs) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("-O", dest="level", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        optimization_level=args.level,
        load_format=args.load_format,
        max_model_len=args.max_model_len,
        gpu_memory_utilization=0.85,
    )
    vocab_size = llm.engine.inputs.vocab_size
    rows = []
    for batch in args.batch:
        rows.append(measure_tpot(llm, batch, vocab_size=vocab_size))
        print(" ".join(f"{key} {value:.3f}" for key, value in rows[-1].items()), flush=True)
    result = {"environment": environment(), "rows": rows, "engine": llm.report()}
    print(json.dumps(result["engine"], indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
