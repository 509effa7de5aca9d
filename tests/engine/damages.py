"""Damage to an artifact, and what ``--require-cache`` says of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fusewright.compiler.artifacts.artifact import Artifact
from fusewright.compiler.artifacts.key import Key
from fusewright.compiler.artifacts.store import Store
from tests.compiler.hostile import nest, zeros


def flip(path: Path, position: int = 700) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def first(artifact: Path, *patterns: str) -> Path:
    return next(path for pattern in patterns for path in sorted(artifact.rglob(pattern)))


def kernel(artifact: Path) -> Path:
    return first(artifact, "*.cubin", "*.so")


def other_torch(path: Path) -> None:
    """Put the same files there under the key of another torch."""
    artifact = Artifact.open(path)
    manifest, files = artifact.manifest, {n: artifact.read(n) for n in artifact.manifest.files}
    key = Key({**manifest.factors, "toolchain.torch": "0.1"})
    root = path.parent.parent
    Store([root], write_to=root).publish(key, files, manifest.report, manifest.label)
    shutil.rmtree(path)


def large_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()
    zeros(200 * 2**20)(path / "manifest.json")


def other_plan(path: Path) -> None:
    """Put an artifact there that is whole, and cannot be run."""
    manifest = Artifact.open(path).manifest
    files = {name: Artifact.open(path).read(name) for name in manifest.files}
    root = path.parent.parent
    shutil.rmtree(path)
    changed = files | {"plan.json": b'{"steps": [{"op": 1}]}'}
    Store([root], write_to=root).publish(
        Key(manifest.factors), changed, manifest.report, manifest.label
    )


@dataclass(frozen=True)
class Damage:
    """``reason`` is what ``--require-cache`` says after ``harm`` was done to an artifact."""

    reason: str
    harm: Callable[[Path], object]
    flags: tuple[str, ...] = ()


DAMAGES = {
    "flipped plan": Damage("plan.json: ", lambda a: flip(a / "plan.json")),
    "flipped code": Damage("code.py: ", lambda a: flip(first(a, "code.py"))),
    "flipped kernel": Damage("SHA-256", lambda a: flip(kernel(a))),
    "truncated kernel": Damage("expected", lambda a: kernel(a).write_bytes(b"\x7fELF")),
    "deleted kernel": Damage("is missing", lambda a: kernel(a).unlink()),
    "world-writable": Damage("may be written by others", lambda a: a.chmod(0o777)),
    "foreign owner": Damage(
        "belongs to uid 12345", lambda a: shutil.chown(a / "plan.json", user=12345)
    ),
    "nested folders": Damage("folders nested more than 8 deep", lambda a: nest(a / "pieces", 100)),
    "a manifest of 200 MB": Damage("209715200 bytes, expected at most", large_manifest),
    "a plan of other things": Damage("plan.json: is not what fusewright writes", other_plan),
    "unsigned": Damage("signature.json: is missing", lambda a: None, ("--trusted-keys",)),
    "other torch": Damage(f"toolchain.torch: 0.1 -> {torch.__version__}", other_torch),
}
