"""Where the time of a steady phase goes: kernels, layers, and CPU against GPU step by step.

``profile_phase`` drives an engine through prefill or decode steps, once undisturbed and once under
torch.profiler, whose trace ``profile_trace`` reads; ``write`` leaves tables and time line as files.
"""

from __future__ import annotations

import csv
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..config import UserError
from ..engine.core.batch import ScheduledStep
from ..engine.engine import Engine
from ..engine.llm import LLM
from ..engine.messages.sampling_params import SamplingParams
from ..engine.messages.step import Batch, PendingStep, StepResult
from ..model_executor.expert_load import Load, describe_load, load_since
from .environment import environment
from .profile_options import ProfileOptions
from .profile_trace import GPU, Activity, busy_times, kernel_rows, layer_groups, read_trace
from .serving import warm_up
from .workloads import equal

CPU_PARTS = ("schedule", "launch", "wait", "update", "rest")
"""Parts of a call of ``step()``.  ``wait``: until the device has finished the step before;
``rest``: outputs and stop strings."""
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class ProfiledStep:
    """One call of ``step()``: what it launched, and its time in us on the CPU's clock.

    ``num_prompts``: those whose last token it computes.
    """

    index: int
    num_seqs: int
    num_tokens: int
    num_prompt_tokens: int
    num_prompts: int
    wall_us: float
    cpu_us: Mapping[str, float]


@dataclass
class PhaseProfile:
    """``undisturbed``: the same steps without the profiler; ``expert_load``: the tokens of each
    expert while the profiler ran, prompts of decoding requests included."""

    options: ProfileOptions
    num_layers: int
    on_gpu: bool
    steps: list[ProfiledStep]
    undisturbed: list[ProfiledStep]
    activities: list[Activity]
    expert_load: Load = field(default_factory=dict)


@dataclass
class _Pending:
    pending: PendingStep
    part: Callable[[str], AbstractContextManager[None]]

    @property
    def has_run(self) -> bool:
        return self.pending.has_run

    def result(self) -> StepResult:
        with self.part("wait"):
            return self.pending.result()


