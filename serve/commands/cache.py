"""``fusewright cache``: look into stores of compiled artifacts, check, carry and prune them.

Imports no torch: a store can be managed on any machine.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...config import UserError
from ..console.flags import Json, Verbose, strings
from ..console.report import checks_table, titled
from ..console.table import table

if TYPE_CHECKING:
    from ...compiler.artifacts.artifact import Artifact
    from ...compiler.artifacts.store import Listed, Store

app = typer.Typer(
    rich_markup_mode=None, help="List, check, compare, carry, prune and sign compiled artifacts."
)

_Folders = Annotated[
    list[str] | None,
    typer.Option(
        "--compile-cache-dir",
        metavar="A,B,…",
        help="Stores, searched in order after the baked one; the first is written. Separated by "
        "commas or colons; repeatable.",
        show_default=False,
    ),
]
_Key = Annotated[str, typer.Argument(metavar="KEY", help="Key, or how it begins.")]
_Trusted = Annotated[
    list[str] | None,
    typer.Option(
        "--trusted-keys",
        metavar="A,B,…",
        help="Accept only what these public keys signed: PEM files or folders. Repeatable.",
        show_default=False,
    ),
]
_UNITS = {"": 1} | {f"{p}B": 1000**i for i, p in enumerate(["", "K", "M", "G", "T"])}
_UNITS |= {f"{p}IB": 1024**i for i, p in enumerate(["K", "M", "G", "T"], 1)}
_DAY_S = 86400


@app.callback(invoke_without_command=True)
def _options(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


@app.command("ls")
def ls(folders: _Folders = None, json_output: Json = False) -> None:
    """List artifacts, with what tells equal labels apart; files are not read (see verify)."""
    store = _store(folders)
    entries = store.ls()
    apart = _apart(entries)
    if json_output:
        _print_json([_listed(entry) | {"apart": apart[entry.path]} for entry in entries])
        return
    if not entries:
        typer.echo(f"no artifacts in {', '.join(map(str, store.search_paths))}")
        return
    rows = [["key", "label", "size", "used", "signer", "store"]]
    for entry in entries:
        label = entry.manifest.label if entry.manifest else f"unusable: {entry.problem}"
        if facts := apart[entry.path]:
            label += f" ({', '.join(f'{n}={_short(v)}' for n, v in facts.items())})"
        key, root = entry.path.name[:12], str(entry.path.parent.parent)
        signer = (entry.signer or "-")[:12]
        rows.append([key, label, _size(entry.num_bytes), _ago(entry.used), signer, root])
    typer.echo(table(rows))


@app.command("show")
def show(
    key: _Key, folders: _Folders = None, json_output: Json = False, verbose: Verbose = False
) -> None:
    """Print what an artifact says of itself: files, factors, rewrites; --verbose: all of it."""
    from ...compiler.artifacts.signing import signer

    artifact = _store(folders).get(key)
    facts = {**asdict(artifact.manifest), "path": str(artifact.path), "signer": signer(artifact)}
    if json_output:
        _print_json(facts)
        return
    names = ("key", "label", "created", "producer", "path", "signer")
    width = max(map(len, names))
    for name in names:
        typer.echo(f"{name.ljust(width)}  {facts[name] or '-'}")
    files = [
        [n, str(f.num_bytes), f.sha256[:12]] for n, f in sorted(artifact.manifest.files.items())
    ]
    rows = [["file", "bytes", "SHA-256"], *files]
    typer.echo("\n" + titled("Files of the artifact, each checked by its digest at a start.", rows))
    factors = [[name, value] for name, value in sorted(artifact.manifest.factors.items())]
    rows = [["factor", "value"], *factors]
    typer.echo("\n" + titled("Factors of its key: a start where one differs compiles anew.", rows))
    if checks := _checks(facts["report"], verbose):
        typer.echo("\n" + checks)
    if verbose:
        typer.echo("\nreport: " + json.dumps(facts["report"], indent=1, sort_keys=True))


@app.command("verify")
def verify(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="Key, or how it begins; all if not given.")
    ] = None,
    folders: _Folders = None,
    trusted_keys: _Trusted = None,
    json_output: Json = False,
) -> None:
    """Read every file as a start would; exit code 2 if one artifact would be refused."""
    from ...compiler.artifacts.artifact import Refusal

    store = _store(folders, trusted_keys)
    paths = [entry.path for entry in store.ls() if entry.path.name.startswith(key or "")]
    if key is not None and not paths:
        store.get(key)  # says what is there
    results: dict[Path, str | None] = {}
    for path in paths:
        try:
            store.load(path.parent.parent, path.name)
            results[path] = None
        except Refusal as refusal:
            results[path] = str(refusal)
    if json_output:
        _print_json([{"path": str(path), "problem": text} for path, text in results.items()])
    else:
        for path, text in results.items():
            typer.echo(f"{path}: sound" if text is None else text)
    refused = sum(text is not None for text in results.values())
    if refused:
        raise UserError(f"{refused} of {len(results)} artifacts would be refused")
    if not results and not json_output:
        typer.echo(f"no artifacts in {', '.join(map(str, store.search_paths))}")


@app.command("diff")
def diff(
    left: Annotated[str, typer.Argument(metavar="A", help="Key, or how it begins.")],
    right: Annotated[str, typer.Argument(metavar="B", help="Key, or how it begins.")],
    folders: _Folders = None,
    json_output: Json = False,
) -> None:
    """Print the factors and files in which two artifacts differ."""
    from ...compiler.artifacts.key import differences

    store = _store(folders)
    one, two = store.get(left).manifest, store.get(right).manifest
    factors = differences(one.factors, two.factors)
    files = differences(
        {name: file.sha256 for name, file in one.files.items()},
        {name: file.sha256 for name, file in two.files.items()},
    )
    if json_output:
        _print_json({"factors": [asdict(d) for d in factors], "files": [asdict(d) for d in files]})
        return
    for kind, changes, length in [("factor", factors, None), ("file", files, 12)]:
        if not changes:
            typer.echo(f"no {kind} differs")
            continue
        rows = [[d.name, (d.left or "-")[:length], (d.right or "-")[:length]] for d in changes]
        typer.echo(table([[kind, one.key[:12], two.key[:12]], *rows]))


@app.command("export")
def export(
    key: _Key,
    destination: Annotated[
        Path, typer.Argument(metavar="DEST", help="A folder, or a file that ends in .tar.")
    ],
    folders: _Folders = None,
) -> None:
    """Copy an artifact out, to a folder or tar file that can be searched where it lies."""
    typer.echo(f"wrote {_store(folders).export(key, destination)}")


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="An exported folder or .tar.")],
    folders: _Folders = None,
    trusted_keys: _Trusted = None,
) -> None:
    """Verify the artifacts of an export, then add them to the store."""
    for artifact in _store(folders, trusted_keys, writes=True).import_(source):
        typer.echo(f"{artifact.path}: {artifact.manifest.label}")


@app.command("prune")
def prune(
    folders: _Folders = None,
    max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Keep at most this, such as 10GB.")
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", help="Remove what was not used for so long.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all artifacts.")] = False,
    json_output: Json = False,
) -> None:
    """Remove artifacts from the store that is written, least recently used first."""
    if max_size is None and older_than is None and not everything:
        raise UserError("cache prune: nothing to prune by; give --max-size, --older-than or --all")
    if older_than is not None and not 0 <= older_than < math.inf:
        raise UserError(
            f"--older-than {older_than}: expected a number of days, 0 or more; --all removes all"
        )
    if everything and (max_size is not None or older_than is not None):
        raise UserError("--all removes what --max-size or --older-than would keep: give one")
    removed = _store(folders).prune(
        max_bytes=0 if everything else None if max_size is None else parse_size(max_size),
        unused_since=None if older_than is None else time.time() - older_than * _DAY_S,
    )
    if json_output:
        _print_json(removed)
    else:
        typer.echo(f"removed {len(removed)}" + "".join(f"\n{digest}" for digest in removed))


@app.command("sign")
def sign(
    key: _Key,
    private_key: Annotated[
        Path, typer.Option("--key", metavar="FILE", help="Ed25519 private key, PEM.")
    ],
    folders: _Folders = None,
) -> None:
    """Sign an artifact where it lies."""
    from ...compiler.artifacts import signing

    artifact: Artifact = _store(folders).get(key)
    typer.echo(f"{artifact.path}: signed by {signing.sign(artifact, private_key)}")


def _store(
    folders: list[str] | None, trusted_keys: list[str] | None = None, *, writes: bool = False
) -> Store:
    """The stores that a command works on.

    Raises:
        UserError: one that is named is not there, and the command does not write to it.
    """
    from ...compiler.artifacts.paths import named_folders
    from ...compiler.artifacts.store import open_store

    asked = _items(folders)
    for path in () if writes else named_folders(asked):
        if not path.is_dir():
            raise UserError(f"--compile-cache-dir {path}: no such folder; name one that is there")
    return open_store(asked, trusted_keys=_items(trusted_keys))


def _items(texts: list[str] | None) -> list[str]:
    """The items of a repeatable list, as the engine's flags read it."""
    return [item for text in texts or () for item in strings(text)]


