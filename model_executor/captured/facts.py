"""Describes a captured model as data, which a spec holds and which needs no library."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..sharding import ShardRule


def is_known(architecture: str) -> bool:
    """Whether the installed library names this architecture among its causal language models; its
    text is searched, as importing it takes seconds."""
    library = find_spec("transformers")
    if library is None or library.origin is None:
        return False
    table = Path(library.origin).parent / "models" / "auto" / "modeling_auto.py"
    try:
        return f'"{architecture}"' in table.read_text()
    except OSError:
        return False


@dataclass(frozen=True)
class AttentionFacts:
    """Describes one call of the attention interface; the KV cache of that call follows from it.

    Attributes:
        num_heads, num_kv_heads: of the whole model.
        head_dim: of queries and keys; values are padded to it.
        value_dim: of values.
        window: positions that a query sees, itself included; 0: all.
        chunk: a query sees the positions from the last multiple of it on; 0: all.
        ranks: over which heads are spread; 1: every rank computes all of them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0
    chunk: int = 0
    ranks: int = 1

    @property
    def local_kv_heads(self) -> int:
        """KV heads of a rank; several ranks hold the same one where there are more of them."""
        return max(1, self.num_kv_heads // self.ranks)

    @property
    def reach(self) -> int:
        """Positions that a query can see at most, itself included; 0: all."""
        return min(filter(None, (self.window, self.chunk)), default=0)


@dataclass(frozen=True)
class LinearFacts:
    """Describes a linear layer that can be quantized, or a tensor of those of all experts.

    Attributes:
        name: of the layer, or of the tensor of experts, in the library's model.
        rows, columns: output and input features of one.
        experts: how many there are; 0: the layer is no expert's.
    """

    name: str
    rows: int
    columns: int
    experts: int = 0


@dataclass(frozen=True)
class Shard:
    """How a parameter is spread over the ranks: by ``rule``, whose dimension is the parameter's.

    ``kind`` says what that means: "column" for a linear layer whose outputs are split, "row" for
    one whose inputs are, "vocabulary" for the embedding and the head, "like" for what is computed
    with split activations, "summand" for what rank 0 alone adds to a sum over the ranks.
    """

    name: str
    kind: str
    rule: ShardRule


@dataclass(frozen=True)
class CapturedFacts:
    """A model that is captured from its library.

    Attributes:
        config: the library's configuration, as JSON with sorted keys.
        whole: that of the model of which this is the text decoder; "" if it is a model of its own.
        library: name and version of the library, whose code the model is.
        attention: of every call of the attention interface, in the order of the calls.
        untied: names of parameters that the configuration ties to others, and the checkpoint does
            not.
        layers: name of the model's list of layers, if it has one of a layer for each call.
        kinds: for each layer, the number of the first one that computes the same.
        undivided: why no layer stands for others when the model is traced; "" if one does.
        siblings: names of linear layers that are merged, a group each.
        linears: the linear layers that can be quantized.
        ranks: that hold the model together.
        shards: parameters of which a rank holds a part.
        unsplit: linear layers of which every rank holds all, and why.
    """

    config: str
    library: str
    attention: tuple[AttentionFacts, ...] = ()
    untied: tuple[str, ...] = ()
    layers: str = ""
    kinds: tuple[int, ...] = ()
    undivided: str = ""
    siblings: tuple[tuple[str, ...], ...] = ()
    linears: tuple[LinearFacts, ...] = ()
    whole: str = ""
    ranks: int = 1
    shards: tuple[Shard, ...] = ()
    unsplit: tuple[tuple[str, str], ...] = ()
