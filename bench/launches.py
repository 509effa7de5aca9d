"""Kernels that a decode step launches, by the profiler: names, counts a layer, GPU time.

``python -m fusewright.bench.launches MODEL -O 2 --batch 1 --json FILE``
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..engine.llm import LLM
from ..engine.sampling_params import SamplingParams
from .environment import environment

STEPS = 16


def profile_decode(llm: LLM, batch: int, num_layers: int) -> list[dict[str, Any]]:
    """GPU kernels of steady decode steps at ``batch``: launches a step and a layer, us a step.

    Graphs are profiled as they replay.  Copies and fills count: they are launches too.
    """
    params = SamplingParams(temperature=0.0, max_tokens=STEPS + 32, ignore_eos=True)
    engine = llm.engine
    for index in range(batch):
        engine.add_request({"prompt_token_ids": [1 + index % 100] * 128}, params, final_only=True)
    for _ in range(12):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    while engine.has_unfinished():
        engine.step()
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            totals[event.name][0] += 1
            totals[event.name][1] += event.device_time
    rows = [
        {
            "kernel": name,
            "a_step": count / STEPS,
            "a_layer": count / STEPS / num_layers,
            "us_a_step": us / STEPS,
            "us_each": us / count,
        }
        for name, (count, us) in totals.items()
    ]
    return sorted(rows, key=lambda row: -float(row["us_a_step"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("-O", dest="level", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        optimization_level=args.level,
        load_format="dummy",
        max_model_len=4096,
        cudagraph_capture_sizes=tuple(args.batch),
    )
    num_layers = llm.report()["num_layers"]
    result: dict[str, Any] = {"environment": environment(), "num_layers": num_layers}
    for batch in args.batch:
        rows = profile_decode(llm, batch, num_layers)
        result[f"batch_{batch}"] = rows
        print(
            f"-O{args.level}, batch {batch}: {sum(r['a_step'] for r in rows):.1f} launches a step"
        )
        for row in rows[:24]:
            print(
                f"{row['a_step']:7.1f} {row['a_layer']:6.2f} a layer {row['us_a_step']:8.1f} us "
                f"{row['us_each']:7.2f} us each  {row['kernel'][:90]}"
            )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
