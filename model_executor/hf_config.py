"""Hugging Face folder -> ``ModelSpec``.  Reads configs as transformers 4 and 5 write them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ..config import ModelLimits, UserError
from .abacus import BUNDLED
from .captured.described import Lookup, described_spec, nowhere
from .captured.facts import is_known
from .checkpoint_facts import fit_to_checkpoint
from .heads.spec import is_head
from .hf_json import HfConfig, read_json
from .models import ARCHITECTURES
from .models.rope import why_no_longer
from .models.weight_names import checkpoint_names
from .quant.hf_quant import read_quantization
from .sources.gguf_folder import converted, gguf_file
from .sources.hub import hub_name, small_files, weight_files
from .sources.overridden import overridden
from .spec import ModelSpec, check_blocks


def read_spec(
    folder: Path | str, impl: str = "auto", lookup: Lookup = nowhere, ranks: int = 1
) -> ModelSpec:
    """Read and check ``config.json`` of a model folder, and fit it to the folder's checkpoint where
    there is one.

    Args:
        impl: as the option ``model_impl``.
        lookup: finds artifacts that describe a model without an adapter, whose library is imported
            otherwise.
        ranks: over which a model without an adapter is to be spread, ``tensor_parallel_size``.

    Raises:
        UserError: the folder or the file cannot be read, a field is missing or wrong, or the
            architecture, its quantization or one of its options is not supported.
    """
    folder = Path(folder)
    path = folder / "config.json"
    try:
        exists, is_folder, has_config = folder.exists(), folder.is_dir(), os.path.lexists(path)
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}; check its permissions") from error
    if not has_config:
        what = "no config.json in it" if is_folder else "not a folder" if exists else "not there"
        if (folder / "model_index.json").is_file():
            what = "a diffusion pipeline (model_index.json), which generates no text"
        raise UserError(
            f"model {str(folder)!r}: {what}; give a Hugging Face model folder, or ORG/NAME of a "
            "model on the Hub"
        )
    config = HfConfig(path, read_json(path))
    name = _architecture(config)
    if is_head(config.values):
        raise UserError(
            f"{path}: {name} is a draft head and no model; give it with the model that it drafts "
            'for: --speculative-config \'{"method": "eagle3", "model": "…", '
            '"num_speculative_tokens": 3}\''
        )
    if name not in ARCHITECTURES and impl == "adapter":
        supported = ", ".join(ARCHITECTURES)
        raise UserError(
            f"model_impl=adapter: architecture {name!r} has none; supported: {supported}; or use "
            "auto, which captures its implementation in transformers"
        )
    if name not in ARCHITECTURES or impl == "transformers":
        if described := described_spec(folder, config.values, lookup, ranks):
            return described
        _check_known(config, name)
        # Only now: it imports torch and a library, which takes seconds.
        from .captured.read import captured_spec

        return captured_spec(config, name, ranks)
    spec = ARCHITECTURES[name].spec(config, name)
    names = checkpoint_names(ARCHITECTURES[name].weights, spec.num_layers, spec.num_experts)
    quant = read_quantization(config, names, spec.num_layers)
    check_blocks(path, spec, quant)
    spec = replace(spec, notes=(*spec.notes, *quant.notes)) if quant else spec
    if config.values.get("auto_map"):
        note = f"auto_map names custom code, which is never run: {name} is the built-in one"
        spec = replace(spec, notes=(*spec.notes, note))
    dtype_stated = config.has("dtype") or config.has("torch_dtype")
    return fit_to_checkpoint(replace(spec, quant=quant), folder, dtype_stated=dtype_stated)


def _check_known(config: HfConfig, name: str) -> None:
    """Refuse an architecture that neither an adapter nor the library has."""
    if is_known(name):
        return
    supported = ", ".join(ARCHITECTURES)
    if config.values.get("auto_map"):
        raise UserError(
            f"{config.path}: architecture {name!r} is custom code (auto_map), which is never run; "
            f"choose a model whose architecture is built in: {supported}, or one of transformers"
        )
    raise UserError(
        f"architecture {name!r} is not supported; supported: {supported}, and the causal language "
        "models of transformers, where fusewright[transformers] is installed"
    )


def _architecture(config: HfConfig) -> str:
    supported = ", ".join(ARCHITECTURES)
    names = config.values.get("architectures")
    if names is None or names == []:
        raise UserError(f"{config.path} names no architectures; supported: {supported}")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.error("architectures", names, f"a list of one of {supported}")
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    return str(names[0])


def model_folder(
    model: str, *, weights: bool = False, lookup: Lookup = nowhere, overrides: str = ""
) -> Path:
    """The folder of ``model``: a path, the name of a bundled one, or ``ORG/NAME[@revision]`` on the
    Hub, of which what is not in the Hub's cache is downloaded.  A GGUF file, or a folder of one, is
    converted into a folder, once.

    Args:
        model: a path wins over a name.
        weights: of a model on the Hub, its weights shall be there too.
        lookup: as of ``read_spec``.
        overrides: see ``overridden``.

    Raises:
        UserError: a model on the Hub cannot be had, or it or a GGUF file is not one that
            ``read_spec`` takes.
        MachineError: the network, the Hub or the disk fails.
    """
    if model in BUNDLED and not Path(model).is_dir():
        return overridden(BUNDLED[model], overrides)
    hub = hub_name(model)
    if hub is None:
        file = gguf_file(model)
        folder = Path(model) if file is None else converted(file, read_spec)
        return overridden(folder, overrides)
    folder = small_files(hub)
    if weights:  # refused before gigabytes are downloaded
        read_spec(overridden(folder, overrides), lookup=lookup)
        weight_files(hub, folder)
    return overridden(folder, overrides)


def served_name(model: str) -> str:
    """The name under which ``model`` is served unless another is given: of a model on the Hub
    ``ORG/NAME`` without its revision."""
    hub = hub_name(model)
    return hub.repo if hub is not None else model


def model_limits(spec: ModelSpec) -> ModelLimits:
    """The limits of a model that ``resolve`` has to know."""
    return ModelLimits(
        spec.max_position_embeddings,
        spec.dtype_name,
        spec.quant.kind if spec.quant else "none",
        spec.layer_params,
        why_no_longer(spec.rope),
    )
