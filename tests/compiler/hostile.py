"""Archives as an attacker would make them: each differs in one thing from a sound one."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fusewright.compiler.artifacts import disk
from fusewright.compiler.artifacts.artifact import FileDigest, Manifest, canonical_json
from tests.compiler.store_process import FILES, REPORT, key

INSIDE = f"artifacts/{key().digest}"
DEEP = 1200


def document(files: Mapping[str, bytes] = FILES, **changes: Any) -> dict[str, Any]:
    """What the manifest of these files says, with some of it replaced."""
    sound = json.loads(Manifest.of(key(), files, REPORT, "sample").encode())
    del sound["sha256"]
    return sound | changes


def sealed(facts: Mapping[str, Any]) -> bytes:
    """A manifest that ends in its own digest, as a sound one does."""
    digest = hashlib.sha256(canonical_json(facts)).hexdigest()
    return canonical_json({**facts, "sha256": digest})


def listed(name: str, data: bytes = b"", **changes: Any) -> dict[str, Any]:
    """A manifest that lists one more file."""
    entry = {"bytes": len(data), "sha256": FileDigest.of(data).sha256} | changes
    facts = document()
    return facts | {"files": facts["files"] | {name: entry}}


def header(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, link: str = "") -> bytes:
    """The block that begins a member of a tar file."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, link
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def block(data: bytes) -> bytes:
    return data + bytes(-len(data) % tarfile.BLOCKSIZE)


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE) -> bytes:
    return header(name, kind, len(data)) + block(data)


def sound(manifest: bytes | None = None, files: Mapping[str, bytes] = FILES) -> bytes:
    """The members of an artifact, without the end of the archive."""
    manifest = sealed(document(files)) if manifest is None else manifest
    contents = {"manifest.json": manifest, **files}
    return b"".join(member(f"{INSIDE}/{name}", data) for name, data in contents.items())


END = bytes(2 * tarfile.BLOCKSIZE)


def with_member(*blocks: bytes) -> bytes:
    """A sound archive with more behind it."""
    return sound() + b"".join(blocks) + END


def with_manifest(facts: Mapping[str, Any] | bytes, files: Mapping[str, bytes] = FILES) -> bytes:
    return sound(facts if isinstance(facts, bytes) else sealed(facts), files) + END


def with_file(name: str, data: bytes = b"x") -> bytes:
    """An archive whose manifest, too, knows one more file."""
    return with_manifest(listed(name, data), {**FILES, name: data})


def raw(text: str, new: str) -> bytes:
    """The sound manifest with a piece of its text replaced."""
    data = sealed(document()).decode()
    assert text in data
    return with_manifest(data.replace(text, new, 1).encode())


def pax(*records: tuple[str, str]) -> bytes:
    """An extended header."""
    lines = b""
    for name, value in records:
        body = f" {name}={value}\n".encode()
        lines += str(len(body) + len(str(len(body) + 2))).encode() + body
    return member("PaxHeaders/x", lines, tarfile.XHDTYPE)


def sparse() -> bytes:
    """A member of GNU's old sparse format, whose map is no numbers."""
    data = bytearray(header(f"{INSIDE}/hole", tarfile.GNUTYPE_SPARSE))
    data[386 : 386 + 96] = b"x" * 96
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    return bytes(data)


def zeros(num_bytes: int) -> Callable[[Path], None]:
    """A file with nothing but a hole."""

    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, num_bytes)

    return make


NESTED = "/".join("d" * DEEP)
BOMB = b"[" * 100_000 + b"]" * 100_000
FULLWIDTH, OVERRIDE = chr(0xFF0E) * 2, chr(0x202E)

