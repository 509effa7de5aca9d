"""Finds out what a model of the library needs: its spec, from its configuration and one dry run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from inspect import getsourcefile, getsourcelines
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from ...config import UserError
from ...config.rope import RopeParameters
from ..checkpoint import TensorInfo, read_headers
from ..hf_json import HfConfig
from ..spec import ModelSpec, check_blocks
from .facts import CapturedFacts
from .interfaces import RECURRENT, WRITTEN_OUT, AttentionCall, Recorder, Refused
from .layers.alike import LayerRecords
from .library import (
    REWRITTEN,
    build,
    canonical,
    first_line,
    place_of,
    read_config,
    version,
)
from .linears import Siblings
from .model import run
from .quantized.formats import checkpoint_scheme, linears_of
from .ranks.plan import planned_facts
from .text_decoder import stored_model, text_config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NUM_TOKENS = 37


def captured_spec(config: HfConfig, architecture: str, ranks: int = 1) -> ModelSpec:
    """The spec of a model without an adapter, which ``ranks`` hold together.

    Raises:
        UserError: the library does not know it, or it needs what the engine does not have; says
            what, and where.
    """
    path, values = config.path, config.values
    read = read_config(path, values, architecture)
    found = found_in(path.parent)
    spec = spec_of(read, str(path), architecture, found, ranks)
    facts = spec.captured
    assert facts is not None
    quant = checkpoint_scheme(config, spec, found, partial(stored_model, facts, spec.dtype))
    check_blocks(path, spec, quant)
    return replace(spec, quant=quant, notes=(*spec.notes, *quant.notes)) if quant else spec


def spec_of(
    read: Any,
    what: str,
    architecture: str,
    found: Mapping[str, TensorInfo] = MappingProxyType({}),
    ranks: int = 1,
) -> ModelSpec:
    """The spec of a configuration of the library; errors are those of ``captured_spec``.

    Args:
        found: the tensors of the checkpoint, if there is one, which may have tied weights apart.
        ranks: that hold the model together.
    """
    what = f"{what}: {architecture!r}"
    whole, read = read, text_config(read)
    dtype_name = _dtype_name(read) or _first_dtype(found) or "float32"
    facts = CapturedFacts(canonical(read), version())
    if read is not whole:
        facts = replace(facts, whole=canonical(whole))
    notes = _notes(facts, found)
    facts, vocab_size = probe(replace(facts, untied=tuple(filter(None, notes))), dtype_name, what)
    if ranks > 1:
        facts = planned_facts(facts, _DTYPES[dtype_name], ranks, what)
    calls = facts.attention
    shape = read.get_text_config(decoder=True)
    first = calls[0]
    return ModelSpec(
        architecture=architecture,
        hidden_size=int(shape.hidden_size),
        intermediate_size=int(_number(shape, "intermediate_size") or 4 * shape.hidden_size),
        num_layers=len(calls),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=_max_positions(what, shape),
        rms_norm_eps=0.0,
        rope=RopeParameters(),
        hidden_act="",
        tie_word_embeddings=bool(getattr(read, "tie_word_embeddings", False)),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=tuple(call.reach for call in calls),
        dtype_name=dtype_name,
        captured=facts,
        notes=tuple(filter(None, notes.values())),
    )


@lru_cache(maxsize=4)
def probe(facts: CapturedFacts, dtype_name: str, what: str) -> tuple[CapturedFacts, int]:
    """Run a model on tensors without data, and return what was seen of it and the number of its
    logits.  A start asks twice: when its options are checked, and when it begins.

    Raises:
        UserError: it asks for what the engine does not have, or does not call attention.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = build(facts, _DTYPES[dtype_name])
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{what} has an encoder and a decoder, expected a decoder alone")
    siblings = Siblings(model)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode():
            fakes = {
                name: mode.from_tensor(t) if not t.is_meta else _fake(t)
                for name, t in [*model.named_parameters(), *model.named_buffers()]
            }
            records = LayerRecords(model, fakes)

            def on_call(call: AttentionCall) -> None:
                siblings.calls += 1
                records.attention(call)

            recorder = Recorder(on_call)
            with records:
                ids = torch.zeros(_NUM_TOKENS, dtype=torch.int32)
                positions = torch.arange(_NUM_TOKENS, dtype=torch.int32)
                logits = run(_Functional(model, fakes), ids, positions, recorder)
    except Exception as error:
        raise UserError(f"{what} cannot be captured: {why(error)}") from error
    if not recorder.calls:
        raise UserError(f"{what} cannot be captured: {_without_attention(model)}")
    calls = tuple(recorder.calls)
    kinds = records.kinds()
    is_stack = len(kinds) == len(calls)
    seen = replace(
        facts,
        attention=calls,
        layers=records.layers if is_stack else "",
        kinds=kinds if is_stack else (),
        undivided=records.undivided,
        siblings=siblings.found(),
        linears=linears_of(model),
    )
    return seen, int(logits.shape[-1])


