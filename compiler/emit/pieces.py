"""Turns lowered pieces into code.

A piece in which there is nothing to fuse is printed as Python; Inductor compiles the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

import torch

from ...passes import Subgraph, digest, fake_value
from .direct import emit_direct, fusable
from .piece_code import EmitError, PieceCode, placeholders

__all__ = ["EmitError", "EmitterChoice", "PieceCode", "choose_emitter", "emit"]


@dataclass(frozen=True)
class EmitterChoice:
    """The emitter that makes a piece's code, and the reason; ``str`` gives both."""

    emitter: str
    reason: str

    def __str__(self) -> str:
        return f"{self.emitter}: {self.reason}"


def choose_emitter(piece: Subgraph) -> EmitterChoice:
    """Choose ``direct`` if Inductor would only call the piece's ops in turn, else ``inductor``."""
    names = list(dict.fromkeys(fusable(piece)))
    if not names:
        return EmitterChoice("direct", "opaque ops, library calls and views only")
    return EmitterChoice("inductor", f"it can fuse {', '.join(names)}")


def emit(
    pieces: Mapping[str, Subgraph],
    *,
    tune: bool,
    on_piece: Callable[[str], None] = lambda progress: None,
    dims: Mapping[str, str] | None = None,
    compiled: MutableMapping[str, PieceCode] | None = None,
) -> dict[str, PieceCode]:
    """Make the code of each lowered piece.

    Args:
        tune: search each Triton kernel's configuration by coordinate descent (``-O3``).
        on_piece: called with "1 of 3" and so on before each piece.
        dims: name of each size symbol ("s88" -> "num_tokens"), to make the code readable.
        compiled: Inductor's code of earlier pieces, which is used again and added to.

    Raises:
        EmitError: a piece cannot stand alone; names what is in the way.
    """
    code: dict[str, PieceCode] = {}
    dims, compiled = dims or {}, {} if compiled is None else compiled
    for number, (name, piece) in enumerate(pieces.items(), start=1):
        on_piece(f"{number} of {len(pieces)}")
        if choose_emitter(piece).emitter == "direct":
            code[name] = emit_direct(piece, dims)
            continue
        key = _inductor_key(piece, dims, tune)
        if key not in compiled:
            # This import takes seconds, and the other emitter does not need it.
            from .inductor import emit_inductor

            compiled[key] = emit_inductor(piece, dims, tune=tune)
        code[name] = compiled[key]
    return code


def _inductor_key(piece: Subgraph, dims: Mapping[str, str], tune: bool) -> str:
    """All that decides what Inductor makes of a piece in one process: the graph, the sizes that it
    is traced with, and their names."""
    values = [fake_value(node) for node in placeholders(piece)]
    hints = [value.node.hint for value in values if isinstance(value, torch.SymInt)]
    return f"{digest(piece.module)} {hints} {sorted(dims.items())} {tune}"
