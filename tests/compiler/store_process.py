"""Sample artifacts, and what store tests do in processes of their own: race, die, lose rights.

As a script: ``store_process.py COMMAND ARGUMENT...`` prints one JSON value.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from fusewright.compiler.artifacts.artifact import Artifact
from fusewright.compiler.artifacts.key import Key
from fusewright.compiler.artifacts.store import Store
from fusewright.compiler.artifacts.store_folder import StoreError
from fusewright.config import UserError

FILES: Mapping[str, bytes] = {
    "plan.json": b'{"steps": []}\n',
    "pieces/ab12/code.py": b"def call(args):\n    return args\n",
    "kernels/rms_norm.cubin": bytes(range(256)) * 8,
}
REPORT: Mapping[str, Any] = {
    "passes": [{"name": "fuse_act", "matched": 2}],
    "seconds": {"emit": 1.5},
}


def key(number: int = 0, **more: str) -> Key:
    return Key({"config.compile.level": "2", "hardware.sm": "90", "number": str(number), **more})


def publish(store: Store, number: int = 0, files: Mapping[str, bytes] = FILES) -> Artifact:
    return store.publish(key(number), files, REPORT, f"sample {number}")


def own(root: Path, **options: Any) -> Store:
    """A store that reads and writes one folder."""
    return Store([root], write_to=root, **options)


@contextlib.contextmanager
def small_disk(path: Path, kibibytes: int) -> Iterator[Path]:
    """A file system of this size at ``path``; skips the test where none can be mounted."""
    import pytest

    path.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={kibibytes}k,mode=755", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def contents(artifact: Artifact) -> dict[str, bytes]:
    return {name: artifact.read(name) for name in artifact.manifest.files}


def names_below(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def run(command: str, *args: object) -> Any:
    """What a command of this file prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, command, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def forked(number: int, work: Callable[[int], Any]) -> list[Any]:
    """JSON results of ``work(0..number-1)``, begun at once in as many forked processes."""
    start, go = os.pipe()
    pipes = []
    for index in range(number):
        result, out = os.pipe()
        if os.fork() == 0:
            os.close(go)
            os.read(start, 1)  # returns when the parent closes its end
            os.write(out, json.dumps(work(index)).encode())
            os._exit(0)
        os.close(out)
        pipes.append(result)
    os.close(go)
    results = []
    for pipe in pipes:
        with os.fdopen(pipe) as file:
            results.append(json.loads(file.read()))
    return results


def race(root: Path) -> Any:
    """8 processes publish one key with different reports; each says whose artifact it got."""

    def work(index: int) -> Any:
        artifact = own(root).publish(key(), FILES, {"by": index}, "raced")
        artifact.verify()
        return artifact.manifest.report["by"]

    return forked(8, work)


def locked_race(root: Path) -> Any:
    """8 processes do what the compiler does: find, else lock, find again, build, publish.  To build
    takes until another one waits."""
    waits, tell = os.pipe()

    def work(index: int) -> Any:
        store, waited = own(root), []
        built = False

        def on_wait() -> None:
            waited.append(True)
            os.write(tell, b"x")

        with store.lock(key(), on_wait=on_wait):
            if store.find(key()) is None:
                os.read(waits, 1)
                built = True
                publish(store)
        artifact = store.find(key())
        assert artifact is not None, store.refusals
        return {"built": built, "waited": len(waited), "plan": artifact.read("plan.json").decode()}

    return forked(8, work)


def _publish_forever(root: Path, seed: int) -> None:
    """Publish and prune, over and over, among 8 keys of which 3 fit in the store."""
    rng = random.Random(seed)
    for _ in count():
        number = rng.randrange(8)
        shared = {f"kernels/shared_{i}.cubin": bytes([i]) * 200 for i in range(8)}
        own_files = {f"pieces/{i}/code.py": f"{number} {i}\n".encode() * 30 for i in range(8)}
        store = own(root, size_limit_bytes=20_000)
        with store.lock(key(number)):
            publish(store, number, shared | own_files)


def kill(root: Path, number: int, seed: int) -> Any:
    """Kill as many writers, each at a random moment; what is visible must be whole each time."""
    rng = random.Random(seed)
    interrupted = visible = 0
    for index in range(number):
        started, up = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(up, b"x")
            _publish_forever(root, seed + index)
        os.read(started, 1)
        os.close(started)
        os.close(up)
        time.sleep(rng.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        interrupted += any((root / "tmp").glob("*"))
        for path in (root / "artifacts").glob("*"):
            assert own(root).load(root, path.name) is not None, path
            visible += 1
    publish(own(root), 8)
    return {"interrupted": interrupted, "visible": visible}


def hold(root: Path) -> Any:
    """Say "held" once the sample's lock is held, and keep it until killed."""
    with own(root).lock(key()):
        print('"held"', flush=True)
        signal.pause()


def limited(root: Path, limit_bytes: int) -> Any:
    """Publish where no file may be larger."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    try:
        publish(own(root))
    except StoreError as error:
        return str(error)
    return None


def as_nobody(root: Path) -> Any:
    """Find, read, publish, lock and export as another user."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    store = own(root)
    artifact = store.find(key())
    found = [str(refusal) for refusal in store.refusals]
    if artifact is not None:
        found = [artifact.read(name).hex() for name in sorted(artifact.manifest.files)]
    errors = []
    writes: list[Callable[[], object]] = [
        lambda: publish(store, 1),
        lambda: store.lock(key()).__enter__(),
        lambda: store.export(key().digest, root / "image"),
        lambda: store.export(key().digest, root / "image.tar"),
    ]
    for write in writes:
        try:
            write()
        except UserError as error:
            errors.append(str(error))
    return {"found": found, "errors": errors}


if __name__ == "__main__":
    _name, _root, *_numbers = sys.argv[1:]
    print(json.dumps(globals()[_name](Path(_root), *map(int, _numbers))))
