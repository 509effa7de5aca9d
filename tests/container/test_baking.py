"""docs/baking.md does what it says, and the Dockerfile does the same in an image."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from fusewright.compiler.artifacts.paths import baked_path
from fusewright.serve.cli import main
from tests.engine.start_process import environment, open_folder, unprivileged

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534


# The recipe without a container engine


def recipe(*sections: str) -> str:
    """The fenced commands of these sections of the document, in order."""
    text = (ROOT / "docs" / "baking.md").read_text()
    parts = {part.partition("\n")[0]: part for part in text.split("\n## ")}
    return "\n".join(
        block for s in sections for block in re.findall(r"```bash\n(.*?)```", parts[s], re.S)
    )


def shims(folder: Path) -> str:
    """A PATH on which ``fusewright`` and ``python3`` are those of this test."""
    folder.mkdir()
    for name, words in (("fusewright", " -m fusewright.serve.cli"), ("python3", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def bring_probes(known: Path, folder: Path) -> None:
    """Copy the libraries with which Inductor has found out what this processor can: to compile them
    again would take 5 s."""
    folder.mkdir()
    for path in known.glob("??/*.so"):
        if not path.name.endswith(".main.so"):  # those are kernels
            (folder / path.parent.name).mkdir(exist_ok=True)
            shutil.copy(path, folder / path.parent.name)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("openssl") is None, reason="the recipe makes a key with openssl")
@pytest.mark.usefixtures("device")
def test_the_recipe_without_a_container_engine() -> None:
    with open_folder() as folder:
        env = environment(folder) | {"PATH": shims(folder / "bin")}
        home = folder / "home"
        home.mkdir()
        if os.geteuid() == 0:
            bring_probes(Path(env["TORCHINDUCTOR_CACHE_DIR"]), home / "inductor")
            for path in (home, *home.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
            env |= {"TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor"}
            env |= {"TRITON_CACHE_DIR": f"{home}/triton"}

        def shell(script: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*unprivileged(), "bash", "-euo", "pipefail", "-c", script],
                env=env,
                cwd=home,
                capture_output=True,
                text=True,
                timeout=500,
            )

        done = shell(recipe("Without a container engine", "Signed"))
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        lines = done.stdout.splitlines()
        assert lines.index("46") < lines.index("859") == len(lines) - 1
        assert json.loads((home / "build.json").read_text())["built"]
        for store in ("elsewhere/artifacts", "signed"):
            refused = shell(f"touch {store}/artifacts/x")
            assert refused.returncode != 0 and "Permission denied" in refused.stderr
        start = recipe("Signed").split("fusewright run")[1].replace("signed", "elsewhere/artifacts")
        unsigned = shell(f"fusewright run{start}")
        assert unsigned.returncode == 2
        assert re.fullmatch(r"error: .*signature\.json: is missing.*\n", unsigned.stderr)


# The image


@dataclass(frozen=True)
class Stage:
    """One stage of a Dockerfile: base and name, and (word, rest) of each instruction."""

    base: str
    name: str
    instructions: tuple[tuple[str, str], ...]

    def all(self, word: str) -> list[str]:
        return [rest for name, rest in self.instructions if name == word]


def parse(text: str) -> tuple[dict[str, str], list[Stage]]:
    """The arguments with their defaults, and the stages."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(str.strip, text.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "ARG":
            name, _, default = rest.partition("=")
            arguments[name] = shlex.split(default)[0] if default else ""
        if word == "FROM":
            base, _, name = re.sub(r"\s+AS\s+", " ", rest).partition(" ")
            stages.append(Stage(base, name, ()))
        elif stages:
            last = stages.pop()
            stages.append(
                Stage(last.base, last.name, (*last.instructions, (word, " ".join(rest.split()))))
            )
    return arguments, stages


ARGUMENTS, STAGES = parse((ROOT / "Dockerfile").read_text())
MODEL, BUILD, FINAL = STAGES
COMPILE = next(run for run in BUILD.all("RUN") if "fusewright compile" in run)
COMMAND: list[str] = json.loads(FINAL.all("CMD")[0])


def test_the_stages_are_an_empty_model_a_build_and_what_is_shipped() -> None:
    assert [(stage.base, stage.name) for stage in STAGES] == [
        ("scratch", "model"),
        ("${BUILD_IMAGE}", "build"),
        ("${FINAL_IMAGE}", ""),
    ]
    assert MODEL.instructions == ()
    assert "devel" in ARGUMENTS["BUILD_IMAGE"] and "devel" not in ARGUMENTS["FINAL_IMAGE"]


def test_the_build_gets_every_folder_of_the_package() -> None:
    sources = [word for copy in BUILD.all("COPY") for word in copy.split()[:-1]]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["scikit-build"]["wheel"]["packages"].values())
    needed = packages | {"csrc", "CMakeLists.txt", "pyproject.toml", project["project"]["readme"]}
    needed |= set(project["build-system"]["backend-path"])
    assert needed | set(project["project"]["license-files"]) <= set(sources)
    for copy in BUILD.all("COPY"):
        *copied, destination = copy.split()
        assert destination in ("/src/", f"/src/{copied[0]}"), copy


def test_what_is_shipped_was_made_in_the_build() -> None:
    made = "\n".join(BUILD.all("RUN"))
    for copy in FINAL.all("COPY"):
        flag, source, destination = copy.split()
        assert (flag, source) == ("--from=build", destination), "paths are written into scripts"
        assert source in made or Path(source).parent.as_posix() in made
    copied = [copy.split()[1] for copy in FINAL.all("COPY")]
    (artifacts,) = [Path(path) for path in copied if "venv" not in path]
    assert artifacts.name == "artifacts", "of the store, without its locks and links"
    (store,) = re.findall(r"compile .*?--compile-cache-dir (\S+)", COMPILE)
    assert artifacts.parent == Path(store)
    assert f"chmod -R a-w {store}" in COMPILE


def test_the_store_is_where_a_start_looks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSEWRIGHT_BAKED_DIR", raising=False)
    assert f"--compile-cache-dir {baked_path()} " in COMPILE


def test_the_image_starts_as_a_user_without_rights() -> None:
    words = [word for word, _ in FINAL.instructions]
    (user,) = FINAL.all("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number is checked without /etc/passwd"
    assert not {"RUN", "COPY", "ADD"} & set(words[words.index("USER") :])
    installed = " ".join(FINAL.all("RUN"))
    assert not re.search(r"gcc|g\+\+|build-essential|nvcc|devel", installed)


def test_the_image_refuses_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *argv = COMMAND
    assert program == "fusewright" and "--require-cache" in argv
    assert argv[1] == ARGUMENTS["MODEL"]
    level = [word for word in argv if word.startswith("-O")]
    assert level == [w for w in ARGUMENTS["COMPILE_FLAGS"].split() if w.startswith("-O")]
    for name in ("FUSEWRIGHT_BAKED_DIR", "FUSEWRIGHT_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    assert main([*argv, "--device", "cpu", "--port", "0"]) == 2
    assert "\nerror: no artifact of key " in capsys.readouterr().err


def test_the_document_names_the_dockerfile_as_it_is() -> None:
    text = (ROOT / "docs" / "baking.md").read_text()
    for argument in re.findall(r"--build-arg (\w+)=", text):
        assert argument in ARGUMENTS
    for context in re.findall(r"--build-context (\w+)=", text):
        assert context in [stage.name for stage in STAGES]
    assert f"uid {FINAL.all('USER')[0].partition(':')[0]}" in text
    assert f"`{ARGUMENTS['COMPILE_FLAGS'].partition(' ')[2]}`" in text
