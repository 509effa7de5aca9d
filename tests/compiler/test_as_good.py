"""An artifact whose rewrites were verified serves those who did not ask for it, not the reverse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fusewright.config import EngineOptions, Hardware
from fusewright.engine.worker.source import artifact_key, keys_as_good
from fusewright.engine.worker.startup import read_model
from tests.compiler.store_process import key, own, publish

CPU = Hardware(device="cpu", name="CPU")


def test_the_first_key_that_has_an_artifact_is_found(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    second = publish(store, 2)
    assert store.find(key(1), key(2)) == second
    first = publish(store, 1)
    assert store.find(key(1), key(2)) == first
    assert store.find(key(3)) is None


def test_a_miss_compares_with_every_key_that_would_serve(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    there = publish(store, 1)
    wanted, as_good = key(1, verify="False", size="2"), key(1, size="2")
    message = str(store.missing(wanted, as_good))
    assert f"{there.manifest.key} (sample 1), which differs" in message
    assert "size: (none) -> 2; compile it first" in message and "verify" not in message


def test_a_verified_build_serves_starts_without_verification() -> None:
    _, spec, config = read_model(EngineOptions(), CPU)
    verified = replace(config, compile=replace(config.compile, verify=True))
    assert keys_as_good(artifact_key(spec, config), config) == [artifact_key(spec, verified)]
    assert keys_as_good(artifact_key(spec, verified), verified) == []
