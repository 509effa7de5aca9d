"""``fusewright tune``: measures choices of kernels and of a server, and keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...config import UserError, make_output_folder
from ...config.device_table import file_name, find_experts, read_table
from ...config.expert_tables import Experts, installed_triton, parse_vllm, vllm_name, vllm_text
from ..console.help import GroupedHelp
from ..console.table import table
from .tune_serve import serve

app = typer.Typer(rich_markup_mode=None, help="Measure choices of kernels and of a server.")
KINDS = ("bfloat16", "fp8", "fp8_block")

app.command("serve", cls=GroupedHelp)(serve)

_FOLDER = typer.Option(
    help="folder of the file, for --tuned-config-dir. [default: .]", show_default=False
)


@app.command("moe", cls=GroupedHelp)
def moe(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a model: folder or ORG/NAME")],
    tp: Annotated[int, typer.Option("--tp", help="ranks that share an expert", min=1)] = 1,
    dtype: Annotated[
        str, typer.Option(help=f"of the experts' weights: {', '.join(KINDS)}")
    ] = "bfloat16",
    output: Annotated[Path, _FOLDER] = Path(),
    vllm: Annotated[bool, typer.Option("--vllm", help="write a file of vLLM's format")] = False,
    batch_sizes: Annotated[
        str | None, typer.Option(help="numbers of tokens, separated by commas", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(help="stop then, and keep what was found")] = 600.0,
) -> None:
    """Find the fastest tiles of a model's experts on this machine's GPUs, all of them at once.

    The file is the device table of this GPU, or with --vllm one that vLLM and SGLang read too.
    What it has already is kept, so that a run that was interrupted goes on where it was.
    CUDA_VISIBLE_DEVICES leaves GPUs out.
    """
    if dtype not in KINDS:
        raise UserError(f"dtype={dtype}: expected one of {', '.join(KINDS)}")
    counts = _counts(batch_sizes)
    from ...model_executor.hf_config import model_folder, read_spec

    spec = read_spec(model_folder(model))
    if spec.moe is None:
        raise UserError(f"{model}: {spec.architecture} has no experts, so there is nothing to tune")
    if spec.moe.intermediate_size % tp:
        raise UserError(
            f"tp={tp}: the experts' intermediate size {spec.moe.intermediate_size} does not divide"
        )
    import torch

    if not torch.cuda.is_available():
        raise UserError("tune moe: torch sees no CUDA GPU; run it on the machine that will serve")
    make_output_folder("output", output)
    from ...bench.environment import environment
    from ...compiler.artifacts.disk import replace_file
    from ...compiler.lowering.search import table_here
    from ...compiler.lowering.tune_experts import TOKENS, table_of, tune
    from .tune_gpus import gpus_like_the_first, measures

    inner, kind = spec.moe.intermediate_size // tp, dtype.replace("_", " ")
    experts = Experts(spec.moe.num_experts, inner, spec.hidden_size, spec.moe.routing.top_k, kind)
    gpu, triton = torch.cuda.get_device_name(), installed_triton()
    path = output / (vllm_name(experts.shape, gpu) if vllm else file_name(gpu))
    env, old, there = environment(), None, None
    if path.exists() and vllm:
        there = parse_vllm(path.name, path.read_text(), gpu, triton)
    elif path.exists():
        old = read_table(path)
        if reason := old.why_not("experts", gpu, triton):
            raise UserError(f"{reason}; give another --output, or delete the file")
        there = find_experts([old], experts.shape)
    known = dict(there.tiles) if there else {}

    def keep(count: int, search: Any) -> None:
        entry = table_of(experts, known | search.winners())
        new = table_here(env["commit"], env["command"], experts=(entry,))
        text = vllm_text(entry, triton) if vllm else (old or new).updated(new).text()
        replace_file(path, text.encode(), path.with_name(f"{path.name}.partial"))
        us, rule_us = search.us(count)
        typer.echo(f"{count} tokens: {us:.1f} us, {rule_us / us:.2f}x the rule", err=True)

    if len(gpus := gpus_like_the_first()) > 1:
        typer.echo(f"{len(gpus)} GPUs measure at once", err=True)
    left = [count for count in counts or TOKENS if count not in known]
    with measures(experts, gpus) as each:
        search = tune(experts, each, tokens=left, seconds=seconds, on_done=keep)
    rows = [["tokens", "us", "by the rule", "tile"]]
    for count, tile in sorted(search.winners().items()):
        shown = ", ".join(f"{key} {value}" for key, value in tile.to_json().items())
        rows.append([str(count), *(f"{us:.1f}" for us in search.us(count)), shown])
    typer.echo(table(rows))
    if search.skipped:
        typer.echo(f"no time left for {', '.join(map(str, search.skipped))} tokens; run it again")
    count = len(known | search.winners())
    typer.echo(f"{count} tiles in {path}; use --tuned-config-dir {output}")


def _counts(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"batch_sizes={text}: expected numbers of tokens such as 16,64,256")
    return tuple(sorted({int(part) for part in parts}))
