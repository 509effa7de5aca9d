"""Claims about `make check` of csrc's bindings, and about the stamp of GPU tests."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = "torch/include/torch/headeronly/version.h"
WHEEL = "torch-2.11.0-cp312-cp312-manylinux_2_28_x86_64.whl"


def run_tool(code: str, folder: Path = ROOT / "tools", **environment: str) -> str:
    """Output of a program that imports the tools, its exit code 0."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(folder)} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wheel_of_torch() -> bytes:
    """A header between 200 KB of other members, as a wheel."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as wheel:
        wheel.writestr("torch/lib/before.so", os.urandom(200_000))
        wheel.writestr(HEADER, "#define TORCH 2\n")
        wheel.writestr("torch/lib/after.so", os.urandom(200_000))
    return data.getvalue()


class Index(http.server.BaseHTTPRequestHandler):
    """An index with one project; ``ranges`` says whether it sends parts of files."""

    ranges = True
    wheel = wheel_of_torch()
    sent = 0

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        body, status, headers = self.wheel, 200, {}
        if self.path == "/simple/torch/":
            body = f'<a href="../../files/{WHEEL}#sha256=0">{WHEEL}</a>'.encode()
            headers["Content-Type"] = "text/html"
        elif wanted and self.ranges:
            first, last = wanted.removeprefix("bytes=").split("-")
            begin = int(first) if first else max(0, len(body) - int(last))
            end = int(last) + 1 if first else len(body)
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(body)}"
            body, status = body[begin:end], 206
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        type(self).sent += len(body)  # before whoever asked has it, and goes on
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Index.sent = 0
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


@pytest.mark.parametrize("ranges", [True, False])
def test_headers_come_alone_or_with_the_whole_wheel(
    index: str, ranges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Index, "ranges", ranges)
    code = (
        "import wheel_headers, pathlib\n"
        f"wheel_headers.fetch('torch', '2.11.0', pathlib.Path({str(tmp_path)!r}))"
    )
    run_tool(code, PIP_INDEX_URL=index)
    assert [p.name for p in tmp_path.iterdir()] == ["torch-2.11.0"]
    found = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert found == [tmp_path / "torch-2.11.0" / HEADER]
    assert found[0].read_text() == "#define TORCH 2\n"
    assert (Index.sent < len(Index.wheel)) == ranges


@pytest.mark.parametrize("ci", [True, False])
def test_unfetched_headers_are_said_and_fail_in_ci(ci: bool, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    environment = os.environ | {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "CI": "1" * ci}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "tools" / "check_bindings.py")],
        capture_output=True,
        text=True,
        check=False,
        env={name: v for name, v in environment.items() if name != "PYTHONSAFEPATH"},
    )
    assert done.returncode == ci, done.stderr
    (line,) = (done.stderr if ci else done.stdout).splitlines()
    assert "NOT CHECKED against torch 2.11.0 and " in line
    assert "no headers from http://127.0.0.1:9/simple: " in line


def test_gpu_tests_refuse_a_library_that_was_carried_there(tmp_path: Path) -> None:
    library, built = tmp_path / "_fw_cuda.so", tmp_path / "built.json"
    code = f"""
import gpu_stamp, json, pathlib
try:
    record = gpu_stamp.library_built_here(*map(pathlib.Path, ({str(library)!r}, {str(built)!r})))
    print(json.dumps(record))
except SystemExit as refusal:
    print(refusal)
"""
    refusal = f"gpu-test: {library} was not built here from source; run tools/gpu.sh test\n"
    assert run_tool(code) == refusal
    library.write_bytes(b"built")
    assert run_tool(code) == refusal
    record = {"torch": "2.11.0", "seconds": 70, "sha256": hashlib.sha256(b"built").hexdigest()}
    built.write_text(json.dumps(record))
    assert json.loads(run_tool(code)) == record
    library.write_bytes(b"carried")
    assert run_tool(code) == refusal


def test_rounds_of_gpu_tests_are_kept_for_the_same_sources_and_machine(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp.json"
    code = f"""
import gpu_stamp, json, pathlib
gpu_stamp.STAMP = stamp = pathlib.Path({str(stamp)!r})
digests = gpu_stamp.source_digests()
about = {{"gpu": "H200", "arguments": ["-v"], "digest": gpu_stamp.combined_digest(digests)}}
first = {{gpu_stamp.ROUNDS[1]: {{"passed": 13}}}}
print(gpu_stamp.rounds_so_far(about))
stamp.write_text(json.dumps({{"sources": digests, "rounds": first, **about}}))
print(gpu_stamp.rounds_so_far(about) == first)
for other in ({{"gpu": "H100"}}, {{"arguments": ["-k", "moe"]}}, {{"digest": "0"}}):
    print(gpu_stamp.rounds_so_far({{**about, **other}}))
print(gpu_stamp.notice(stamp))
"""
    assert run_tool(code).splitlines() == [
        "{}",
        "True",
        *["{}"] * 3,
        "notice: gpu-tests.json lacks a round; run tools/gpu.sh test --round 2",
    ]


def test_the_notice_of_changed_sources_counts_them_and_names_the_first_three(
    tmp_path: Path,
) -> None:
    code = f"""
import gpu_stamp, json, pathlib
root = pathlib.Path({str(tmp_path)!r})
(root / "ops").mkdir()
for name in "abcd":
    (root / "ops" / f"{{name}}.py").write_text(name)
stamp = root / "stamp.json"
for stamped in ({{}}, {{"ops/c.py": ""}}, {{"ops/e.py": ""}}):
    stamp.write_text(json.dumps({{"sources": gpu_stamp.source_digests(root) | stamped}}))
    print(gpu_stamp.notice(stamp, root))
stamp.write_text(json.dumps({{"sources": {{}}}}))
print(gpu_stamp.notice(stamp, root))
"""
    prefix = "notice: gpu-tests.json "
    assert run_tool(code).splitlines() == [
        prefix + "lacks a round; run tools/gpu.sh test --round 1",
        prefix + "covers other sources; 1 changed: ops/c.py",
        prefix + "covers other sources; 1 changed: ops/e.py",
        prefix + "covers other sources; 4 changed: ops/a.py, ops/b.py, ops/c.py, ...",
    ]
