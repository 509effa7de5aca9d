"""The forms of draft heads: their names in checkpoints, and how they join a token's embedding with
the hidden state that it follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..models.weight_names import DENSE_DECODER
from ..sharding import ModulePart

_LAYER = "layers.{}."


@dataclass(frozen=True)
class HeadForm:
    """One form of draft head.

    Attributes:
        method: of ``speculative_config``.
        weights: names of a checkpoint's tensors, as ``canonical`` spells them, and their modules.
        widens: the first layer's attention reads both, each behind a norm of its own; else a linear
            layer makes one of both, which is the residual stream.
        hidden_first: the order in which both are joined.
        feeds_normed: a draft follows the head's own state behind its last norm, not before it.
    """

    method: str
    weights: Mapping[str, ModulePart]
    widens: bool = False
    hidden_first: bool = False
    feeds_normed: bool = False


_DENSE = {name.removeprefix("model."): part for name, part in DENSE_DECODER.items()}
EAGLE3: Mapping[str, ModulePart] = {
    **_DENSE,
    f"{_LAYER}hidden_norm": ModulePart("layers.{}.hidden_norm"),
    "fc": ModulePart("fc"),
}

FORMS: dict[str, HeadForm] = {
    "eagle3": HeadForm("eagle3", EAGLE3, widens=True),
    "nextn": HeadForm("mtp", {}),
}
"""``nextn``: the layer that DeepSeek-V3 and GLM-4.5 have behind their last one.  It is captured
from the library, which knows its tensors."""
JOIN = "join"
JOIN_LINEAR = f"{JOIN}.linear"
"""Names, in the library's model, of the module that joins embedding and hidden state and of its
linear layer."""
NEXTN_JOIN = {
    "enorm": f"{JOIN}.embedding_norm",
    "hnorm": f"{JOIN}.hidden_norm",
    "eh_proj": JOIN_LINEAR,
}
"""Names of its parts in such a checkpoint, and here."""

TO_TARGET, FROM_TARGET = "d2t", "t2d"
"""Maps of a head that drafts some of the target's tokens: of each of its tokens, what the target's
id is more; of each of the target's, whether it is one of them."""


def nextn_names(names: Iterable[str], layer: int) -> dict[str, str]:
    """Name in a model of one layer -> name in the checkpoint, of layer number ``layer`` there and
    of the embedding and the head that it has or shares."""
    prefix, there = f"model.layers.{layer}.", set(names)
    own = {name.removeprefix(prefix): name for name in there if name.startswith(prefix)}
    taken = {
        "model.embed_tokens.weight": (f"{prefix}embed_tokens.weight", "model.embed_tokens.weight"),
        "model.norm.weight": (f"{prefix}shared_head.norm.weight",),
        "lm_head.weight": (f"{prefix}shared_head.head.weight", "lm_head.weight"),
    }
    found = {name: next((n for n in known if n in there), "") for name, known in taken.items()}
    for name, theirs in own.items():
        first, _, rest = name.partition(".")
        if first in NEXTN_JOIN:
            found[f"{NEXTN_JOIN[first]}.{rest}"] = theirs
        elif first not in ("embed_tokens", "shared_head"):
            found[f"model.layers.0.{name}"] = theirs
    return {name: theirs for name, theirs in found.items() if theirs}


def canonical(name: str) -> str:
    """The name of a tensor of an EAGLE-3 head, which its authors, SGLang, vLLM and speculators
    spell in several ways."""
    name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name