@dataclass
class _Stopwatch:
    """Times the parts of ``engine.step()``; with ``annotate`` they are in the trace too."""

    engine: Engine
    annotate: bool
    scheduled: ScheduledStep | None = None
    parts: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        with record_function(name) if self.annotate else nullcontext():
            start = time.perf_counter()
            yield
            self.parts[name] = (time.perf_counter() - start) * 1e6

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Stand between the engine loop and its parts."""
        scheduler: Any = self.engine.core.scheduler
        runner: Any = self.engine.core.runner
        schedule, update, launch = scheduler.schedule, scheduler.update, runner.launch

        def timed_schedule() -> ScheduledStep | None:
            with self.part("schedule"):
                self.scheduled = schedule()
            return self.scheduled

        def timed_update(step: ScheduledStep, result: StepResult) -> Any:
            with self.part("update"):
                return update(step, result)

        def timed_launch(batch: Batch) -> PendingStep:
            with self.part("launch"):
                return _Pending(launch(batch), self.part)

        scheduler.schedule, scheduler.update = timed_schedule, timed_update
        runner.launch = timed_launch
        try:
            yield
        finally:
            del scheduler.schedule, scheduler.update, runner.launch

    def step(self, index: int) -> ProfiledStep | None:
        """One call; None when it launched nothing."""
        self.parts = {}
        start = time.perf_counter()
        with record_function(f"step {index}") if self.annotate else nullcontext():
            self.engine.step()
        wall_us = (time.perf_counter() - start) * 1e6
        if self.scheduled is None:
            return None
        batch = self.scheduled.batch
        left = [
            (e.num_tokens, len(e.request.prompt_token_ids) - e.start)
            for e in self.scheduled.scheduled
        ]
        cpu_us = {name: self.parts.get(name, 0.0) for name in CPU_PARTS}
        cpu_us["rest"] = wall_us - sum(self.parts.values())
        return ProfiledStep(
            index,
            batch.num_seqs,
            batch.num_tokens,
            sum(max(0, min(n, prompt)) for n, prompt in left),
            sum(0 < prompt <= n for n, prompt in left),
            wall_us,
            cpu_us,
        )


def profile_phase(llm: LLM, options: ProfileOptions, trace: Path) -> PhaseProfile:
    """Run and record; leaves the Chrome trace at ``trace`` and the engine at rest.

    Raises:
        UserError: the engine is too small for the requests; the device lets nothing be recorded.
    """
    options.check()
    engine = llm.engine
    assert isinstance(engine, Engine)
    for name, has, needs in (
        ("max_num_seqs", engine.core.scheduler.step_limits.max_num_seqs, options.batch_size),
        ("max_model_len", engine.inputs.max_model_len, options.input_len + options.output_len),
    ):
        if needs > has:
            raise UserError(f"{name}={has}: profiling needs {needs}; raise it or ask for less")
    vocab_size = engine.inputs.vocab_size
    warm_up(engine, equal(options.batch_size, options.input_len, _WARM_UP_TOKENS, vocab_size))
    undisturbed = drive(engine, options)
    before = engine.expert_load()
    on_gpu = engine.config.hardware.device == "cuda"
    profiler = profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        record_shapes=options.record_shapes,
        profile_memory=options.profile_memory,
        with_stack=options.with_stack,
    )
    steps = drive(engine, options, profiler)
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(errors="replace"))["traceEvents"]
    activities = read_trace(events, [step.index for step in steps], shapes=options.record_shapes)
    if on_gpu and not any(event.get("cat") in GPU for event in events):
        raise UserError(
            "profile: torch.profiler saw no kernel; let CUPTI record on this machine "
            "(no other profiler attached, NVreg_RestrictProfilingToAdminUsers=0)"
        )
    load = load_since(engine.expert_load(), before)
    num_layers = engine.spec.num_layers
    return PhaseProfile(options, num_layers, on_gpu, steps, undisturbed, activities, load)


def drive(
    engine: Engine, options: ProfileOptions, profiler: profile | None = None
) -> list[ProfiledStep]:
    """The steady steps after the delay.  Prefill is kept steady by new prompts as soon as the last
    ones are scheduled; decode ends with the first step that has not all requests."""
    decode = options.phase == "decode"
    watch = _Stopwatch(engine, annotate=profiler is not None)
    ids: list[str] = []
    prompts_done = skipped = index = 0
    kept: list[ProfiledStep] = []
    recording = False
    with ExitStack() as stack:
        stack.callback(come_to_rest, engine, ids)
        stack.enter_context(watch.attached())
        while len(kept) < options.max_iterations:
            if not ids or (prompts_done >= len(ids) and not decode):
                ids += _submit(engine, options, seed=len(ids) // options.batch_size)
            in_phase = not decode or prompts_done >= len(ids)
            if in_phase and not recording and skipped == options.delay_iterations:
                stack.enter_context(_recorded(profiler))
                recording = True
            step = watch.step(index)
            index += 1
            steady = step is not None and (
                step.num_tokens == step.num_seqs == options.batch_size
                if decode
                else step.num_prompt_tokens > 0
            )
            prompts_done += step.num_prompts if step else 0
            if in_phase and steady and step is not None:
                kept += [step] if recording else []
                skipped += not recording
            elif in_phase and decode:
                break
    if not kept:
        raise UserError(
            f"batch_size={options.batch_size}: after {skipped} steps no more have all requests in "
            "decode; raise output_len, max_num_batched_tokens or gpu_memory_utilization"
        )
    return kept


def _submit(engine: Engine, options: ProfileOptions, seed: int) -> list[str]:
    length = options.output_len if options.phase == "decode" else 1
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    works = equal(options.batch_size, options.input_len, length, engine.inputs.vocab_size, seed)
    return [
        engine.add_request({"prompt_token_ids": w.prompt_token_ids}, params, final_only=True)
        for w in works
    ]


def come_to_rest(engine: Engine, ids: Sequence[str]) -> None:
    """Abort these requests, and read the step in flight."""
    for request_id in ids:
        engine.abort(request_id)
    engine.step()


@contextmanager
def _recorded(profiler: profile | None) -> Iterator[None]:
    _synchronize()
    with profiler or nullcontext():
        yield
        _synchronize()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timeline(profile: PhaseProfile) -> dict[str, Any]:
    """Every step, and medians: busy and idle time of the device, parts of the CPU's; us.

    ``idle_share`` is of the recorded time line; ``undisturbed`` has the times without the profiler,
    and ``busy`` against them: below 0 where the profiler slowed kernels down.
    """
    busy = busy_times(profile.activities)
    steps = []
    for step in profile.steps:
        device = busy.get(step.index, {"busy": 0.0, "idle_inside": 0.0, "idle_before": 0.0})
        steps.append({**asdict(step), **{f"{name}_us": us for name, us in device.items()}})
    names = ("wall_us", "busy_us", "idle_inside_us", "idle_before_us")
    median: dict[str, Any] = {n: statistics.median(s[n] for s in steps) for n in names}
    median["cpu_us"] = _median_parts(profile.steps)
    wall_us = statistics.median(step.wall_us for step in profile.undisturbed)
    spans = {n: sum(s[n] for s in steps) for n in names[1:]}
    whole = sum(spans.values()) or 1.0
    return {
        "num_steps": len(steps),
        "device": "GPU" if profile.on_gpu else "CPU",
        "idle_share": 1 - spans["busy_us"] / whole,
        "idle_inside_share": spans["idle_inside_us"] / whole,
        "idle_between_share": spans["idle_before_us"] / whole,
        "median": median,
        "undisturbed": {
            "wall_us": wall_us,
            "cpu_us": _median_parts(profile.undisturbed),
            "idle_share": 1 - median["busy_us"] / wall_us,
        },
        "steps": steps,
    }


def _median_parts(steps: Sequence[ProfiledStep]) -> dict[str, float]:
    return {name: statistics.median(s.cpu_us[name] for s in steps) for name in CPU_PARTS}


def write(profile: PhaseProfile, folder: Path) -> dict[str, Any]:
    """Write ``kernels.csv``, ``kernels.json``, ``layers.json``, ``timeline.json`` and, if recorded,
    ``experts.json``; returns the rows, the groups, the time line and the load of experts."""
    rows = kernel_rows(profile.activities, len(profile.steps), profile.num_layers)
    groups = layer_groups(profile.activities, len(profile.steps), profile.num_layers)
    line = timeline(profile)
    load = describe_load(profile.expert_load)
    about = {"environment": environment(), "options": asdict(profile.options)}
    tables = {"kernels": {"rows": rows}, "layers": groups, "timeline": line}
    if load:
        tables["experts"] = {"rows": load}
    for name, data in tables.items():
        record = {**about, "num_steps": len(profile.steps), **data}
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    with (folder / "kernels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["kernel"])
        writer.writeheader()
        writer.writerows(rows)
    return {"rows": rows, "groups": groups, "timeline": line, "experts": load}
