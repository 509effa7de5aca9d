"""``fusewright profile``: which kernels a steady step runs, and where the device waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ...bench.profile_options import PHASES, ProfileOptions
from ...config import UserError, make_output_folder
from ..console.flags import model_flags
from ..console.options import check_to_measure, load
from ..console.table import table

_ROWS_SHOWN = 24
_NAME_WIDTH = 64


@model_flags
def profile(
    engine: dict[str, Any],
    output: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Folder for the files; made if absent.")
    ],
    *,
    wanted: ProfileOptions,
) -> None:
    """Kernels, layers and a CPU/GPU time line of steady steps, through captured graphs.

    Writes kernels.csv, kernels.json, layers.json, timeline.json and trace.json: a Chrome trace,
    which Perfetto shows, and TensorBoard under a name that ends in .pt.trace.json.  With
    --record-expert-load it also writes experts.json: the tokens of each expert in each layer.
    """
    check_to_measure(engine)
    phase = wanted.phase
    if phase not in (*PHASES, "both"):
        raise UserError(f"phase={phase!r}: expected prefill, decode or both")
    to_profile = {output: wanted}
    if phase == "both":
        to_profile = {output / name: replace(wanted, phase=name) for name in PHASES}
    for each in to_profile.values():
        each.check()
    for folder in to_profile:
        make_output_folder("output", folder)
    record_phases(engine, to_profile, output)


def record_phases(
    options: dict[str, Any],
    to_profile: Mapping[Path, ProfileOptions],
    output: Path,
    *,
    err: bool = False,
) -> dict[str, Any]:
    """Profile an engine of these options.

    Args:
        options: options of the engine.
        to_profile: what to record into each folder, which must exist.
        output: the folder for engine.json, the engine's report.
        err: print the tables to stderr.

    Returns:
        What ``bench.profiling.write`` returns, by phase.

    Raises:
        UserError: an option is bad, or the device does not allow profiling.
    """
    from ...bench.profiling import profile_phase, write

    say = partial(typer.echo, err=err)
    llm = load({"enable_prefix_caching": False, "gpu_memory_utilization": 0.85, **options})
    phases = {}
    for folder, wanted in to_profile.items():
        record = write(profile_phase(llm, wanted, folder / "trace.json"), folder)
        _show(wanted.phase, record, say)
        phases[wanted.phase] = record
    (output / "engine.json").write_text(json.dumps(llm.report(), indent=1) + "\n")
    say(f"wrote {output}")
    return phases


def _show(phase: str, record: dict[str, Any], say: Callable[[str], None]) -> None:
    rows = record["rows"]
    cells = [["kernel", "calls/step", "calls/layer", "us each", "us/step", "CPU us", "share"]]
    for row in rows[:_ROWS_SHOWN]:
        name = row["kernel"] if not row["shapes"] else f"{row['kernel']} {row['shapes']}"
        figures = [f"{row[key]:.2f}" for key in ("calls_a_step", "calls_a_layer")]
        figures += [f"{row[key]:.2f}" for key in ("us_each", "us_a_step", "cpu_us_a_step")]
        cells.append([name[:_NAME_WIDTH], *figures, f"{row['share']:.1%}"])
    say(f"{phase}, {record['timeline']['num_steps']} steps")
    say(table(cells))
    if len(rows) > _ROWS_SHOWN:
        say(f"and {len(rows) - _ROWS_SHOWN} more in kernels.csv")
    groups = record["groups"]
    cells = [["where", "calls/step", "us/step", "us/layer", "CPU us", "share"]]
    for title, name in (("in the layers", "in_layers"), ("once a step", "once_a_step")):
        group = groups[name]
        layer = f"{groups['us_a_layer']:.2f}" if name == "in_layers" else ""
        calls, us, cpu = (group[key] for key in ("calls_a_step", "us_a_step", "cpu_us_a_step"))
        share = f"{group['share']:.1%}"
        cells.append([title, f"{calls:.1f}", f"{us:.1f}", layer, f"{cpu:.1f}", share])
    say("\n" + table(cells))
    _show_experts(record["experts"], say)
    _show_timeline(record["timeline"], say)


def _show_experts(layers: list[dict[str, Any]], say: Callable[[str], None]) -> None:
    if not layers:
        return
    cells = [["experts of layer", "choices", "busiest", "its share", "over the mean", "idle"]]
    for layer in layers:
        counts = layer["tokens"]
        total, most = sum(counts), max(counts)
        figures = [str(counts.index(most)), f"{most / max(1, total):.1%}"]
        figures += [f"{layer['most_over_mean']:.2f}", str(layer["idle"])]
        cells.append([str(layer["layer"]), str(total), *figures])
    say("\n" + table(cells))


def _show_timeline(line: dict[str, Any], say: Callable[[str], None]) -> None:
    parts = list(line["median"]["cpu_us"])
    cells = [["median step, us", "wall", *(f"CPU {part}" for part in parts)]]
    for title, times in (("recorded", line["median"]), ("undisturbed", line["undisturbed"])):
        figures = [times["wall_us"], *times["cpu_us"].values()]
        cells.append([title, *(f"{value:.1f}" for value in figures)])
    say("\n" + table(cells))
    median = line["median"]
    between, inside = line["idle_between_share"], line["idle_inside_share"]
    told = f"busy {median['busy_us']:.1f} us a step, idle {line['idle_share']:.1%}: "
    told += f"{between:.1%} between steps, {inside:.1%} inside"
    if line["device"] == "GPU":  # the profiler slows operators down, kernels hardly
        told += f"; of an undisturbed step {line['undisturbed']['idle_share']:.1%}"
    say(f"{line['device']} {told}")
