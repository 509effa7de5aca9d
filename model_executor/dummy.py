"""Random weights, for measurements and tests that need no checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .experts import ExpertLinear
from .layers import Linear, RMSNorm, rules_of
from .models.decoder import DecoderModel
from .parallel import TensorParallelRank
from .quant.quantize import dummy_input_scale, quantize_into
from .sharding import ShardRule


def fill_dummy(
    model: DecoderModel,
    dtype: torch.dtype,
    seed: int,
    tp: TensorParallelRank,
    before: Sequence[DecoderModel] = (),
) -> None:
    """Random weights, made on the parameters' device: normal with standard deviation 0.02, norms
    one.  The same for the same seed, model and kind of device, however many ranks hold it; FP8
    layers quantize the weights that they would have in the model's ``dtype``.

    Args:
        before: the stages before, whose weights are drawn and dropped.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for stage in (*before, model):
        _fill(stage, dtype, generator, tp)
    spec, head = model.spec, model.lm_head
    if spec.tie_word_embeddings and not spec.has_embedding and head is not None:
        # The embedding, which is drawn first, is in another stage.
        weight = torch.empty(
            _whole_shape(head.weight.shape, head.rules["weight"]), dtype=dtype, device=device
        )
        weight.normal_(0.0, 0.02, generator=generator.manual_seed(seed))
        with torch.no_grad():
            head.weight.copy_(_slice(weight, head.rules["weight"], tp))


def _fill(
    model: DecoderModel, dtype: torch.dtype, generator: torch.Generator, tp: TensorParallelRank
) -> None:
    """Draw the weights of a model, and keep them unless it is on the meta device."""
    modules = list(model.modules())
    norms = {id(m.weight) for m in modules if isinstance(m, RMSNorm)}
    quantized = {
        id(m.weight): m for m in modules if isinstance(m, Linear | ExpertLinear) and m.quant
    }
    rules = {
        id(getattr(m, kind, None)): rule for m in modules for kind, rule in rules_of(m).items()
    }
    spread = {id(m.weight): m for m in modules if isinstance(m, ExpertLinear) and m.whole}
    with torch.no_grad():
        for param in model.parameters():
            if id(param) in norms:
                param.fill_(1.0)
                continue
            linear, rule = quantized.get(id(param)), rules[id(param)]
            shape = list(param.shape)
            if linear is not None:  # as the numbers lie, whatever they are stored as
                rule, shape = linear.weight_rule, list(linear.shape)
            if linear is None and tp.world == 1 and not param.is_meta:
                param.normal_(0.0, 0.02, generator=generator)
                continue
            shape, layer = _whole_shape(shape, rule), spread.get(id(param))
            if layer is not None:
                shape[0] *= tp.world
            whole = torch.empty(shape, dtype=dtype, device=generator.device)
            whole.normal_(0.0, 0.02, generator=generator)
            if param.is_meta:
                continue
            if layer is not None:
                whole = whole[layer.first :][: layer.num_experts]
            weight = _slice(whole, rule, tp)
            if linear is None:
                param.copy_(weight)
            else:
                quantize_into(linear, weight)
        for linear in quantized.values():
            if linear.quant and linear.quant.static:
                linear.input_scale.fill_(dummy_input_scale(linear.quant))


def _dim(shape: Sequence[int], rule: ShardRule) -> int:
    """The dimension along which a parameter is split; weights of experts have one more in front."""
    return rule.dim + (len(shape) == 3)


def _whole_shape(shape: Sequence[int], rule: ShardRule) -> list[int]:
    whole = list(shape)
    whole[_dim(shape, rule)] = rule.local_size(1)
    return whole


def _slice(whole: Tensor, rule: ShardRule, tp: TensorParallelRank) -> Tensor:
    """A rank's slices of a parameter that one rank would hold whole."""
    if tp.world == 1:
        return whole
    dim = _dim(whole.shape, rule)
    starts = [rule.place(part.name, 0, 1).dest_start for part in rule.parts]
    places = [rule.place(part.name, tp.rank, tp.world) for part in rule.parts]
    parts = [
        whole.narrow(dim, start + place.source_start, place.length)
        for start, place in zip(starts, places, strict=True)
    ]
    return torch.cat(parts, dim=dim)
