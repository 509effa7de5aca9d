"""Stores: folders of artifacts, searched in order; one of them takes what is new."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ...config import EngineOptions, UserError
from . import archive, disk, signing, store_folder
from .archive import ARTIFACTS
from .artifact import REMEDY, Artifact, Manifest, Refusal
from .key import Key, differences
from .packed import Packed
from .paths import default_search_paths, search_paths
from .store_folder import LOCKS, TRUST_REMEDY, StoreError

_CHANGES = "changes.lock"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listed:
    """An artifact as ``Store.ls()`` finds it, its files unread.

    Attributes:
        path: its folder.
        manifest: None when it cannot be read, for the reason in ``problem``.
        num_bytes: sizes of its files.
        used: last use, or else its making, in seconds of Unix time.
        signer: the id of the key that it says signed it.
    """

    path: Path
    manifest: Manifest | None
    num_bytes: int
    used: float
    signer: str | None = None
    problem: str | None = None


class Store:
    """Finds artifacts in ``search_paths`` and publishes them to ``write_to``.

    Args:
        search_paths: stores in order; missing ones are empty.
        write_to: the store for new artifacts, searched too; None to publish nothing.
        trusted_keys: PEM files or folders; when given, only what these keys signed is found.
        size_limit_bytes: what a publish prunes ``write_to`` to.
        spare: makes the folder that takes ``write_to``'s place, after a warning, when that cannot
            be written; without it that is an error.

    Attributes:
        refusals: what the last ``find()`` would not use.

    Raises:
        UserError: a trusted key cannot be used.
    """

    def __init__(
        self,
        search_paths: Iterable[Path],
        *,
        write_to: Path | None = None,
        trusted_keys: Sequence[Path] = (),
        size_limit_bytes: int | None = None,
        spare: Callable[[], Path] | None = None,
    ) -> None:
        self.write_to = Path(os.path.realpath(write_to)) if write_to else None
        paths = [Path(os.path.realpath(path)) for path in search_paths]
        if self.write_to is not None:
            paths.append(self.write_to)
        self.search_paths = tuple(dict.fromkeys(paths))
        self.size_limit_bytes = size_limit_bytes
        self.refusals: list[Refusal] = []
        self._trusted = signing.trusted_keys(trusted_keys)
        self._spare = spare
        self._unusable: dict[Path, Refusal] = {}

    # Reading

    def find(self, *keys: Key) -> Artifact | None:
        """The first sound artifact of the first of ``keys`` that has one, every byte verified; sets
        ``refusals``."""
        self.refusals = []
        for key, root in product(keys, self.search_paths):
            try:
                artifact = self.load(root, key.digest)
            except Refusal as refusal:
                self.refusals.append(refusal)
                continue
            if artifact is not None:
                store_folder.touch(root, key.digest)
                return artifact
        return None

    def having(self, name: str) -> Iterator[Artifact]:
        """The artifacts that have a file, in order of search, as far as they can be trusted; their
        files are verified when they are read."""
        for root in self.search_paths:
            for path in store_folder.folders(root):
                if not os.path.lexists(path / name):
                    continue
                try:
                    artifact = self._opened(root, path)
                except (Refusal, OSError):
                    continue
                yield artifact

    def refuse(self, artifact: Artifact, refusal: Refusal) -> None:
        """Have an artifact that is whole, but cannot be used, count as broken from now on."""
        self._unusable[artifact.path] = refusal

    def load(self, root: Path, digest: str) -> Artifact | None:
        """The artifact of one store; None when it has none.

        Raises:
            Refusal: others could write it, a byte is not what was written, or no trusted key
                signed it.
        """
        path = root / ARTIFACTS / digest
        if path in self._unusable:
            raise self._unusable[path]
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            return self._verified(root, path)
        except (Refusal, OSError) as error:
            if not os.path.lexists(path):  # pruned meanwhile
                return None
            if isinstance(error, OSError):
                raise _unreadable(path, error) from error
            raise

    def _verified(self, root: Path, path: Path) -> Artifact:
        artifact = self._opened(root, path)
        artifact.verify()
        return artifact

    def _opened(self, root: Path, path: Path) -> Artifact:
        for folder in (root, root / ARTIFACTS, path):
            _check_trust(folder, folder.lstat())
        for name, info in disk.walk(path):
            _check_trust(path / name, info)
        artifact = Artifact.open(path)
        if self._trusted:
            signing.verify(artifact, self._trusted)
        return artifact

    def ls(self) -> list[Listed]:
        """Every artifact of every store, in order of search and then of use, latest first."""
        return [
            listed
            for root in self.search_paths
            for listed in sorted(_listed(root), key=lambda listed: -listed.used)
        ]

    def get(self, prefix: str) -> Artifact:
        """The artifact whose key begins with ``prefix``, its files unread.

        Raises:
            UserError: there is none, or more than one key.
        """
        paths = [path for root in self.search_paths for path in store_folder.folders(root)]
        paths = [path for path in paths if path.name.startswith(prefix)]
        keys = sorted({path.name for path in paths})
        refusals = []
        for path in paths if len(keys) == 1 else ():
            try:
                return Artifact.open(path)
            except Refusal as refusal:
                refusals.append(refusal)
        if refusals:
            raise refusals[0]
        if keys:
            raise UserError(f"{prefix!r} begins several keys: {', '.join(keys)}; give more digits")
        raise UserError(
            f"no artifact's key begins with {prefix!r} in {self._where()}; see "
            "`fusewright cache ls`"
        )

    def explain_miss(self, *keys: Key) -> str:
        """Why the last ``find(*keys)`` found nothing: what was refused, and how the artifact with
        the fewest other factors differs, each with its value there and the value wanted."""
        refused = [f"refused {refusal}" for refusal in self.refusals]
        wanted = {key.digest for key in keys}
        manifests = [m for listed in self.ls() if (m := listed.manifest) and m.key not in wanted]
        if not manifests:
            return "; ".join(refused) or f"no artifacts in {self._where()}"
        nearest, differing = min(
            ((m, differences(m.factors, key.factors)) for m, key in product(manifests, keys)),
            key=lambda pair: len(pair[1]),
        )
        changes = ", ".join(map(str, differing))
        near = (
            f"the nearest in {self._where()} is {nearest.key} ({nearest.label}), which differs "
            f"(there -> wanted) in {changes}"
        )
        return "; ".join([*refused, near])

    def missing(self, key: Key, *as_good: Key) -> UserError:
        """The error for an artifact that must be there, or one of ``as_good``, and is not."""
        return UserError(
            f"no artifact of key {key.digest}: {self.explain_miss(key, *as_good)}; "
            "compile it first: `fusewright compile`, or allow it to be compiled"
        )

    def _where(self) -> str:
        """The folders that are searched; of one that somebody named, whether it is missing."""
        usual = default_search_paths()
        return ", ".join(
            str(path) if path in usual or path.is_dir() else f"{path} (no such folder)"
            for path in self.search_paths
        )

    # Writing

    @contextmanager
    def lock(self, key: Key, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold ``key`` against other processes that compile it; without ``write_to``, nothing.

        Args:
            on_wait: told once if another holds it.

        Raises:
            StoreError: the store cannot be written.
        """
        with ExitStack() as stack:
            try:
                if self.write_to is not None:
                    root = self._prepared()
                    with store_folder.writing(root):
                        path = store_folder.lock_path(root, key.digest)
                        stack.enter_context(disk.held(path, on_wait))
            except StoreError as error:
                self._fall_back(error)
            yield

    def publish(
        self, key: Key, files: Mapping[str, bytes], report: Mapping[str, Any], label: str
    ) -> Artifact:
        """Make an artifact visible, whole; or, when a sound one is there, return that.

        Args:
            files: relative name -> content.
            report: JSON for the manifest.
            label: what it is, for people.

        Raises:
            StoreError: the store cannot be written; nothing of the artifact is left behind.
            ValueError: a name is not a plain relative path, or the report is not JSON.
        """
        packed = Packed(Manifest.of(key, files, report, label), files)
        try:
            return self._publish(packed)
        except StoreError as error:
            self._fall_back(error)
        return self._publish(packed)

    def import_(self, source: Path) -> list[Artifact]:
        """Publish every artifact of an exported folder or tar file, all verified first.

        Raises:
            Refusal: one of them, or the archive, is not sound or not signed as demanded.
            UserError: there is no such archive.
            StoreError: the store cannot be written.
        """
        packages = archive.read(source)
        for packed in packages if self._trusted else ():
            where = source / ARTIFACTS / packed.manifest.key
            signing.verify_bytes(packed.manifest, packed.signature, self._trusted, where)
        return [self._publish(packed) for packed in packages]

    def export(self, prefix: str, destination: Path) -> Path:
        """Copy one artifact out: see ``archive.export()``; returns the folder or tar file."""
        return archive.export(Packed.of(self.get(prefix)), destination)

    def prune(
        self, *, max_bytes: int | None = None, unused_since: float | None = None
    ) -> list[str]:
        """Remove artifacts of ``write_to``, least recently used first; returns their keys.  Those
        whose lock is held stay.

        Args:
            max_bytes: remove until no more than this is taken up.
            unused_since: remove those not used since this Unix time.

        Raises:
            StoreError: the store cannot be written.
        """
        if self.write_to is None or not self.write_to.exists():
            return []
        root = self._prepared()
        with store_folder.writing(root), store_folder.staging(root) as staging:
            return store_folder.prune(root, staging, max_bytes, unused_since)

    def _fall_back(self, error: StoreError) -> None:
        """Write to the spare folder from now on; raises ``error`` if there is none."""
        if self._spare is None:
            raise error
        _log.warning(
            "%s cannot be written: what is compiled now will be compiled again at the next start; "
            "%s",
            self.write_to or "the home directory",
            error,
        )
        self.write_to, self._spare = Path(os.path.realpath(self._spare())), None
        self.search_paths = (*self.search_paths, self.write_to)

    def _publish(self, packed: Packed) -> Artifact:
        root, digest = self._prepared(), packed.manifest.key
        with store_folder.writing(root), store_folder.staging(root) as staging:
            store_folder.remove_stale(root)
            archive.write_folder(packed.contents, staging / digest)
            artifact = self._install(root, staging / digest, packed.manifest, staging)
            store_folder.touch(root, digest)
            store_folder.prune(root, staging, self.size_limit_bytes, keep=digest)
        return artifact

    def _install(self, root: Path, built: Path, manifest: Manifest, staging: Path) -> Artifact:
        final = root / ARTIFACTS / built.name
        with disk.held(root / LOCKS / _CHANGES, lambda: None):
            try:
                if there := self.load(root, built.name):
                    return there
            except Refusal:
                final.rename(staging / "refused")
            built.rename(final)
            self._unusable.pop(final, None)
            disk.sync_folder(final.parent)
        return Artifact(final, manifest)

    def _prepared(self) -> Path:
        """The folder that is written to, made if need be."""
        if self.write_to is None:
            raise StoreError(
                "no folder to keep artifacts in: there is no home directory; "
                "give --compile-cache-dir or set FUSEWRIGHT_CACHE_DIR"
            )
        store_folder.prepare(self.write_to)
        return self.write_to


