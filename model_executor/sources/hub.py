"""The Hugging Face Hub: the name of a model there -> the folder that holds its files.

``huggingface_hub`` downloads into its own cache and knows the token, the proxies and the variables
``HF_HOME``, ``HF_HUB_CACHE``, ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT``.  What the cache holds is used
as it is, without asking the network.  The small files come first, so that a model that cannot be
served is refused before its weights are downloaded.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ...config.errors import MachineError, UserError
from ..checkpoint import INDEX, SINGLE, checkpoint_files, indexed_files

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>{_PART}(?:/{_PART})*))?")
_MOST_CHARACTERS = 96
"""The longest name of a repository on the Hub."""
_NEEDED = ("config.json", "tokenizer.json")
_SMALL = [
    *_NEEDED,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    INDEX,
]
"""What is read beside the weights.  Nothing else is downloaded: no pickles and no code."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class HubName(NamedTuple):
    """``ORG/NAME``, and the branch, tag or commit behind ``@``; None is the default branch."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def hub_name(model: str) -> HubName | None:
    """``model`` as a name on the Hub; None if it is the path of something, or no such name."""
    match = _NAME.fullmatch(model)
    if match is None or ".." in model or "--" in match["repo"] or os.path.lexists(model):
        return None
    if len(match["repo"]) > _MOST_CHARACTERS:
        return None
    return HubName(match["repo"], match["revision"])


@cache
def small_files(hub: HubName) -> Path:
    """The folder of a model's configuration, tokenizer and index of weights; they are downloaded
    unless the cache has them.  A process that asks again gets the same folder, also if the branch
    has moved.

    Raises:
        UserError: there is no such model or revision, the token may not read it, or it is not in
            the cache and ``HF_HUB_OFFLINE`` is set.
        MachineError: the Hub cannot be reached, or the cache cannot be written.
    """
    folder = _cached(hub)
    if folder is not None and all((folder / name).is_file() for name in _NEEDED):
        return folder
    return _download(hub, hub.revision, _SMALL)


def weight_files(hub: HubName, folder: Path) -> None:
    """Download the safetensors of ``folder``, which ``small_files`` gave, unless they are there.

    Raises:
        UserError: the model has none, or as ``small_files`` does.
        MachineError: the disk has not the space for them, or as ``small_files`` does.
    """
    try:
        checkpoint_files(folder)
        return
    except UserError:
        pass  # some are not there
    commit = folder.name  # the branch may have moved since
    sizes = _sizes(hub, commit)
    if SINGLE in sizes:
        names = [SINGLE]
    elif (folder / INDEX).is_file():
        names = indexed_files(folder / INDEX)
    else:
        others = sorted(name for name in sizes if name.endswith((".bin", ".pt", ".pth", ".gguf")))
        has = f"only {others[0]}" if others else "no weights"
        raise UserError(
            f"model {str(hub)!r}: it has neither {SINGLE} nor {INDEX}, {has}; name a model that "
            "has safetensors, or use --load-format dummy for random weights"
        )
    if lacking := [name for name in names if name not in sizes]:
        raise UserError(
            f"model {str(hub)!r}: it has no {lacking[0]}, which its {INDEX} names; choose another "
            "revision"
        )
    missing = [name for name in names if not (folder / name).exists()]
    needed, free = sum(sizes[name] for name in missing), shutil.disk_usage(folder).free
    if needed > free:
        raise _no_space(hub, f"{_gb(needed)} to download, and {_gb(free)} free")
    _download(hub, commit, names)


def _cached(hub: HubName) -> Path | None:
    """The folder in the cache, if the small files that the library knows of are in it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _refusing(hub), suppress(LocalEntryNotFoundError):
        return Path(
            snapshot_download(
                hub.repo, revision=hub.revision, allow_patterns=_SMALL, local_files_only=True
            )
        )
    return None


def _download(hub: HubName, revision: str | None, names: list[str]) -> Path:
    """The library's own progress bar shows it.  If the Hub cannot be reached, the library gives
    what the cache has of these names."""
    from huggingface_hub import snapshot_download

    with _refusing(hub):
        return Path(snapshot_download(hub.repo, revision=revision, allow_patterns=names))


def _sizes(hub: HubName, commit: str) -> dict[str, int]:
    """Name -> bytes of the files of a revision."""
    from huggingface_hub import HfApi

    with _refusing(hub):
        info = HfApi().model_info(hub.repo, revision=commit, files_metadata=True)
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}


@contextmanager
def _refusing(hub: HubName) -> Iterator[None]:
    """Whatever the library raises is one line that says what to do."""
    try:
        yield
    except Exception as error:
        raise _refusal(hub, error) from error


def _refusal(hub: HubName, error: Exception) -> UserError:
    from huggingface_hub import constants, errors

    what, url = f"model {str(hub)!r}", constants.ENDPOINT
    cause = error.__cause__
    if isinstance(cause, errors.HfHubHTTPError | errors.OfflineModeIsEnabled):
        error = cause  # the library has looked into its cache and found nothing
    if constants.is_offline_mode():
        revision = f" --revision {hub.revision}" if hub.revision else ""
        return UserError(
            f"{what}: not a folder here, and not all of it is in the cache "
            f"{constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set; run `hf download {hub.repo}"
            f"{revision}` where there is a network, or unset HF_HUB_OFFLINE"
        )
    if isinstance(error, errors.GatedRepoError):
        return UserError(
            f"{what} is gated; accept its terms at {url}/{hub.repo}, then set HF_TOKEN or run "
            "`hf auth login` with a token of that account"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(
            f"{what}: the model has no revision {hub.revision or 'main'!r}; see "
            f"{url}/{hub.repo}/commits for its branches, tags and commits"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(
            f"{what}: not a folder here, and {url} has no such model, or a private one; check the "
            "name, and for a private model set HF_TOKEN or run `hf auth login`"
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return UserError(
                f"{what}: {url} refuses the token ({status}); set HF_TOKEN or run `hf auth login` "
                "with a token that may read it"
            )
        return MachineError(f"{what}: {url} answers with status {status}; try again later")
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return _no_space(hub, str(error.strerror))
    if isinstance(error, OSError) and error.filename:
        return MachineError(
            f"{what}: cannot use {error.filename}: {error.strerror}; set HF_HOME or HF_HUB_CACHE "
            "to a folder that can be written"
        )
    reason = str(cause or error).strip().splitlines()
    return MachineError(
        f"{what}: not a folder here, not all of it is in the cache {constants.HF_HUB_CACHE}, and "
        f"it cannot be downloaded from {url} ({type(cause or error).__name__}"
        f"{': ' + reason[0] if reason else ''}); check the path or the network, and run it again"
    )


def _no_space(hub: HubName, why: str) -> MachineError:
    from huggingface_hub import constants

    return MachineError(
        f"model {str(hub)!r}: no space for it in {constants.HF_HUB_CACHE} ({why}); free some, or "
        "set HF_HUB_CACHE to a folder on a larger disk"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
