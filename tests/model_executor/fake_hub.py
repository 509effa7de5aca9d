"""A Hugging Face Hub on 127.0.0.1, with the answers that ``huggingface_hub`` reads.

Model files are stored as on the real one: small files under their git hash, safetensors behind a
redirect to another path under their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

MAIN = "main"


@dataclass
class Repository:
    """Files by name; ``revisions`` are the names of its one commit.

    Attributes:
        sizes: in bytes, of files that are listed as others than they are.
        gated: files are refused, as without accepted terms.
        token: what requests must bring; "" is a public repository.
    """

    files: dict[str, bytes]
    revisions: tuple[str, ...] = (MAIN,)
    sizes: dict[str, int] = field(default_factory=dict)
    gated: bool = False
    token: str = ""

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files)).encode()).hexdigest()

    def has(self, revision: str) -> bool:
        return revision in (*self.revisions, self.commit)


@dataclass
class FakeHub:
    """Repositories by name, and each request so far as ``METHOD path``."""

    url: str
    repositories: dict[str, Repository]
    asked: list[str] = field(default_factory=list)

    @property
    def files_url(self) -> str:
        """The same server as another host, as which the library takes the place of large files."""
        return self.url.replace("127.0.0.1", "localhost")

    @property
    def fetched(self) -> list[str]:
        """Names of the files that were asked for."""
        lines = (line.rpartition("/resolve/") for line in self.asked)
        return sorted({rest.partition("/")[2] for _, resolved, rest in lines if resolved})


def folder_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder, for a ``Repository``."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@contextmanager
def fake_hub(repositories: dict[str, Repository]) -> Iterator[FakeHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}", repositories)
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub: FakeHub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        _, *parts = path.split("/")
        if parts[0] == "lfs":
            self._send(200, _by_digest(hub, parts[1]))
            return
        if parts[:2] == ["api", "models"]:
            name, (kind, *rest) = "/".join(parts[2:4]), parts[4:]
        elif len(parts) > 3 and parts[2] == "resolve":
            name, kind, rest = "/".join(parts[:2]), "resolve", parts[3:]
        else:
            self._send(404)
            return
        repository = hub.repositories.get(name)
        if repository is None:
            self._send(401, error="RepoNotFound")
        elif repository.token and self.headers["authorization"] != f"Bearer {repository.token}":
            self._send(401, message="Invalid credentials in Authorization header")
        elif kind == "resolve":
            self._file(hub, repository, rest[0], "/".join(rest[1:]))
        elif not repository.has("/".join(rest)):
            self._send(404, error="RevisionNotFound")
        else:
            self._send(200, json.dumps(_described(name, repository)[kind]).encode())

    def _file(self, hub: FakeHub, repository: Repository, revision: str, name: str) -> None:
        if repository.gated:
            self._send(403, error="GatedRepo")
            return
        if not repository.has(revision) or name not in repository.files:
            self._send(404, error="EntryNotFound")
            return
        data = repository.files[name]
        commit = {"X-Repo-Commit": repository.commit}
        if name.endswith(".safetensors"):
            digest = hashlib.sha256(data).hexdigest()
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            self._send(302, **commit, **linked, Location=f"{hub.files_url}/lfs/{digest}")
        else:
            self._send(200, data, **commit, ETag=f'"{_git_hash(data)}"')

    def _send(
        self, status: int, data: bytes = b"", error: str = "", message: str = "", **headers: str
    ) -> None:
        self.send_response(status)
        for key, value in {"X-Error-Code": error, "X-Error-Message": message, **headers}.items():
            if value:
                self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def _described(name: str, repository: Repository) -> dict[str, Any]:
    """What the two questions about a repository are answered."""
    files = []
    for path, data in repository.files.items():
        size = repository.sizes.get(path, len(data))
        listed: dict[str, Any] = {"type": "file", "path": path, "size": size}
        listed["oid"] = _git_hash(data)
        if path.endswith(".safetensors"):
            digest = hashlib.sha256(data).hexdigest()
            listed["lfs"] = {"oid": digest, "size": size, "pointerSize": 130}
        files.append(listed)
    siblings = [{"rfilename": each["path"], "size": each["size"]} for each in files]
    info = {"_id": "0", "id": name, "modelId": name, "sha": repository.commit, "tags": []}
    return {"revision": {**info, "private": False, "siblings": siblings}, "tree": files}


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _by_digest(hub: FakeHub, digest: str) -> bytes:
    every = (data for one in hub.repositories.values() for data in one.files.values())
    return next(data for data in every if hashlib.sha256(data).hexdigest() == digest)