def open_store(
    folders: Iterable[str] = (),
    *,
    trusted_keys: Iterable[str] = (),
    size_limit_bytes: int | None = None,
    spare: Callable[[], Path] | None = None,
) -> Store:
    """The store of ``--compile-cache-dir``: see ``paths.search_paths()`` and ``Store``."""
    paths, write_to = search_paths(folders)
    return Store(
        paths,
        write_to=write_to,
        trusted_keys=[Path(name).expanduser() for name in trusted_keys],
        size_limit_bytes=size_limit_bytes,
        spare=spare,
    )


def artifacts_having(options: EngineOptions, name: str) -> Iterable[Artifact]:
    """``Store.having`` of the store that options name; none where they use no store."""
    if not options.compile_cache or options.optimization_level == 0:
        return ()
    return open_store(options.compile_cache_dir, trusted_keys=options.trusted_keys).having(name)


def _check_trust(path: Path, info: os.stat_result) -> None:
    if reason := disk.distrust(info):
        raise Refusal(path, reason, TRUST_REMEDY)


def _unreadable(path: Path, error: OSError) -> Refusal:
    where = Path(os.fsdecode(error.filename or path))
    remedy = TRUST_REMEDY if error.errno in (errno.EACCES, errno.EPERM) else REMEDY
    return Refusal(where, f"cannot be read: {error.strerror}", remedy)


def _listed(root: Path) -> Iterator[Listed]:
    for path in store_folder.folders(root):
        size, used = store_folder.num_bytes(path), store_folder.last_use(root, path)
        try:
            artifact = Artifact.open(path)
            yield Listed(path, artifact.manifest, size, used, signing.signer(artifact))
        except Refusal as refusal:
            yield Listed(path, None, size, used, problem=str(refusal))
