"""GGUF files: each is converted once into a Hugging Face folder, which is then a model like others.

``transformers`` reads the configuration, the tokenizer and the names of the weights.  Those of
linear layers stay in the integers of the file (``gguf_weights``); the package ``gguf`` dequantizes
others, which are stored in bfloat16.  What ``transformers`` would leave out, such as a scaling of
rope, is refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...config.errors import MachineError, UserError
from ...config.folders import user_path
from ..checkpoint import INDEX, SINGLE

_FOLDER, _VERSION = "gguf", 2
_PACKAGES = ("gguf", "transformers")
_INSTEAD = "use the model's safetensors"


def gguf_file(model: str) -> Path | None:
    """The GGUF file that ``model`` is the path of, or the only one in a folder without safetensors.

    Raises:
        UserError: such a folder has several.
    """
    path = Path(model)
    if path.suffix == ".gguf" and path.is_file():
        return path
    if any((path / name).exists() for name in (SINGLE, INDEX)) or not path.is_dir():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(
            f"model {model!r}: {len(files)} GGUF files, such as {files[0].name}; give the path of "
            "one; a model in several parts is not read, so join them with llama-gguf-split --merge"
        )
    return files[0] if files else None


def converted(file: Path, check: Callable[[Path], object]) -> Path:
    """The Hugging Face folder of a GGUF file, in the user's cache; made if it is not there.

    Args:
        check: refuses a folder with the model's ``config.json``, before weights are converted.

    Raises:
        UserError: a package is missing, or the file is damaged or of a model that is not read.
        MachineError: the folder cannot be written.
    """
    stat, cache = file.stat(), user_path()
    if cache is None:
        raise MachineError(f"{file}: no place for the converted model; set FUSEWRIGHT_CACHE_DIR")
    facts = (_VERSION, str(file.resolve()), stat.st_size, stat.st_mtime_ns)
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    folder = cache / _FOLDER / f"{file.stem}-{digest}"
    if folder.is_dir():
        return folder
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise UserError(
            f"{file}: a GGUF file needs the package {missing[0]}: pip install 'fusewright[gguf]'"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    try:
        with _parsed_once():
            _convert(file, temporary, check)
        os.chmod(temporary, 0o755)  # noqa: PTH101 - as other folders, not mkdtemp's own
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _unwritable(folder: Path, error: OSError) -> MachineError:
    return MachineError(
        f"{folder}: cannot be written: {error.strerror or error}; free space, or set "
        "FUSEWRIGHT_CACHE_DIR"
    )


_PARSING = threading.Lock()
"""Conversions of two threads share a module, see ``_parsed_once``."""


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Share what ``transformers`` asks of ``gguf`` at each call, most of the time of a conversion:
    the parsed file, and the names of the weights, which are listed for every module."""
    gguf: Any = import_module("gguf")
    shared = ("GGUFReader", "get_tensor_name_map")
    with _PARSING:
        own = {name: getattr(gguf, name) for name in shared}
        for name, function in own.items():
            setattr(gguf, name, functools.cache(function))
        try:
            yield
        finally:
            for name, function in own.items():
                setattr(gguf, name, function)


def _convert(file: Path, folder: Path, check: Callable[[Path], object]) -> None:
    names = _tensor_names(file)
    import torch
    from safetensors.torch import save_file

    from .gguf_weights import kept_weights  # which imports torch

    library: Any = import_module("transformers")
    reader: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    config = _read(file, lambda: library.AutoConfig.from_pretrained(**where))
    build = library.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = _read(file, lambda: build(config, dtype=torch.bfloat16))
    fields = {**config.to_dict(), "architectures": [type(model).__name__], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n")
    check(folder)
    tokenizer = _read(file, lambda: library.PreTrainedTokenizerFast.from_pretrained(**where))
    tokenizer.save_pretrained(folder)
    how = {"return_tensors": True, "model_to_load": model, "torch_dtype": torch.bfloat16}
    loaded = _read(file, lambda: reader.load_gguf_checkpoint(str(file), **how))
    tensors = {name: tensor.contiguous() for name, tensor in loaded["tensors"].items()}
    if len(tensors) != len(names):
        taken = _read(file, lambda: reader.get_gguf_hf_weights_map(model, reader.TensorProcessor()))
        other = next(name for name in names if name not in taken)
        raise UserError(f"{file}: nothing takes its tensor {other}; {_INSTEAD}")
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    for name in shapes.keys() | tensors.keys():
        if name not in tensors or tuple(tensors[name].shape) != shapes.get(name):
            has = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise UserError(
                f"{file}: {name} is {has}, expected {shapes.get(name, 'nothing')}; {_INSTEAD}"
            )
    taken = _read(file, lambda: reader.get_gguf_hf_weights_map(model, reader.TensorProcessor()))
    linears = [
        name
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and module is not model.get_output_embeddings()
    ]
    kept = _read(file, lambda: kept_weights(file, taken, linears, tensors))
    if kept.stored:
        plain = {f"{module}.weight" for module in kept.stored}
        tensors = {name: t for name, t in tensors.items() if name not in plain} | kept.tensors()
        fields["quantization_config"] = kept.config(linears)
        (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n")
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def _tensor_names(file: Path) -> tuple[str, ...]:
    """The names in a file, unless it has what ``transformers`` skips without a word.

    Raises:
        UserError: it has, or cannot be read.
    """
    reader: Any = import_module("transformers.integrations.gguf")
    fields, names = _read(file, lambda: reader.read_gguf_metadata(str(file)))
    kind = fields.get("general.architecture", "")
    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    if scaling != "none":
        raise UserError(
            f"{file}: {kind}.rope.scaling.type is {scaling!r}, which is not read from GGUF; "
            f"{_INSTEAD}"
        )
    if experts := [name for name in names if "_exps." in name]:
        raise UserError(
            f"{file}: {experts[0]} is of experts, which are not read from GGUF; {_INSTEAD}"
        )
    return tuple(names)


def _read(file: Path, read: Callable[[], Any]) -> Any:
    """Whatever the libraries raise for a file is one line."""
    try:
        return read()
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{file}: cannot be read as GGUF: {reason}; download it again, or {_INSTEAD}"
        ) from error