# Name -> (archive, or what makes it; what the refusal says).
ARCHIVES: dict[str, tuple[bytes | Callable[[Path], None], str]] = {
    "empty": (b"", "is no tar file"),
    "garbage": (bytes(range(256)) * 100, "is no tar file"),
    "text": (b"artifacts\n", "is no tar file"),
    "gzip bomb": (gzip.compress(bytes(10**7), mtime=0), "is no tar file"),
    "gzip of a sound one": (gzip.compress(sound() + END, mtime=0), "is no tar file"),
    "xz": (lzma.compress(sound() + END), "is no tar file"),
    "zip": (b"PK\x03\x04" + bytes(1000), "is no tar file"),
    "zeros without end": (zeros(2**40), "holds no artifact"),
    "a FIFO": (os.mkfifo, "not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "a dangling link": (lambda path: path.symlink_to("absent"), "No such file"),
    "a link to itself": (lambda path: path.symlink_to(path), "Too many levels"),
    "cut in a header": (sound()[:-700], "cut short"),
    "cut in a file": (sound()[:-100], "cut short"),
    "cut before its end": (sound(), "cut short or damaged"),
    "damaged header": (with_member(b"x" * 512), "cut short or damaged"),
    "2^62 bytes": (with_member(header(f"{INSIDE}/x", size=2**62)), "is cut short"),
    "-1 bytes": (with_member(header(f"{INSIDE}/x", size=-1)), "is cut short"),
    "2^62 bytes of pax": (with_member(header("x", tarfile.XHDTYPE, 2**62)), "is cut short"),
    "2^62 bytes of name": (with_member(header("x", tarfile.GNUTYPE_LONGNAME, 2**62)), "cut short"),
    "sparse": (with_member(header(f"{INSIDE}/x", tarfile.GNUTYPE_SPARSE)), "a sparse file"),
    "sparse by no numbers": (with_member(sparse()), "cut short or damaged"),
    "sparse by pax": (
        with_member(pax(("GNU.sparse.map", "a,b"), ("GNU.sparse.size", "x")), member("x")),
        "an extended header",
    ),
    "negative pax size": (with_member(pax(("size", "-512")), member("x")), "an extended header"),
    "1,200 pax headers": (with_member(pax(("a", "b")) * DEEP), "an extended header"),
    "1,200 long names": (
        with_member(member("x", b"y\0", tarfile.GNUTYPE_LONGNAME) * DEEP, member("x")),
        "expected artifacts/<key>/<file>",
    ),
    "a long name": (with_member(member("x", b"y" * 10**6, tarfile.GNUTYPE_LONGNAME)), "1000000"),
    "symbolic link": (
        with_member(header(f"{INSIDE}/l", tarfile.SYMTYPE, link="/etc/passwd")),
        "link or device",
    ),
    "hard link": (
        with_member(header(f"{INSIDE}/l", tarfile.LNKTYPE, link="plan.json")),
        "link or device",
    ),
    "device": (with_member(header(f"{INSIDE}/l", tarfile.CHRTYPE)), "link or device"),
    "FIFO": (with_member(header(f"{INSIDE}/l", tarfile.FIFOTYPE)), "link or device"),
    "unknown type": (with_member(header(f"{INSIDE}/l", b"Z")), "link or device"),
    "absolute path": (with_member(member("/etc/passwd")), "is outside of the archive"),
    "path through ..": (with_member(member(f"{INSIDE}/../../../x")), "is outside of the archive"),
    "folder ..": (with_member(member("..", kind=tarfile.DIRTYPE)), "is outside of the archive"),
    "other folder": (with_member(member("etc", kind=tarfile.DIRTYPE)), "expected artifacts/<key>"),
    "two of a name": (with_member(member(f"{INSIDE}/plan.json")), "is there twice"),
    "a lock": (with_member(member(f"locks/{key().digest}.lock")), "expected artifacts/<key>"),
    "a use": (with_member(member(f"used/{key().digest}")), "expected artifacts/<key>/<file>"),
    "an object": (with_member(member("objects/ab/abcd")), "expected artifacts/<key>/<file>"),
    "unfinished": (with_member(member(f"artifacts/.{key().digest}.1/x")), "expected artifacts/"),
    "key in capitals": (with_member(member("artifacts/" + "A" * 32 + "/x")), "expected artifacts/"),
    "a second key": (with_member(member("artifacts/" + "0" * 32 + "/x")), "is missing"),
    "not in the manifest": (with_member(member(f"{INSIDE}/x")), "is not what the manifest says"),
    "two by case": (with_file("Plan.JSON"), "is taken"),
    "manifest by case": (with_file("MANIFEST.json"), "is taken"),
    "file and folder": (with_file("plan.json/x"), "both a file and a folder"),
    "hidden": (with_file(".lock"), "not a plain relative path"),
    "backslash": (with_file("a\\b"), "not a plain relative path"),
    "newline": (with_file("a\nerror: b"), "not a plain relative path"),
    "terminal escape": (with_file("a\x1b[2Jb"), "not a plain relative path"),
    "no ASCII": (with_file(FULLWIDTH), "not a plain relative path"),
    "no UTF-8": (with_member(header(f"{INSIDE}/\udcff")), "not a plain relative path"),
    "1,200 folders": (with_file(f"{NESTED}/x"), "folders deep"),
    "too many files": (
        with_member(*(header(f"{INSIDE}/{n}") for n in range(disk.MAX_FILES + 1))),
        f"more than {disk.MAX_FILES} files",
    ),
    "no manifest": (member(f"{INSIDE}/plan.json") + END, "manifest.json: is missing"),
    "a file less": (with_manifest(sealed(document()), {"plan.json": b""}), "is missing"),
    "other content": (
        with_manifest(sealed(document()), {**FILES, "plan.json": b'{"steps": {}}\n'}),
        "plan.json: is not what the manifest says",
    ),
    "a manifest of 9 MB": (with_manifest(bytes(9 * 2**20)), "expected at most 8388608"),
    "a signature of 1 MB": (
        with_member(member(f"{INSIDE}/signature.json", bytes(2**20))),
        "expected at most 65536",
    ),
    "JSON bomb": (with_manifest(BOMB), "is nested too deeply"),
    "nested report": (
        raw('"seconds": {', '"s": ' + "[" * 40 + "]" * 40 + ', "seconds": {'),
        "is nested too deeply",
    ),
    "NaN": (raw("1.5", "NaN"), "not JSON compliant"),
    "infinite": (raw("1.5", "1e999"), "not JSON compliant"),
    "5,000 digits": (raw("1.5", "9" * 5000), "4300 digits"),
    "cut JSON": (with_manifest(sealed(document())[:-20]), "manifest.json: "),
    "JSON of no object": (with_manifest(b"[]\n"), "expected an object"),
    "bytes of no text": (with_manifest(b'{"label": "\xff"}'), "is not UTF-8"),
    "half a character": (raw('"sample"', r'"\ud800"'), "surrogates not allowed"),
    "a key twice": (raw('"format": 1', '"format": 1,\n "format": 1'), "own digest differs"),
    "an unknown field": (with_manifest(document(more=1)), "own digest differs"),
    "another format": (with_manifest(document(format=2)), "has format 2, expected 1"),
    "another key": (with_manifest(document(key="0" * 32)), "is not the digest of its factors"),
    "escape in the label": (with_manifest(document(label="a\x1b[2Jb")), "printable characters"),
    "newline in the label": (with_manifest(document(label="a\nb")), "printable characters"),
    "override in the label": (with_manifest(document(label=OVERRIDE)), "printable characters"),
    "a label of 1 MB": (with_manifest(document(label="a" * 2**20)), "printable characters"),
    "escape in the producer": (with_manifest(document(producer="\x1b]0;x")), "printable"),
    "a factor of numbers": (with_manifest(document(factors={"a": 1})), "a factor that is no text"),
    "escape in a factor": (
        with_manifest(
            document(factors=dict(key(0, x="\x1b[m").factors), key=key(0, x="\x1b[m").digest)
        ),
        "printable text",
    ),
    "2^62 bytes listed": (with_manifest(listed("x", bytes=2**62)), "expected at most 1073741824"),
    "-1 bytes listed": (with_manifest(listed("x", bytes=-1)), "has no size of 'x'"),
    "true bytes listed": (with_manifest(listed("x", bytes=True)), "has no size of 'x'"),
    "a digest of numbers": (with_manifest(listed("x", sha256=1)), "has no digest of 'x'"),
    "passes of numbers": (with_manifest(document(report={"passes": [1]})), "that is no dict"),
    "choices of lists": (with_manifest(document(report={"choices": []})), "is no dict"),
    "a plan of no JSON": (with_file("kernels.json", b"{"), "kernels.json: is no JSON"),
    "a nested plan": (with_file("kernels.json", BOMB), "kernels.json: is no JSON: is nested"),
}


def folder_with(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """An exported folder whose artifact was changed."""

    def make(path: Path) -> None:
        path.mkdir()
        with tarfile.open(fileobj=io.BytesIO(sound() + END)) as tar:
            tar.extractall(path, filter="data")
        change(path / INSIDE)

    return make


def nest(folder: Path, depth: int = DEEP) -> None:
    """Folders in one another, deeper than a path can be long."""
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("deep", dir_fd=fd)
        below = os.open("deep", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


def _to_file(path: Path) -> None:
    path.rename(path.with_name("x"))
    path.write_bytes(b"")


def _to_link(path: Path) -> None:
    path.rename(path.with_name("x"))
    path.symlink_to("x")


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "folder: symbolic link": (
        folder_with(lambda path: (path / "l").symlink_to("/etc/passwd")),
        "l: is a link or device",
    ),
    "folder: FIFO": (folder_with(lambda path: os.mkfifo(path / "f")), "f: is a link or device"),
    "folder: 1,200 folders": (folder_with(nest), "folders nested more than 8 deep"),
    "folder: a file for an artifact": (folder_with(_to_file), "is a link or file"),
    "folder: a link for an artifact": (folder_with(_to_link), "is a link or file"),
    "folder: a hole of 2^40 bytes": (
        folder_with(lambda path: zeros(2**40)(path / "hole")),
        "expected at most 2147483648",
    ),
    "folder: empty": (lambda path: (path / "artifacts").mkdir(parents=True), "holds no artifact"),
    "folder: of nothing": (Path.mkdir, "No such file"),
}
