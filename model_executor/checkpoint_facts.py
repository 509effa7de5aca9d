"""What a checkpoint's tensors say of its model, where ``config.json`` says otherwise or nothing.

Decided as transformers 5.23 does, from the files' headers and without torch, so that every process
that reads a folder, and every rank, has the same ``ModelSpec``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..config.errors import UserError
from .checkpoint import RawTensor, checkpoint_files, read_raw_header
from .models import ARCHITECTURES
from .spec import ModelSpec

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_CHUNK_BYTES = 2**22


def fit_to_checkpoint(spec: ModelSpec, folder: Path, *, dtype_stated: bool) -> ModelSpec:
    """``spec`` with what the folder's checkpoint decides: whether ``lm_head`` is the embedding, and
    the dtype of a model whose config does not state it.  Without a readable checkpoint, ``spec`` as
    it is: the loader refuses that, if weights are read at all."""
    try:
        headers = [read_raw_header(file) for file in checkpoint_files(folder)]
    except UserError:
        return spec
    if not dtype_stated:
        spec = replace(spec, dtype_name=_first_dtype(headers[0]) or spec.dtype_name)
    tensors = {name: tensor for header in headers for name, tensor in header.items()}
    names = {part.module: name for name, part in ARCHITECTURES[spec.architecture].weights.items()}
    embed, head = (f"{names[module]}.weight" for module in ("embed", "lm_head"))
    if spec.tie_word_embeddings and embed in tensors and head in tensors:
        if equal_bits(tensors[embed], tensors[head]):
            return spec
        note = (
            f"tie_word_embeddings is true, but {head} differs from {embed}: the checkpoint's own "
            "head is used, as by transformers 5; set tie_word_embeddings to false in config.json"
        )
        return replace(spec, tie_word_embeddings=False, notes=(*spec.notes, note))
    if not spec.tie_word_embeddings and embed in tensors and head not in tensors:
        note = (
            f"tie_word_embeddings is false, but the checkpoint has no {head}: {embed} is used in "
            "its place; set tie_word_embeddings to true in config.json if that is right"
        )
        return replace(spec, tie_word_embeddings=True, notes=(*spec.notes, note))
    return spec


def _first_dtype(header: Mapping[str, RawTensor]) -> str | None:
    """The dtype of the first floating-point tensor by name that is not FP8."""
    dtypes = (header[name].dtype for name in sorted(header))
    return next((_DTYPES[dtype] for dtype in dtypes if dtype in _DTYPES), None)


def equal_bits(a: RawTensor, b: RawTensor) -> bool:
    """Whether two tensors have the same bits.  What is not read, such as a truncated file, is not
    equal."""
    if (a.dtype, a.shape, a.nbytes) != (b.dtype, b.shape, b.nbytes):
        return False
    try:
        with a.file.open("rb") as file_a, b.file.open("rb") as file_b:
            file_a.seek(a.start)
            file_b.seek(b.start)
            for done in range(0, a.nbytes, _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, a.nbytes - done)
                chunk = file_a.read(size)
                if len(chunk) < size or chunk != file_b.read(size):
                    return False
    except (OSError, ValueError):
        return False
    return True
