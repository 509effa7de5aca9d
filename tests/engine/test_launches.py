"""What ``explain`` predicts of a decode step is what the profiler counts on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fusewright import LLM
from fusewright.bench.profile_trace import read_trace
from fusewright.config import EngineOptions
from fusewright.engine.engine import Engine
from fusewright.engine.explain import explain_model
from fusewright.engine.worker.startup import step_buffers

pytestmark = pytest.mark.gpu
CONFIG = Path(__file__).parents[1] / "serve" / "golden" / "llama3-8b" / "config.json"


def profiled_kernels(engine: Engine, folder: Path) -> list[str]:
    """Names of the kernels of one decode step of one sequence."""
    buffers = step_buffers(engine.spec, engine.config, engine.dispatcher)
    inputs = buffers.dummy(num_tokens=1, num_seqs=1)
    program = engine.compiled.program
    with torch.inference_mode():
        program.run(inputs)  # libraries load their kernels
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            with record_function("step 0"):
                program.run(inputs)
            torch.cuda.synchronize()
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(errors="replace"))["traceEvents"]
    found = [activity.name for activity in read_trace(events, [0])]
    return [name for name in found if not name.startswith(("Memset", "Memcpy"))]


@pytest.mark.parametrize(
    ("quantization", "level"),
    [(None, 2), ("fp8_static", 2), ("fp8", 2), ("fp8_block", 2), (None, 3)],
)
def test_the_launches_of_a_decode_step_are_as_predicted(
    quantization: str | None, level: int, tmp_path: Path
) -> None:
    config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {
        "load_format": "dummy",
        "quantization": quantization,
        "optimization_level": level,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 64,
    }
    llm = LLM(str(tmp_path), **options)
    _, facts = explain_model(EngineOptions(model=str(tmp_path), **options))
    kernels = profiled_kernels(llm.engine, tmp_path)  # type: ignore[arg-type]
    *layers, outside = facts.layers
    assert outside.launches is not None
    per_layer = [n for layer in layers for n in [layer.launches] * len(layer.layers)]
    assert len(per_layer) == 4 and len(set(per_layer)) == 1
    predicted = [call.op for layer in facts.layers for call in layer.calls]
    assert len(kernels) == facts.launches, f"{kernels}\npredicted a layer: {predicted}"
    # The layer shown is one that joins its last linear to the next layer's first; the last cannot.
    alone = 0 if quantization == "fp8_static" else 1
    assert sum(n or 0 for n in per_layer) + outside.launches + alone == facts.launches
