"""A model's folder with other values in its ``config.json``, for ``--hf-overrides``.

It lies in the user's cache and has links to all other files, so that whatever reads a model's
folder reads the values without being told of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...config import MachineError
from ...config.folders import user_path
from ..hf_json import read_json

_FOLDER, _CONFIG = "overridden", "config.json"


def overridden(folder: Path, overrides: str) -> Path:
    """The folder of a model with the values of ``overrides``, a JSON object, in its config; the
    folder itself if that is "".

    Raises:
        UserError: the config cannot be read.
        MachineError: the user's cache cannot be written.
    """
    if not overrides:
        return folder
    config = with_values(read_json(folder / _CONFIG), json.loads(overrides))
    text = json.dumps(config, indent=1) + "\n"
    cache = user_path()
    if cache is None:
        raise MachineError(
            "hf_overrides: no place for the changed config; set FUSEWRIGHT_CACHE_DIR"
        )
    source = folder.resolve()
    digest = hashlib.sha256(f"{source}\n{text}".encode()).hexdigest()[:16]
    made = cache / _FOLDER / digest / source.name
    try:
        made.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():  # of a model on the Hub, weights may have come meanwhile
            if file.name != _CONFIG:
                with suppress(FileExistsError):
                    (made / file.name).symlink_to(file)
        if not (made / _CONFIG).exists():
            number, temporary = tempfile.mkstemp(dir=made)
            with os.fdopen(number, "w") as written:
                written.write(text)
            Path(temporary).replace(made / _CONFIG)
    except OSError as error:
        raise MachineError(
            f"{made}: cannot be written: {error.strerror}; free space, or set FUSEWRIGHT_CACHE_DIR"
        ) from error
    return made


def with_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other values.  Those of a part of it, such as ``text_config``, are merged into
    the part, as ``transformers`` does; all others are replaced."""
    merged = {**config, **values}
    for name, value in values.items():
        part = config.get(name)
        if name.endswith("_config") and isinstance(part, Mapping) and isinstance(value, Mapping):
            merged[name] = with_values(part, value)
    return merged
