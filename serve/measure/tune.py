"""``fusewright tune``: measures choices of kernels and of a server, and keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...config import UserError, make_output_folder
from ...config.expert_tables import Experts, file_name, installed_triton, parse_table
from ..console.help import GroupedHelp
from ..console.table import table
from .tune_serve import serve

app = typer.Typer(rich_markup_mode=None, help="Measure choices of kernels and of a server.")
KINDS = ("bfloat16", "fp8", "fp8_block")

app.command("serve", cls=GroupedHelp)(serve)


@app.command("moe", cls=GroupedHelp)
def moe(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a Hugging Face model folder")],
    tp: Annotated[int, typer.Option("--tp", help="ranks that share an expert", min=1)] = 1,
    dtype: Annotated[
        str, typer.Option(help=f"of the experts' weights: {', '.join(KINDS)}")
    ] = "bfloat16",
    output: Annotated[
        Path, typer.Option(help="folder of the file; for --tuned-config-dir", show_default=".")
    ] = Path(),
    batch_sizes: Annotated[
        str | None, typer.Option(help="numbers of tokens, separated by commas", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(help="stop then, and keep what was found")] = 600.0,
) -> None:
    """Find the fastest tiles of a model's experts on this machine's GPUs, all of them at once.

    The file is in the format of vLLM and SGLang. What it has already is kept, so that a run that
    was interrupted goes on where it was. CUDA_VISIBLE_DEVICES leaves GPUs out.
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
    from ...compiler.artifacts.disk import replace_file
    from ...compiler.lowering.tune_experts import TOKENS, Tuned, tune
    from .tune_gpus import gpus_like_the_first, measures

    kind = dtype.replace("_", " ")
    inner = spec.moe.intermediate_size // tp
    experts = Experts(spec.moe.num_experts, inner, spec.hidden_size, spec.moe.routing.top_k, kind)
    gpu, triton = torch.cuda.get_device_name(), installed_triton()
    path = output / file_name(experts.shape, gpu)
    known = (
        dict(parse_table(path.name, path.read_text(), gpu, triton).tiles) if path.exists() else {}
    )

    def keep(count: int, tuned: Tuned) -> None:
        text = tuned.table(experts).text(triton)
        replace_file(path, text.encode(), path.with_name(f"{path.name}.partial"))
        gain = tuned.rule_us[count] / tuned.us[count]
        typer.echo(f"{count} tokens: {tuned.us[count]:.1f} us, {gain:.2f}x the rule", err=True)

    gpus = gpus_like_the_first()
    if len(gpus) > 1:
        typer.echo(f"{len(gpus)} GPUs measure at once", err=True)
    with measures(experts, gpus) as each:
        search = tune(
            experts, each, tokens=counts or TOKENS, seconds=seconds, known=known, on_done=keep
        )
    rows = [["tokens", "us", "by the rule", "tile"]]
    for count, us in sorted(search.us.items()):
        rows.append(
            [str(count), f"{us:.1f}", f"{search.rule_us[count]:.1f}", _shown(search, count)]
        )
    typer.echo(table(rows))
    if search.skipped:
        typer.echo(f"no time left for {', '.join(map(str, search.skipped))} tokens; run it again")
    typer.echo(f"{len(search.tiles)} tiles in {path}; use --tuned-config-dir {output}")


def _counts(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"batch_sizes={text}: expected numbers of tokens such as 16,64,256")
    return tuple(sorted({int(part) for part in parts}))


def _shown(tuned: Any, count: int) -> str:
    return ", ".join(f"{key} {value}" for key, value in tuned.tiles[count].to_json().items())
