"""Reads the layer of a checkpoint that predicts further tokens (MTP): a folder -> ``ModelSpec``.

Layers of the form of DeepSeek-V3 and GLM-4.5 are read, which lie behind the model's last one:
``eh_proj`` joins the embedding behind ``enorm`` with the hidden state behind ``hnorm``, a decoder
layer of the model follows, and ``shared_head`` has its norm and its head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from ...config.errors import UserError
from ..captured.described import Lookup, nowhere
from ..captured.facts import LinearFacts
from ..checkpoint import FLOATS, TensorInfo
from ..hf_json import HfConfig, read_json
from ..spec import ModelSpec, check_blocks
from .forms import JOIN_LINEAR, nextn_names
from .spec import BEHIND_NORM, HeadSpec

NEXTN = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
"""Architectures whose checkpoints have such a layer."""
_STATES = (
    "its layers keep states of whole sequences, which cannot go back behind a wrong draft; the "
    "model does not run here yet"
)
_CUSTOM = "its code comes with the checkpoint, which is never run"
_REFUSED = {
    "Qwen3NextForCausalLM": _STATES,
    "Qwen3_5ForCausalLM": _STATES,
    "Qwen3_5MoeForCausalLM": _STATES,
    "Qwen3_5ForConditionalGeneration": _STATES,
    "Qwen3_5MoeForConditionalGeneration": _STATES,
    "DeepseekV32ForCausalLM": "its attention chooses its keys, which does not run here yet",
    "MiMoForCausalLM": _CUSTOM,
    "Ernie4_5_MoeForCausalLM": "its layer has a form of its own, which is not read yet",
    "LongcatFlashForCausalLM": "its code follows the values of a tensor and does not run here yet",
}
"""Architectures whose checkpoints may have layers that cannot draft here, and why."""
_OF_LAYERS = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}
"""Fields by which the library builds the layer alone; it has experts, as the last ones have."""


def read_mtp(
    folder: Path | str,
    impl: str = "auto",
    lookup: Lookup = nowhere,
    ranks: int = 1,
    *,
    target: ModelSpec,
) -> ModelSpec:
    """The spec of the layer of the checkpoint in a folder that drafts for ``target``.  Arguments
    are those of ``read_spec``.

    Raises:
        UserError: the checkpoint has none, or one that is not supported; says why.
    """
    path = Path(folder) / "config.json"
    config, name = HfConfig(path, read_json(path)), target.architecture
    if name not in NEXTN:
        why = _REFUSED.get(name, f"only those of {', '.join(NEXTN)} are read")
        raise UserError(
            f"{path}: method='mtp': layers of {name} that predict further tokens: {why}; use "
            "eagle3, a draft_model, or ngram"
        )
    if config.values.get("architectures") != [name]:
        raise UserError(
            f"{path}: architectures={config.values.get('architectures')!r}, and the model is "
            f"{name}; leave model out of speculative_config, or name a checkpoint of the model"
        )
    if target.captured is None or target.captured.whole:
        raise UserError(f"{path}: method='mtp': {name} is a part of another model here")
    count = config.integer("num_nextn_predict_layers", 0, least=0)
    if count != 1:
        has = "has none" if count == 0 else f"has {count}"
        raise UserError(
            f"{path}: num_nextn_predict_layers={count}: expected a checkpoint with one layer that "
            f"predicts further tokens, and this one {has}; use a draft_model, or ngram"
        )
    return _spec(path, config, name, target)


def _spec(path: Path, config: HfConfig, name: str, target: ModelSpec) -> ModelSpec:
    # Only now: it imports torch and a library, which takes seconds.
    from ..captured.library import read_config
    from ..captured.quantized.formats import checkpoint_scheme
    from ..captured.read import found_in, spec_of
    from .captured import stored_head

    layer = config.integer("num_hidden_layers")
    found = found_in(path.parent)
    here = {ours: found[theirs] for ours, theirs in nextn_names(found, layer).items()}
    if found and not any(name.startswith(f"model.layers.{layer}.") for name in found):
        raise UserError(
            f"{path.parent}: method='mtp': the checkpoint has no tensors model.layers.{layer}.*, "
            "which num_nextn_predict_layers=1 calls for; it was saved without them"
        )
    values = {name: value for name, value in config.values.items() if name != "layer_types"}
    values |= {name: value for name, value in _OF_LAYERS.items() if name in values}
    values |= {"num_hidden_layers": 1}
    spec = spec_of(read_config(path, values, name), str(path), name, here)
    if spec.hidden_size != target.hidden_size or layer != target.num_layers:
        raise UserError(
            f"{path}: {layer} layers of hidden_size={spec.hidden_size}, and the model has "
            f"{target.num_layers} of {target.hidden_size}; it is another model's checkpoint"
        )
    head = HeadSpec(
        form="nextn",
        target_hidden_size=spec.hidden_size,
        kept=(BEHIND_NORM,),
        draft_vocab_size=spec.vocab_size,
        layer=layer,
    )
    facts, size = spec.captured, spec.hidden_size
    assert facts is not None
    if found and not _is_float(found.get(f"model.layers.{layer}.eh_proj.weight")):
        facts = replace(facts, linears=(*facts.linears, LinearFacts(JOIN_LINEAR, size, 2 * size)))
    spec = replace(spec, captured=facts, head=head, notes=())

    def there(name: str) -> str:
        return name.replace("model.layers.0.", f"model.layers.{layer}.", 1)

    quant = checkpoint_scheme(config, spec, found, partial(stored_head, spec), there)
    check_blocks(path, spec, quant)
    return replace(spec, quant=quant)


def _is_float(info: TensorInfo | None) -> bool:
    """Whether ``eh_proj`` is there in 16 or 32 bits, as it mostly is, named in ``config.json`` or
    not."""
    return info is not None and info.dtype in FLOATS