def parse_size(text: str) -> int:
    """Bytes of a size such as 10GB, 512MiB or 4096.

    Raises:
        UserError: it is none.
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)", text.strip().lower())
    if match is None or (unit := match[2].upper()) not in _UNITS:
        raise UserError(f"--max-size {text}: expected a size such as 10GB, 512MiB or 4096")
    return int(float(match[1]) * _UNITS[unit])


def _apart(entries: list[Listed]) -> dict[Path, dict[str, str]]:
    """For each artifact, the factors that tell it from others of the same label."""
    from ...compiler.artifacts.key import tell_apart

    facts: dict[Path, dict[str, str]] = {entry.path: {} for entry in entries}
    labels: dict[str, list[Listed]] = {}
    for entry in entries:
        if entry.manifest is not None:
            labels.setdefault(entry.manifest.label, []).append(entry)
    for same in labels.values():
        factors = tell_apart([entry.manifest.factors for entry in same if entry.manifest])
        facts |= zip((entry.path for entry in same), factors, strict=True)
    return facts


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"


def _listed(entry: Listed) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "key": entry.path.name,
        "path": str(entry.path),
        "label": manifest.label if manifest else None,
        "created": manifest.created if manifest else None,
        "bytes": entry.num_bytes,
        "used": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.used)),
        "signer": entry.signer,
        "problem": entry.problem,
    }


def _checks(report: dict[str, Any], verbose: bool) -> str:
    """The table of verified rewrites; "" for a report that this version did not write."""
    from ...compiler.artifacts.artifact import printable

    try:
        lines = checks_table(report.get("passes", ()), verbose=verbose).split("\n")
    except (AttributeError, KeyError, TypeError, ValueError):
        return ""
    return "\n".join(map(printable, lines))


def _size(num_bytes: int) -> str:
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _ago(unix_time_s: float) -> str:
    seconds = max(0, time.time() - unix_time_s)
    for unit, length in [("d", _DAY_S), ("h", 3600), ("min", 60)]:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data))
