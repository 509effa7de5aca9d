"""Fetches the C++ headers of a Linux wheel from pip's index, without the rest of the wheel.

`fetch("torch", "2.11.0", folder)` leaves `folder/torch-2.11.0/`, with the wheel's own folders
below. A wheel is a zip archive: its table of contents and the range of bytes that holds the headers
are read by HTTP, which is 3 MB of torch's 530. A server without ranges sends the whole file.
Standard library only.
"""

from __future__ import annotations

import functools
import html.parser
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path
from typing import IO

TIMEOUT_S = 60
# What the bindings include, by project; other members stay where they are.
HEADERS = {
    "torch": re.compile(r"torch/include/torch/(headeronly|csrc/stable|csrc/inductor/aoti_torch)/"),
    "nvidia-cuda-runtime": re.compile(r".*/include/"),
    "nvidia-cuda-crt": re.compile(r".*/include/"),
}


@functools.cache
def index_url() -> str:
    """The index that pip is configured for."""
    if url := os.environ.get("PIP_INDEX_URL"):
        return url
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "https://pypi.org/simple"


class _Anchors(html.parser.HTMLParser):
    """The links of an index page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def wheel_url(project: str, version: str) -> str:
    """The address of a Linux x86-64 wheel, of any Python: headers are the same."""
    page = f"{index_url().rstrip('/')}/{project}/"
    accept = {"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.5"}
    with urllib.request.urlopen(
        urllib.request.Request(page, headers=accept), timeout=TIMEOUT_S
    ) as r:
        text, kind = r.read().decode(), r.headers.get_content_type()
    if kind.endswith("json"):
        links = [file["url"] for file in json.loads(text)["files"]]
    else:
        anchors = _Anchors()
        anchors.feed(text)
        links = anchors.links
    start = f"{project.replace('-', '_')}-{version}-"
    for link in links:
        url = urllib.parse.urljoin(page, link.partition("#")[0])
        name = urllib.parse.unquote(url.rpartition("/")[2])
        if name.startswith(start) and re.search(r"(many)?linux.*x86_64\.whl$", name):
            return url
    raise LookupError(f"{page} lists no Linux x86_64 wheel of {project} {version}")


class RemoteFile(io.RawIOBase):
    """A file on a server as zipfile reads it: the last bytes at once, others a range at a time."""

    def __init__(self, url: str, last_bytes: int = 1 << 16) -> None:
        self.url, self.position = url, 0
        with self._open(f"bytes=-{last_bytes}") as response:
            if response.status != 206:
                raise io.UnsupportedOperation("the server sends no ranges")
            self.size = int(response.headers["Content-Range"].rpartition("/")[2])
            self.held = response.read()
        self.held_from = self.size - len(self.held)

    def _open(self, range_: str) -> IO[bytes]:
        request = urllib.request.Request(self.url, headers={"Range": range_})
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)

    def hold(self, begin: int, end: int) -> None:
        with self._open(f"bytes={begin}-{end - 1}") as response:
            self.held, self.held_from = response.read(), begin

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        self.position = base + offset
        return self.position

    def readinto(self, buffer: memoryview) -> int:
        begin, end = self.position, min(self.size, self.position + len(buffer))
        if not self.held_from <= begin <= end <= self.held_from + len(self.held):
            self.hold(begin, end)
        part = self.held[begin - self.held_from : end - self.held_from]
        buffer[: len(part)] = part
        self.position += len(part)
        return len(part)


def extract(wheel: IO[bytes], wanted: re.Pattern[str], folder: Path) -> int:
    """Write the members that match; how many they are."""
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.infolist() if wanted.match(m.filename)]
        if members and isinstance(wheel, RemoteFile):
            # Headers lie together in a wheel. 64 KB hold the local header of the last one.
            begin = min(m.header_offset for m in members)
            end = max(m.header_offset + m.compress_size for m in members) + (1 << 16)
            wheel.hold(begin, min(end, wheel.size))
        for member in members:
            archive.extract(member, folder)
    return len(members)


def fetch(project: str, version: str, destination: Path) -> Path:
    """The folder with the project's headers, fetched unless it is there."""
    folder = destination / f"{project}-{version}"
    if folder.is_dir():
        return folder
    destination.mkdir(parents=True, exist_ok=True)
    url = wheel_url(project, version)
    with tempfile.TemporaryDirectory(dir=destination) as scratch:
        draft = Path(scratch) / "headers"
        try:
            count = extract(RemoteFile(url), HEADERS[project], draft)
        except io.UnsupportedOperation:
            whole = Path(scratch) / "wheel"
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as r, whole.open("wb") as file:
                shutil.copyfileobj(r, file)
            with whole.open("rb") as file:
                count = extract(file, HEADERS[project], draft)
        if not count:
            raise LookupError(f"{url} holds no headers")
        draft.replace(folder)
    return folder
