"""``fusewright tune serve``: the scheduler's limits that give a server the most goodput."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...bench.profile_options import PHASES
from ...config import EngineOptions, MachineError, UserError, make_output_folder
from ..console.flags import Json, model_flags
from ..console.options import check_to_measure, writable, write_result
from ..console.table import table
from .measured import check_picture, times_table
from .profile import record_phases
from .workload import GOODPUT_HELP, Workload

if TYPE_CHECKING:
    from ...bench.tune_serve import ServedPoints
    from ...bench.workloads import Work


@dataclass(frozen=True)
class Tried:
    """Flags of the values that are tried."""

    try_seqs: Annotated[
        str, typer.Option(metavar="N,…", help="Values of --max-num-seqs, unless that is given.")
    ] = "32,64,128,256,512"
    try_tokens: Annotated[
        str, typer.Option(metavar="N,…", help="Values of --max-num-batched-tokens, likewise.")
    ] = "1024,2048,4096,8192,16384"


@model_flags
def serve(
    engine: dict[str, Any],
    *,
    goodput: Annotated[list[str] | None, typer.Option(help=GOODPUT_HELP)] = None,
    tried: Tried,
    workload: Workload,
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="Keeps each point; a run goes on from it.")
    ] = Path("tune-serve.json"),
    json_output: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the goodput of each point as a map to this PNG.")
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile/--no-profile", help="Profile the best point, in a folder beside FILE."
        ),
    ] = True,
) -> None:
    """Find the limits of the scheduler that give the most requests a second within --goodput.

    Each point is a server of its own, started warm. Every round keeps the best third of the points
    and sends twice the requests, at the rate of most goodput, which is searched unless
    --request-rate is given. On a GPU the best point is tried with more memory too, upward from
    --gpu-memory-utilization until it no longer fits, unless that is given.
    """
    if not goodput:
        raise UserError("goodput: give the limits that a good request keeps, as --goodput ttft:500")
    options = {**workload.implied, **engine}
    check_to_measure(options)
    seqs = _values("try_seqs", tried.try_seqs, options.pop("max_num_seqs", None))
    tokens = _values("try_tokens", tried.try_tokens, options.pop("max_num_batched_tokens", None))
    writable("output", output)
    check_picture(plot)
    folder = output.with_suffix(".profile")
    for phase in PHASES if profile else ():
        make_output_folder("output", folder / phase)
    from ...bench.http_server import flags_of
    from ...bench.serving import parse_limits
    from ...bench.tune_serve import ServedPoints

    limits = parse_limits(goodput)
    works = workload.works(options, partial(typer.echo, err=json_output))
    points = ServedPoints(options, works, limits, workload.rates, workload.burstiness)
    asked = {"options": options, "workload": asdict(workload), "limits_ms": limits}
    record = _record(output, asked)
    _tune(record, output, (seqs, tokens), points)
    chosen = {**engine, **_point(record["best"])}
    model = str(chosen.pop("model", EngineOptions().model))
    record["command"] = shlex.join(["fusewright", "serve", model, *flags_of(chosen)])
    _keep(output, record)
    _show(record, err=json_output)
    if plot is not None:
        from ...bench.plots import plot as draw

        draw({output.stem: record}, plot)
    if profile:
        record["profile"] = _profile(record["best"], options, works, folder, err=json_output)
        _keep(output, record)
    if json_output:
        typer.echo(json.dumps(record))


def _profile(
    best: dict[str, Any], options: dict[str, Any], works: Sequence[Work], folder: Path, *, err: bool
) -> dict[str, Any]:
    """Profile the best point into ``folder``; returns the kernels and times of each phase."""
    from ...bench.tune_serve import to_profile

    typer.echo("\nprofile of the best point", err=err)
    # Memory beyond what was asked for would leave the profiler none.
    point = _point({**best, "gpu_memory_utilization": None})
    wanted = to_profile(best, works)
    folders = {folder / each.phase: each for each in wanted}
    profiles = record_phases({**options, **point}, folders, folder, err=err)
    return {
        each.phase: {
            "batch_size": each.batch_size,
            "kernels": profiles[each.phase]["rows"],
            "median": profiles[each.phase]["timeline"]["median"],
        }
        for each in wanted
    }


def _values(name: str, text: str, fixed: int | None) -> list[int]:
    """The values to try; the one that is given as an engine option alone."""
    if fixed is not None:
        return [fixed]
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or values[0] < 1:
        raise UserError(f"{name}={text}: expected numbers of at least 1, as 64,128")
    return values


def _record(path: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What the file will hold: begins with the rows of an interrupted run of the same question."""
    from ...bench.environment import environment
    from ...bench.result_file import read_result

    about = environment()
    asked = json.loads(json.dumps({**asked, "device": about["device"]}, default=str))
    rows: list[Any] = []
    if path.exists():
        before = read_result(path, "tune serve", _checked)
        differ = [name for name in asked if before["asked"].get(name) != asked[name]]
        if differ:
            raise UserError(
                f"output={path}: was measured with other {' and '.join(differ)}; remove it, or "
                "give another --output"
            )
        rows = before["rows"]
    return {"environment": about, "asked": asked, "rows": rows}


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    """A record of ours: it has what is read of it.

    Raises:
        KeyError, TypeError: it has not.
    """
    for row in record["rows"]:
        _point(row)
    return {"asked": dict(record["asked"]), "rows": record["rows"]}


