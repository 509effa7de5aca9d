"""Claims about models that are named as on the Hugging Face Hub, with one on 127.0.0.1: what is
downloaded, what is not, and what a mistake is told."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusewright.config.errors import MachineError, UserError
from fusewright.model_executor.abacus import FOLDER
from fusewright.model_executor.hf_config import model_folder, read_spec, served_name
from fusewright.model_executor.sources.hub import HubName, _refusing, hub_name
from tests.model_executor.fake_hub import FakeHub, Repository, fake_hub, folder_files
from tests.warm import warm_starts

NOWHERE = "http://127.0.0.1:9"
ASK = """
import json, sys
from fusewright.config import UserError
from fusewright.model_executor.hf_config import model_folder
from pathlib import Path
answers = []
for model, weights in json.loads(sys.argv[1]):
    try:
        folder = model_folder(model, weights=weights)
        files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        answers.append([str(folder), files])
    except UserError as error:
        answers.append([type(error).__name__, str(error)])
print(json.dumps(answers))
"""
FILES = folder_files(FOLDER)
SMALL = sorted(name for name in FILES if name.endswith(".json") and name != "training.json")
INDEX = "model.safetensors.index.json"


def config_with(**fields: Any) -> bytes:
    return json.dumps({**json.loads(FILES["config.json"]), **fields}).encode()


def without_weights(**files: bytes) -> dict[str, bytes]:
    return {name: FILES[name] for name in SMALL} | files


CUSTOM = {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}
REPOSITORIES = {
    "org/abacus": Repository(
        FILES
        | {
            "pytorch_model.bin": b"a pickle",
            "modeling_x.py": b"raise SystemExit",
            "original/model.safetensors": b"twice",
            "consolidated.safetensors": b"twice",
            "onnx/config.json": b"{}",
            "additional_chat_templates/x.jinja": b"{{ messages }}",
        },
        ("main", "v1", "refs/pr/1"),
    ),
    "org/shards": Repository(
        without_weights(
            **{
                INDEX: json.dumps({"weight_map": {"a": "b.safetensors"}}).encode(),
                "b.safetensors": b"b",
                "c.safetensors": b"c",
            }
        )
    ),
    "org/lacking": Repository(
        without_weights(**{INDEX: json.dumps({"weight_map": {"a": "z.safetensors"}}).encode()})
    ),
    "org/pickles": Repository(without_weights(**{"pytorch_model.bin": b"p"})),
    "org/gated": Repository(FILES, gated=True),
    "org/private": Repository(FILES, token="secret"),
    "org/large": Repository(FILES, sizes={"model.safetensors": 10**15}),
    "org/custom": Repository(
        FILES | {"config.json": config_with(architectures=["XForCausalLM"], auto_map=CUSTOM)}
    ),
    "org/other": Repository(FILES | {"config.json": config_with(architectures=["T5Model"])}),
}


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with fake_hub(REPOSITORIES) as made:
        yield made


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def ask(url: str, home: Path, *models: str, weights: bool = True, **env: str) -> list[Any]:
    """For each model its folder and files, or the error and its message, of one process."""
    known = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    known |= {"HF_ENDPOINT": url, "HF_HOME": str(home), **env}
    asked = json.dumps([(model, weights) for model in models])
    command = [sys.executable, "-P", "-c", ASK, asked]
    with warm_starts():
        done = subprocess.run(command, capture_output=True, text=True, env=known)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_only_what_is_read_is_downloaded_and_only_once(hub: FakeHub, home: Path) -> None:
    hub.asked.clear()
    (small,) = ask(hub.url, home, "org/abacus", weights=False)
    assert small[1] == sorted([*SMALL, "additional_chat_templates/x.jinja"])
    (whole, again) = ask(hub.url, home, "org/abacus", "org/abacus")
    assert whole == again == [small[0], sorted([*small[1], "model.safetensors"])]
    assert hub.fetched == sorted([*small[1], "model.safetensors"])
    assert small[0].startswith(str(home / "hub/models--org--abacus/snapshots"))
    assert read_spec(small[0]) == read_spec(FOLDER)
    asked = len(hub.asked)
    assert ask(hub.url, home, "org/abacus") == [whole]
    assert len(hub.asked) == asked, "what is in the cache asks no network"
    assert ask(NOWHERE, home, "org/abacus") == [whole]
    assert ask(NOWHERE, home, "org/abacus", HF_HUB_OFFLINE="1") == [whole]
    assert ask(NOWHERE, home / "other", "org/abacus", HF_HUB_CACHE=str(home / "hub")) == [whole]


def test_revisions_and_shards(hub: FakeHub, home: Path) -> None:
    commit = REPOSITORIES["org/abacus"].commit
    names = ("org/abacus@v1", "org/abacus@refs/pr/1", f"org/abacus@{commit}", "org/shards")
    *folders, shards = ask(hub.url, home, *names)
    assert [Path(folder).name for folder, _ in folders] == [commit] * 3
    assert shards[1] == sorted([*SMALL, INDEX, "b.safetensors"]), "none that no index names"


def test_a_cache_that_another_version_wrote_serves_without_a_network(home: Path) -> None:
    """It has no listing of the repository."""
    repository = home / "hub/models--org--abacus"
    folder = repository / "snapshots/0123456789012345678901234567890123456789"
    folder.mkdir(parents=True)
    for name in (*SMALL, "model.safetensors"):
        (folder / name).symlink_to(FOLDER / name)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(folder.name)
    for env in ({}, {"HF_HUB_OFFLINE": "1"}):
        ((found, _),) = ask(NOWHERE, home, "org/abacus", **env)
        assert found == str(folder)
    (folder / "model.safetensors").unlink()
    ((_, message),) = ask(NOWHERE, home, "org/abacus", HF_HUB_OFFLINE="1")
    assert "not all of it is in the cache" in message


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        ("org/nothing", "UserError", ("not a folder here", "no such model", "hf auth login")),
        ("org/abacus@v2", "UserError", ("no revision 'v2'", "org/abacus/commits")),
        ("org/gated", "UserError", ("gated", "accept its terms at http", "HF_TOKEN")),
        ("org/private", "UserError", ("refuses the token (401)", "HF_TOKEN")),
        ("org/pickles", "UserError", ("only pytorch_model.bin", "safetensors")),
        ("org/lacking", "UserError", (f"no z.safetensors, which its {INDEX} names",)),
        ("org/large", "MachineError", ("1000000.0 GB to download", "HF_HUB_CACHE")),
        ("org/custom", "UserError", ("'XForCausalLM' is custom code (auto_map)", "never run")),
        ("org/other", "UserError", ("'T5Model' is not supported",)),
    ],
)
def test_a_mistake_is_one_line_before_any_weight_is_downloaded(
    hub: FakeHub, home: Path, model: str, kind: str, words: tuple[str, ...]
) -> None:
    hub.asked.clear()
    ((found, message),) = ask(hub.url, home, model)
    assert found == kind
    for word in words:
        assert word in message
    assert "\n" not in message
    assert "model.safetensors" not in hub.fetched
    assert "modeling_x.py" not in hub.fetched


def test_a_token_is_taken_from_its_usual_places(hub: FakeHub, home: Path) -> None:
    ((folder, _),) = ask(hub.url, home, "org/private", weights=False, HF_TOKEN="secret")
    assert Path(folder).is_dir()
    (other := home / "other").mkdir()
    (other / "token").write_text("secret")
    ((folder, _),) = ask(hub.url, other, "org/private", weights=False)
    assert Path(folder).is_dir()


def test_without_a_network_the_line_says_which_cache_lacks_it(hub: FakeHub, home: Path) -> None:
    model = "org/abacus@v1"
    ((kind, message),) = ask(NOWHERE, home, model)
    assert kind == "MachineError"
    for word in (f"{model!r}: not a folder", NOWHERE, str(home / "hub"), "ConnectError"):
        assert word in message
    ((kind, message),) = ask(NOWHERE, home, model, HF_HUB_OFFLINE="1")
    assert kind == "UserError"
    assert "run `hf download org/abacus --revision v1` where there is a network" in message
    ask(hub.url, home, model, weights=False)
    ((kind, message),) = ask(NOWHERE, home, model)
    assert (kind, "ConnectError" in message) == ("MachineError", True), "the weights lack"


def test_custom_code_is_refused_in_folders_too_and_named_where_it_is_not_needed(
    tmp_path: Path,
) -> None:
    for name in FILES:
        (tmp_path / name).write_bytes(FILES[name])
    (tmp_path / "config.json").write_bytes(config_with(auto_map=CUSTOM))
    (note,) = read_spec(tmp_path).notes
    assert note.endswith("which is never run: LlamaForCausalLM is the built-in one")
    (tmp_path / "config.json").write_bytes(config_with(architectures=["X"], auto_map=CUSTOM))
    with pytest.raises(UserError, match=r"architecture 'X' is custom code \(auto_map\)"):
        read_spec(tmp_path)


def test_a_cache_that_cannot_be_written_is_named(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ((kind, message),) = ask(hub.url, tmp_path / "file", "org/abacus")
    assert kind == "MachineError"
    assert str(tmp_path / "file") in message
    assert "HF_HUB_CACHE" in message
    assert "\n" not in message


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_is_named(number: int) -> None:
    with (
        pytest.raises(MachineError, match=r"^model 'org/a@v': no space for it in .*HF_HUB_CACHE"),
        _refusing(HubName("org/a", "v")),
    ):
        raise OSError(number, os.strerror(number), "x")


@pytest.mark.parametrize(
    "model",
    "name name@v1 a/b/c ./a/b /a/b ../b a/.. a/b@ a/b@../x a/b@/x ~/b a/b--c a/b@x..y "
    f"a/{'b' * 99} https://huggingface.co/a/b".split(),
)
def test_what_is_no_name_on_the_hub_is_a_folder(model: str) -> None:
    assert hub_name(model) is None
    assert model_folder(model) == Path(model)
    assert served_name(model) == model
    with pytest.raises(UserError, match="give a Hugging Face model folder, or ORG/NAME"):
        read_spec(Path("/nowhere") / model.lstrip("/"))


def test_a_folder_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/a.b_c-1@v1") == HubName("org/a.b_c-1", "v1")
    assert served_name("org/a@v1") == served_name("org/a") == "org/a"
    (tmp_path / "org/a").mkdir(parents=True)
    assert model_folder("org/a", weights=True) == Path("org/a")


def test_no_other_start_imports_the_library() -> None:
    code = (
        "import sys; from fusewright.engine.frontend.check import check_start\n"
        "from fusewright.config import EngineOptions\n"
        "check_start(EngineOptions(model=sys.argv[1]))\n"
        "sys.exit('huggingface_hub' in sys.modules)"
    )
    for model in ("abacus", str(FOLDER)):
        command = [sys.executable, "-P", "-c", code, model]
        assert subprocess.run(command, check=False).returncode == 0
