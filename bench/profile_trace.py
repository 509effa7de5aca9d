"""What a profiler's trace says: the activities of each step, and tables of them.

A Chrome trace goes in (``read_trace``); rows a kernel, a layer's pattern and the busy time of each
step come out, as plain data.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}


@dataclass(frozen=True)
class Activity:
    """A kernel, copy or fill, or on a CPU an operator without those it calls; us."""

    name: str
    shapes: str
    step: int
    start_us: float
    end_us: float
    us: float
    cpu_us: float
    """Time of the launch on the CPU; a graph's is shared evenly by what it launches."""


def read_trace(
    events: Sequence[Mapping[str, Any]], steps: Sequence[int], *, shapes: bool = False
) -> list[Activity]:
    """What the steps of a Chrome trace ran, in order of start.

    A step is the annotation ``step N``; a kernel belongs to the one its launch lies in.  Where
    nothing ran on a GPU: operators, each without the time of those it calls.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    windows = sorted(
        (event["ts"], event["ts"] + event["dur"], int(event["name"][5:]))
        for event in spans
        if event.get("cat") == "user_annotation" and event["name"].startswith("step ")
    )
    starts = [window[0] for window in windows]

    def step_at(moment: float) -> int | None:
        place = bisect_right(starts, moment) - 1
        return windows[place][2] if place >= 0 and moment < windows[place][1] else None

    on_gpu = [event for event in spans if event.get("cat") in GPU]
    if on_gpu:
        first = windows[0][2] if windows else None
        activities = _kernels(on_gpu, spans, step_at, first, shapes=shapes)
    else:
        on_cpu = [event for event in spans if event.get("cat") == "cpu_op"]
        activities = _operators(on_cpu, step_at, shapes=shapes)
    wanted = set(steps)
    return [activity for activity in activities if activity.step in wanted]


def _kernels(
    on_gpu: Sequence[Mapping[str, Any]],
    spans: Sequence[Mapping[str, Any]],
    step_at: Callable[[float], int | None],
    first: int | None,
    *,
    shapes: bool,
) -> list[Activity]:
    launches = {
        event["args"]["correlation"]: event
        for event in spans
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    of_launch = Counter(event["args"].get("correlation") for event in on_gpu)
    kernels, step = [], first
    for event in sorted(on_gpu, key=lambda event: cast(float, event["ts"])):
        args = event["args"]
        launch = launches.get(args.get("correlation"))
        cpu_us = 0.0
        if launch is not None:  # else it runs in order behind the one before
            step = step_at(launch["ts"])
            cpu_us = launch["dur"] / of_launch[args["correlation"]]
        if step is None:
            continue
        label = f"grid {args['grid']} block {args['block']}" if shapes and "grid" in args else ""
        start, us = event["ts"], event["dur"]
        kernels.append(Activity(event["name"], label, step, start, start + us, us, cpu_us))
    return kernels


def _operators(
    operators: Sequence[Mapping[str, Any]], step_at: Callable[[float], int | None], *, shapes: bool
) -> list[Activity]:
    inner = [0.0] * len(operators)
    order = sorted(operators, key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    around: list[int] = []
    for place, event in enumerate(order):
        while around and (
            order[around[-1]]["tid"] != event["tid"]
            or order[around[-1]]["ts"] + order[around[-1]]["dur"] <= event["ts"]
        ):
            around.pop()
        if around:
            inner[around[-1]] += event["dur"]
        around.append(place)
    activities = []
    for event, inside in zip(order, inner, strict=True):
        step = step_at(event["ts"])
        if step is not None:
            dims = event.get("args", {}).get("Input Dims") if shapes else None
            us = max(0.0, event["dur"] - inside)
            label = json.dumps(dims) if dims else ""
            start, end = event["ts"], event["ts"] + event["dur"]
            activities.append(Activity(event["name"], label, step, start, end, us, us))
    return sorted(activities, key=lambda activity: activity.start_us)


def kernel_rows(
    activities: Sequence[Activity], num_steps: int, num_layers: int, total_us: float | None = None
) -> list[dict[str, Any]]:
    """One row a kernel and shape, the costliest first; times in us, shares of ``total_us``, the
    sum of all if None."""
    groups: dict[tuple[str, str], list[Activity]] = defaultdict(list)
    for activity in activities:
        groups[activity.name, activity.shapes].append(activity)
    total = total_us or sum(activity.us for activity in activities) or 1.0
    rows = []
    for (name, shapes), group in groups.items():
        us, calls = sum(activity.us for activity in group), len(group) / num_steps
        rows.append(
            {
                "kernel": name,
                "shapes": shapes,
                "calls_a_step": calls,
                "calls_a_layer": calls / num_layers,
                "us_each": us / len(group),
                "us_a_step": us / num_steps,
                "cpu_us_a_step": sum(activity.cpu_us for activity in group) / num_steps,
                "share": us / total,
            }
        )
    return sorted(rows, key=lambda row: -cast(float, row["us_a_step"]))


@dataclass(frozen=True)
class Period:
    """Activities ``start`` to ``stop`` of a step repeat every ``period``."""

    start: int
    stop: int
    period: int


def layer_groups(activities: Sequence[Activity], num_steps: int, num_layers: int) -> dict[str, Any]:
    """What runs in the layers and what once a step: rows as of ``kernel_rows``, and their sums.

    The layers are the part of a step that repeats ``num_layers`` times; ``pattern`` is one turn of
    it.  Where nothing does: the kernels that occur a multiple of ``num_layers`` times, and no
    pattern.
    """
    steps: dict[int, list[Activity]] = defaultdict(list)
    for activity in activities:
        steps[activity.step].append(activity)
    known: dict[tuple[str, ...], Period | None] = {}
    inside: list[Activity] = []
    outside: list[Activity] = []
    pattern, turns = None, 0.0
    for group in steps.values():
        names = tuple(activity.name for activity in group)
        if names not in known:
            known[names] = find_repeat(names, num_layers)
        repeat = known[names]
        if repeat is None:
            counts = Counter(names)
            for activity in group:
                (outside if counts[activity.name] % num_layers else inside).append(activity)
            turns += num_layers
            continue
        inside += group[repeat.start : repeat.stop]
        outside += group[: repeat.start] + group[repeat.stop :]
        pattern = list(names[repeat.start : repeat.start + repeat.period])
        turns += (repeat.stop - repeat.start) / repeat.period
    total = sum(activity.us for activity in activities)
    groups: dict[str, Any] = {"num_layers": num_layers, "pattern": pattern}
    for title, chosen in (("in_layers", inside), ("once_a_step", outside)):
        rows = kernel_rows(chosen, num_steps, num_layers, total)
        sums = ("calls_a_step", "us_a_step", "cpu_us_a_step", "share")
        groups[title] = {**{key: sum(row[key] for row in rows) for key in sums}, "rows": rows}
    groups["us_a_layer"] = sum(activity.us for activity in inside) / (turns or 1.0)
    return groups


def find_repeat(names: Sequence[str], num_layers: int) -> Period | None:
    """The longest part of ``names`` that repeats, ``num_layers`` times or once less: the first or
    last may differ.  None where no part that is half of all does."""
    best = None
    if num_layers < 3:
        return None
    for period in range(1, len(names) // (num_layers - 1) + 1):
        run, longest, end = 0, 0, 0
        for place in range(len(names) - period):
            run = run + 1 if names[place] == names[place + period] else 0
            if run > longest:
                longest, end = run, place + 1
        start, length = end - longest, longest + period
        if length < (num_layers - 1) * period or 2 * length < len(names):
            continue
        length = min(length, num_layers * period)
        if best is None or length > best.stop - best.start:
            best = Period(start, start + length, period)
    return best


def busy_times(activities: Sequence[Activity]) -> dict[int, dict[str, float]]:
    """For each step, in us: busy, idle between its first and last activity, and idle before it,
    since the end of the step before.  What runs at the same time counts once."""
    steps: dict[int, list[Activity]] = defaultdict(list)
    for activity in activities:
        steps[activity.step].append(activity)
    times: dict[int, dict[str, float]] = {}
    end = None
    for step in sorted(steps):
        group = steps[step]
        busy, reached = 0.0, group[0].start_us
        for activity in group:
            busy += max(0.0, activity.end_us - max(reached, activity.start_us))
            reached = max(reached, activity.end_us)
        before = 0.0 if end is None else max(0.0, group[0].start_us - end)
        inside = reached - group[0].start_us - busy
        times[step] = {"busy": busy, "idle_inside": inside, "idle_before": before}
        end = reached
    return times