def _point(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in _OPTIONS if row[name] is not None}


def _keep(path: Path, record: dict[str, Any]) -> None:
    """Write the file as a whole, or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    write_result(partial, record)
    partial.replace(path)


def _tune(
    record: dict[str, Any], path: Path, values: tuple[list[int], list[int]], measure: ServedPoints
) -> None:
    """Search, and keep every row as soon as it is measured; ``best`` is the best."""
    import torch

    from ...bench.tune_serve import Found, goodput, grid, raise_memory, rounds, search

    workload, options = record["asked"]["workload"], record["asked"]["options"]
    points = grid(*values, measure.longest)
    if not points:
        raise UserError(
            f"try_tokens={values[1]}: all are below try_seqs={values[0]}; every running request "
            "needs one token a step"
        )
    num_prompts = workload["num_prompts"]
    upward = torch.cuda.is_available() and options.get("device") != "cpu"
    upward = upward and "gpu_memory_utilization" not in options
    total = sum(size for size, _ in rounds(len(points), num_prompts))
    known = len(record["rows"])
    if known:
        typer.echo(f"{path} has {known} measurements already", err=True)

    def keep(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
        record["rows"] = rows
        _keep(path, record)
        advance(_cells(row))

    measured = Found(record["rows"], measure, keep)
    try:
        with _progress(total) as advance:
            best = search(points, num_prompts, measured)
            if upward:
                best = raise_memory(best, num_prompts, measured)
    except (KeyboardInterrupt, SystemExit):
        typer.echo(f"{path} keeps what was measured; the same command goes on from it", err=True)
        raise
    if goodput(best) == 0:
        raise MachineError(
            f"no request of any point kept the limits {record['asked']['limits_ms']}; {path} has "
            "the latencies; try higher limits"
        )
    record["best"] = best


@contextmanager
def _progress(total: int) -> Iterator[Callable[[list[str]], None]]:
    """A bar on a terminal, and a line each measurement elsewhere."""
    if not sys.stderr.isatty():
        count = itertools.count(1)
        yield lambda cells: typer.echo(f"{next(count)}/{total}: {_sentence(cells)}", err=True)
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.description}"),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda cells: bar.update(task, advance=1, description=_sentence(cells))


_OPTIONS = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
_HEADING = [*_OPTIONS, "requests", "rate", "goodput", "ttft p99", "tpot p50", "itl p99"]


def _cells(row: dict[str, Any]) -> list[str]:
    options = ["-" if row[name] is None else f"{row[name]:g}" for name in _OPTIONS]
    options.append(str(row["asked"]))
    if "failed" in row:
        return [*options, f"failed: {row['failed']}", "", "", "", ""]
    rate = "at once" if row["request_rate"] is None else f"at {row['request_rate']:.2f}/s"
    times = [row["ttft_ms"]["p99"], row["tpot_ms"]["p50"], row["itl_ms"].get("p99", 0.0)]
    return [*options, rate, f"{row['goodput_per_s']:.2f}/s", *(f"{ms:.1f}" for ms in times)]


def _sentence(cells: list[str]) -> str:
    seqs, tokens, _, requests, rate, goodput = cells[:6]
    text = f"{seqs} requests and {tokens} tokens a step"
    if not goodput:
        return f"{text}: {rate}"
    return f"{text}: {goodput} good of {requests} requests that came {rate}"


def _show(record: dict[str, Any], *, err: bool) -> None:
    """Print all points, the last round first, the best one's latencies, and its command."""
    rows = sorted(record["rows"], key=lambda r: (-r["asked"], -r.get("goodput_per_s", 0.0)))
    typer.echo(table([_HEADING, *map(_cells, rows)]), err=err)
    best = record["best"]
    typer.echo(f"\nbest: {_sentence(_cells(best))}", err=err)
    typer.echo(times_table(best), err=err)
    typer.echo(f"\n{record['command']}", err=err)