def _without_attention(model: nn.Module) -> str:
    """Why a model calls no attention, and the class of its layers."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layer = max(stacks, key=len, default=[model])[0]
    file, line = getsourcefile(type(layer)), getsourcelines(type(layer))[1]
    place = f" ({Path(file or '').name}, line {line}: {type(layer).__name__} of layer 0)"
    if getattr(model, "_is_stateful", False):
        return f"{RECURRENT}{place}"
    return (
        f"its attention does not go through the library's attention interface{place}; {REWRITTEN}"
    )


class _Functional(nn.Module):
    """A model with other tensors in the places of its own."""

    def __init__(self, model: nn.Module, tensors: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.tensors = model, tensors

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()  # type: ignore[operator,no-any-return]

    def forward(self, **how: Any) -> Any:
        return torch.func.functional_call(self.model, self.tensors, (), how)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def why(error: BaseException) -> str:
    """An error in a model's forward in one line: what, and the line of the model's source."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Refused):
        cause = cause.__cause__
    place = place_of(error)
    if cause is not None:
        remedy = f"; {REWRITTEN}" if str(cause) == WRITTEN_OUT else ""
        return f"{cause}{place or place_of(cause)}{remedy}"
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return (
            f"its code follows the values of a tensor ({error.func}), which no graph can hold"
            f"{place}; a mixture of experts has to go through the library's experts interface"
        )
    if place:
        return (
            f"its code cannot run on a step of many sequences' tokens: {first_line(error)}{place}"
        )
    return first_line(error)


def _notes(facts: CapturedFacts, found: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Notes on a folder's checkpoint, by the names of parameters that it has apart, and "" for what
    it leaves out.  Without a readable one there are none: the loader refuses that, if weights are
    read at all."""
    if not found:
        return {}
    stored = stored_model(facts, torch.float32)
    return {**stored.untie(found), "": stored.left_out(found)}


def _first_dtype(found: Mapping[str, TensorInfo]) -> str | None:
    """The dtype of the first floating-point tensor by name that is not FP8."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    return next((names[found[n].dtype] for n in sorted(found) if found[n].dtype in names), None)


def found_in(folder: Path) -> dict[str, TensorInfo]:
    """The tensors of a folder's checkpoint; none where there is no readable one."""
    try:
        return read_headers(folder)
    except UserError:
        return {}


def _dtype_name(config: Any) -> str:
    """What a configuration states; "" for nothing."""
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    name = str(dtype).removeprefix("torch.")
    return name if name in _DTYPES else ""


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _max_positions(what: str, config: Any) -> int:
    most = _number(config, "max_position_embeddings")
    if most is None:
        raise UserError(
            f"{what} has no max_position_embeddings, so that the number of positions it can serve "
            "is not known, as of recurrent models and of decoders of other things than text; give "
            "the model's complete config"
        )
    return most
