"""Claims about ``fusewright cache``: what each command prints, changes and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from fusewright.compiler.artifacts.artifact import Artifact
from fusewright.compiler.artifacts.key import Key
from fusewright.compiler.artifacts.store import Store, open_store
from fusewright.serve.cli import main
from fusewright.serve.commands.cache import parse_size
from fusewright.serve.console.flags import engine_flags
from tests.compiler.store_process import FILES, key, own, publish, small_disk


class Cli:
    """Runs ``fusewright cache`` over one store, with an empty baked one."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self._capsys = root, capsys

    def __call__(self, *args: object, code: int = 0) -> str:
        """Standard output, or the line of the error when ``code`` is 2."""
        given = ["--compile-cache-dir", str(self.root)]
        assert main(["cache", *map(str, args), *given]) == code
        captured = self._capsys.readouterr()
        if code == 0:
            assert captured.err == ""
            return captured.out
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        return captured.out + captured.err

    def json(self, *args: object) -> Any:
        return json.loads(self(*args, "--json"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return own(tmp_path / "store")


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.setenv("FUSEWRIGHT_BAKED_DIR", str(tmp_path / "baked"))
    (tmp_path / "store").mkdir(exist_ok=True)
    return Cli(tmp_path / "store", capsys)


def spoil(artifact: Artifact) -> None:
    (artifact.path / "plan.json").write_bytes(b"spoilt")


def test_ls_lists_the_baked_store_first(tmp_path: Path, store: Store, cli: Cli) -> None:
    publish(own(tmp_path / "baked"), 1)
    publish(store)
    lines = cli("ls").splitlines()
    assert lines[0].split() == ["key", "label", "size", "used", "signer", "store"]
    assert lines[2].split()[:3] == [key(1).digest[:12], "sample", "1"]
    assert lines[3].split()[:3] == [key(0).digest[:12], "sample", "0"]
    assert lines[3].endswith(str(tmp_path / "store"))
    entries = cli.json("ls")
    assert [entry["key"] for entry in entries] == [key(1).digest, key(0).digest]
    assert entries[1]["bytes"] > sum(map(len, FILES.values()))
    assert entries[1]["problem"] is None


@pytest.mark.parametrize(
    "argv",
    [["ls"], ["show", "0"], ["verify"], ["export", "0", "x.tar"], ["prune", "--all"]],
    ids=lambda argv: argv[0],
)
def test_a_misspelt_folder_is_no_empty_store(argv: list[str], tmp_path: Path, cli: Cli) -> None:
    mistake = tmp_path / "stroe"
    told = cli(*argv, "--compile-cache-dir", f"{tmp_path}/store:{mistake}", code=2)
    assert f"--compile-cache-dir {mistake}: no such folder" in told
    assert not mistake.exists()


def test_ls_says_when_there_is_nothing(tmp_path: Path, cli: Cli) -> None:
    assert cli("ls") == f"no artifacts in {tmp_path}/baked, {tmp_path}/store\n"
    assert cli.json("ls") == []
    assert cli("prune", "--all") == "removed 0\n"


def test_folders_are_repeated_or_separated_by_colons(tmp_path: Path, cli: Cli) -> None:
    for number in range(3):
        publish(own(tmp_path / f"store{number}"), number)
    more = [f"{tmp_path}/store0:{tmp_path}/store1", "--compile-cache-dir", f"{tmp_path}/store2"]
    entries = cli.json("ls", "--compile-cache-dir", *more)
    assert [entry["label"] for entry in entries] == ["sample 0", "sample 1", "sample 2"]


def test_show_prints_the_manifest(store: Store, cli: Cli) -> None:
    artifact = publish(store)
    text = cli("show", key().digest[:6], "--verbose")
    for expected in (key().digest, "sample 0", "hardware.sm", "kernels/rms_norm.cubin", "fuse_act"):
        assert expected in text
    facts = cli.json("show", key().digest[:6])
    assert facts["factors"] == key().factors
    assert facts["report"] == artifact.manifest.report
    assert facts["path"] == str(artifact.path)


def test_keys_must_be_found_and_unambiguous(store: Store, cli: Cli) -> None:
    assert "no artifact's key begins with 'abc'" in cli("show", "abc", code=2)
    for number in range(17):
        publish(store, number)
    first = {key(number).digest[0] for number in range(17)}
    shared = next(d for d in first if sum(key(n).digest[0] == d for n in range(17)) > 1)
    assert f"'{shared}' begins several keys: " in cli("show", shared, code=2)


def test_verify_names_what_is_refused_and_fails(store: Store, cli: Cli) -> None:
    sound, broken = publish(store, 0), publish(store, 1, {"plan.json": b"other one"})
    assert cli("verify").count(": sound\n") == 2
    spoil(broken)
    text = cli("verify", code=2)
    assert f"{sound.path}: sound\n" in text
    assert f"{broken.path}/plan.json: has 6 bytes, expected 9; delete" in text
    assert text.endswith("error: 1 of 2 artifacts would be refused\n")
    assert cli("verify", key(0).digest) == f"{sound.path}: sound\n"
    assert "no artifact's key begins with 'abc'" in cli("verify", "abc", code=2)


def test_diff_prints_factors_and_files(store: Store, cli: Cli) -> None:
    publish(store, 0)
    publish(store, 1, {**FILES, "plan.json": b"other", "more": b""})
    found = cli.json("diff", key(0).digest, key(1).digest)
    assert found["factors"] == [{"name": "number", "left": "0", "right": "1"}]
    assert [entry["name"] for entry in found["files"]] == ["more", "plan.json"]
    assert found["files"][0]["left"] is None
    lines = cli("diff", key(0).digest, key(1).digest).splitlines()
    assert lines[0].split() == ["factor", key(0).digest[:12], key(1).digest[:12]]
    assert lines[2].split() == ["number", "0", "1"]
    assert cli("diff", key(0).digest, key(0).digest) == "no factor differs\nno file differs\n"


@pytest.mark.parametrize("name", ["image", "image.tar"])
def test_export_and_import(name: str, tmp_path: Path, store: Store, cli: Cli) -> None:
    publish(store)
    assert cli("export", key().digest, tmp_path / name) == f"wrote {tmp_path / name}\n"
    assert cli("prune", "--all") == f"removed 1\n{key().digest}\n"
    path = store.search_paths[0] / "artifacts" / key().digest
    assert cli("import", tmp_path / name) == f"{path}: sample 0\n"
    assert store.find(key()) is not None
    assert "No such file or directory; give an exported" in cli("import", "/absent", code=2)
    assert "cannot be written" in cli("export", key().digest, "/proc/x/y.tar", code=2)


def test_prune_by_size_and_age(store: Store, cli: Cli) -> None:
    now = time.time()
    for number in range(3):
        publish(store, number, {"plan.json": bytes([number]) * 10_000})
        used = now - (3 - number) * 86400
        os.utime(cli.root / "used" / key(number).digest, (used, used))
    assert cli.json("prune", "--older-than", "2.5") == [key(0).digest]
    assert cli.json("prune", "--max-size", "1MB") == []
    assert cli.json("prune", "--max-size", "15kB") == [key(1).digest]
    assert "give --max-size, --older-than or --all" in cli("prune", code=2)
    assert "expected a size such as 10GB" in cli("prune", "--max-size", "many", code=2)
    assert cli.json("prune", "--all") == [key(2).digest]


def test_prune_touches_only_the_store_that_is_written(
    tmp_path: Path, store: Store, cli: Cli
) -> None:
    publish(own(tmp_path / "baked"))
    publish(store)
    assert cli.json("prune", "--all") == [key().digest]
    assert [entry["path"] for entry in cli.json("ls")] == [
        str(tmp_path / "baked" / "artifacts" / key().digest)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("4096", 4096), ("10GB", 10**10), ("1.5 MiB", 1572864), ("2tb", 2 * 10**12)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


def test_signing_and_trusting(tmp_path: Path, store: Store, cli: Cli) -> None:
    private = Ed25519PrivateKey.generate()
    (tmp_path / "private").write_bytes(
        private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    (tmp_path / "private").chmod(0o600)
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(public)
    (tmp_path / "public.pem").chmod(0o644)
    artifact = publish(store)
    trusting = ["--trusted-keys", tmp_path / "public.pem"]
    assert "signature.json: is missing" in cli("verify", *trusting, code=2)
    said = cli("sign", key().digest, "--key", tmp_path / "private")
    assert said.startswith(f"{artifact.path}: signed by ")
    assert cli("verify", *trusting) == f"{artifact.path}: sound\n"
    assert cli.json("ls")[0]["signer"] == said.split()[-1]
    cli("export", key().digest, tmp_path / "image.tar")
    cli("prune", "--all")
    cli("import", tmp_path / "image.tar", *trusting)
    assert cli("verify", *trusting) == f"{artifact.path}: sound\n"


def test_the_cache_is_managed_without_torch(tmp_path: Path, store: Store) -> None:
    publish(store)
    store.export(key().digest, tmp_path / "image")
    digest, folders = key().digest, ["--compile-cache-dir", str(store.search_paths[0])]
    commands = [
        ["ls"],
        ["verify"],
        ["show", digest],
        ["diff", digest, digest],
        ["export", digest, str(tmp_path / "other")],
        ["prune", "--all"],
        ["import", str(tmp_path / "image")],
    ]
    code = (
        "import sys; from fusewright.serve.cli import main\n"
        f"for argv in {commands!r}:\n"
        f"    code = main(['cache', *argv, *{folders!r}])\n"
        "    heavy = {'torch', 'triton', 'numpy', 'rich', 'cryptography'} & set(sys.modules)\n"
        "    if heavy or code: sys.exit(f'{argv}: exit code {code}, imported {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_cache_alone_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 2
    assert "verify" in capsys.readouterr().err


@pytest.mark.parametrize("age", ["-5", "-0.001", "nan", "inf", "-inf", "1e400"])
def test_an_age_that_is_no_number_of_days_removes_nothing(age: str, store: Store, cli: Cli) -> None:
    publish(store)
    text = cli("prune", "--older-than", age, code=2)
    assert f"--older-than {float(age)}: expected a number of days, 0 or more" in text
    assert store.find(key()) is not None


@pytest.mark.parametrize("size", ["-5", "nan", "inf", "1e400", "9" * 400, "1" * 5000, "²", ""])
def test_a_size_that_is_none_removes_nothing(size: str, store: Store, cli: Cli) -> None:
    publish(store)
    assert "expected a size such as 10GB" in cli("prune", f"--max-size={size}", code=2)
    assert store.find(key()) is not None


def test_prune_takes_all_or_what_to_keep(store: Store, cli: Cli) -> None:
    publish(store)
    for flags in (["--max-size", "1GB"], ["--older-than", "3"]):
        assert "--all removes what" in cli("prune", "--all", *flags, code=2)
    assert store.find(key()) is not None


def test_lists_of_folders_mean_the_same_to_the_cache_and_to_the_engine(
    tmp_path: Path, cli: Cli
) -> None:
    for number in range(4):
        publish(own(tmp_path / f"store{number}"), number)
    names = [f"{tmp_path}/store{number}" for number in range(4)]
    flags = [f"{names[0]},{names[1]}:{names[2]}", "--compile-cache-dir", names[3]]
    listed = [entry["label"] for entry in cli.json("ls", "--compile-cache-dir", *flags)]
    assert listed == [f"sample {number}" for number in range(4)]
    seen: list[tuple[str, ...]] = []
    engine = typer.Typer()

    @engine.command()
    @engine_flags
    def command(engine: dict[str, Any]) -> None:
        seen.append(engine["compile_cache_dir"])

    engine(["--compile-cache-dir", *flags], standalone_mode=False)
    paths = open_store(seen[0]).search_paths
    assert paths == (tmp_path / "baked", *map(Path, names))


def test_ls_tells_equal_labels_apart(tmp_path: Path, store: Store, cli: Cli) -> None:
    factors = [
        {"dtype": "bfloat16", "torch": "2.11", "source.a": "1", "source.b": "1"},
        {"dtype": "float16", "torch": "2.11", "source.a": "1", "source.b": "1"},
        {"dtype": "float16", "torch": "2.11", "source.a": "2", "source.b": "3"},
    ]
    for each in factors:
        store.publish(Key(each), FILES, {}, "one label")
    publish(store)
    rows = {line.split()[0]: line for line in cli("ls").splitlines()[2:]}
    texts = [rows[Key(each).digest[:12]] for each in factors]
    assert [text.count("dtype=") for text in texts] == [1, 1, 1]
    assert len({text.split("(")[1].split(")")[0] for text in texts}) == 3
    assert not any("torch" in text or "source." in text for text in texts)
    assert "(" not in rows[key().digest[:12]]
    apart = {entry["key"]: entry["apart"] for entry in cli.json("ls")}
    assert apart[Key(factors[0]).digest]["dtype"] == "bfloat16"
    assert apart[key().digest] == {}


def test_show_prints_a_report_of_another_shape(store: Store, cli: Cli) -> None:
    report = {"passes": [{"checks": 1}, {"checks": [{"site": "\x1b[2J"}]}]}
    store.publish(key(), FILES, report, "odd")
    text = cli("show", key().digest, "--verbose")
    assert "\x1b" not in text
    assert '"checks": 1' in text


# Exports that cannot be made


@pytest.mark.parametrize("name", ["image.tar", "image"])
def test_an_export_does_not_write_over_what_is_there(name: str, store: Store, cli: Cli) -> None:
    publish(store)
    place = cli.root.parent / name
    taken = place if name.endswith(".tar") else place / "artifacts" / key().digest
    taken.parent.mkdir(parents=True, exist_ok=True)
    taken.write_bytes(b"mine")
    text = cli("export", key().digest, place, code=2)
    assert f"{taken}: exists; delete it or give another destination" in text
    assert taken.read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["image.tar", "image", "new/image"])
def test_an_export_to_a_full_disk_leaves_nothing(
    name: str, tmp_path: Path, store: Store, cli: Cli
) -> None:
    publish(store, files={f"{n}": os.urandom(30_000) for n in range(4)})
    with small_disk(tmp_path / "disk", 64) as disk:
        text = cli("export", key().digest, disk / name, code=2)
        assert "cannot be written: No space left on device; give another destination" in text
        assert list(disk.iterdir()) == []
