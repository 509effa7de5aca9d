"""The real scheduler and core over a device that only takes time, by a clock of its own.

The times are those of Llama-3-8B in bfloat16 on one H200, so that what a rule of the scheduler does
to latencies and throughput shows without a GPU, the same on every machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fusewright.bench.workloads import Work
from fusewright.engine.core.chunks import StepLimits
from fusewright.engine.core.kv_blocks import BlockPool
from fusewright.engine.core.loop import EngineCore
from fusewright.engine.core.scheduler import Scheduler
from fusewright.engine.messages.requests import AddRequest
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.engine.messages.step import Batch, StepResult

STEP_MS = (
    *((1, 3.75), (8, 3.84), (12, 4.7), (32, 4.75), (64, 5.0), (128, 5.95), (256, 8.1)),
    *((512, 13.5), (1024, 24.0), (2048, 44.0), (8192, 185.0)),
)
"""(tokens, time) of a step.  To 128 tokens they are decodes, of which 12 are the median gap of a
server; 256 are the longest gaps of one with steps of so many tokens; from 2,048 on they are
prompts, and the two between these are fitted."""


def step_ms(num_tokens: int) -> float:
    """Time of a step, between the measured ones in proportion."""
    sizes, times = zip(*STEP_MS, strict=True)
    return float(np.interp(num_tokens, sizes, times))


@dataclass
class _Launched:
    gpu: VirtualGpu
    batch: Batch
    ends_ms: float
    has_run: bool = False

    def result(self) -> StepResult:
        self.gpu.now_ms = max(self.gpu.now_ms, self.ends_ms)
        return StepResult(np.full(self.batch.num_seqs, 7, np.int32))


@dataclass
class VirtualGpu:
    """A runner whose steps take ``step_ms`` each, one behind the other."""

    now_ms: float = 0.0
    free_ms: float = 0.0
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(tokens of decodes, tokens of prompts) of every step."""

    def launch(self, batch: Batch) -> _Launched:
        num_decodes = int((batch.query_lens == 1).sum())
        self.steps.append((num_decodes, batch.num_tokens - num_decodes))
        self.free_ms = max(self.now_ms, self.free_ms) + step_ms(batch.num_tokens)
        return _Launched(self, batch, self.free_ms)

    def check(self) -> None:
        """It never fails."""


@dataclass
class Simulated:
    """The times that requests saw, in ms by the device's clock, and the steps that served them."""

    seconds: float
    gaps: list[float]
    ttft: list[float]
    steps: list[tuple[int, int]]

    @property
    def mixed(self) -> list[int]:
        """Tokens of the steps that had decodes and a part of a prompt."""
        return [sum(step) for step in self.steps if all(step)]


def simulate(
    works: Sequence[Work],
    arrivals_s: Sequence[float],
    max_num_mixed_tokens: int,
    max_step_ms: float = 0.0,
) -> Simulated:
    """Run requests that come at these times through the scheduler of an H200."""
    limits = StepLimits(
        512,
        8192,
        max_model_len=4096,
        max_num_mixed_tokens=max_num_mixed_tokens,
        max_step_s=max_step_ms / 1e3,
    )
    scheduler = Scheduler(BlockPool(50_000, 16), limits)
    gpu = VirtualGpu()
    core = EngineCore(scheduler, gpu, now=lambda: gpu.now_ms / 1e3)
    due = deque((time_s * 1e3, str(number)) for number, time_s in enumerate(arrivals_s))
    arrived = {name: at for at, name in due}
    stamps: dict[str, list[float]] = {name: [] for name in arrived}
    while due or core.num_unfinished:
        if not core.num_unfinished:
            gpu.now_ms = max(gpu.now_ms, due[0][0])
        while due and due[0][0] <= gpu.now_ms:
            name = due.popleft()[1]
            work = works[int(name)]
            params = SamplingParams(max_tokens=work.output_len, ignore_eos=True)
            total = len(work.prompt_token_ids) + work.output_len
            core.add(AddRequest(name, work.prompt_token_ids, params, total))
        tokens = core.step().tokens
        for name in tokens.request_ids if tokens else ():
            stamps[name].append(gpu.now_ms)
    gaps = [gap for times in stamps.values() for gap in np.diff(times).tolist()]
    ttft = [times[0] - arrived[name] for name, times in stamps.items()]
    return Simulated(gpu.now_ms / 1e3, gaps, ttft, gpu.steps)
