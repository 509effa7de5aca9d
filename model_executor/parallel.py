"""Ranks that hold a model together: who this process is, and which numbers of them fit.

With tensor parallelism each rank holds its heads, its outputs of the first linear layer of a
feed-forward and the matching inputs of the second, and its part of the vocabulary (Shoeybi et al.,
2019, Megatron-LM).  With expert parallelism it holds whole experts instead (Lepikhin et al., 2020,
GShard).  With pipeline parallelism the layers are cut into stages, and the ranks of each stage hold
its layers as if they were the whole model (Huang et al., 2019, GPipe).  Nothing here imports torch,
so that a start can be refused before that is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..config.errors import UserError
from ..config.weight_format import StoredFormat, full_name
from .quant.scheme import BLOCK, FORMATS

if TYPE_CHECKING:
    from ..config import EngineOptions
    from .spec import ModelSpec

GROUP = "tensor-parallel"
"""The process group over which a model sums and gathers: the ranks of one stage; the same name on
every rank."""
STAGES = "pipeline-parallel"
"""The process group of the ranks that hold the same part of every stage."""
_MOST_RANKS = 64


@dataclass(frozen=True)
class TensorParallelRank:
    """This process among the ranks that hold the model, or one stage of it, together."""

    rank: int = 0
    world: int = 1


def describe_ranks(tensor_parallel_size: int, pipeline_parallel_size: int) -> str:
    """The options that say how many ranks there are, without what is left out as 1."""
    if pipeline_parallel_size == 1:
        return f"tensor_parallel_size={tensor_parallel_size}"
    stages = f"pipeline_parallel_size={pipeline_parallel_size}"
    if tensor_parallel_size == 1:
        return stages
    return f"tensor_parallel_size={tensor_parallel_size} with {stages}"


def check_one_rank(options: EngineOptions, why: str) -> None:
    """Refuse several ranks.

    Raises:
        UserError: says ``why`` there can only be one.
    """
    if options.num_ranks > 1:
        sizes = describe_ranks(options.tensor_parallel_size, options.pipeline_parallel_size)
        raise UserError(f"{sizes}: {why}; leave it out")


def check_parallel(
    spec: ModelSpec,
    world: int,
    *,
    expert_parallel: bool = False,
    num_stages: int = 1,
    quantization: str | None = None,
) -> None:
    """Refuse a number of ranks, or of stages, over which the model does not spread.

    Args:
        world: ranks of a stage.
        expert_parallel: each rank is to hold whole experts.
        quantization: what weights become when they are loaded, if the checkpoint does not say.

    Raises:
        UserError: names what does not divide, and the numbers that would work; or the model has
            no experts to spread, or one rank would hold them all.
    """
    if spec.captured and num_stages > 1:
        raise UserError(
            f"pipeline_parallel_size={num_stages}: a model without an adapter runs in one stage; "
            "leave it out, and give tensor_parallel_size the number of ranks"
        )
    if spec.captured and expert_parallel:
        raise UserError(
            "enable_expert_parallel: each expert of a model without an adapter is split over the "
            "ranks; leave it out"
        )
    if spec.captured and world > 1 and (reason := _unsplit_kind(spec, quantization)):
        raise UserError(
            f"tensor_parallel_size={world}: {reason}, and a model without an adapter does not "
            "spread then; use one rank, weights alone (int4, int8, mxfp4), or 16-bit weights"
        )
    if num_stages > spec.num_layers:
        raise UserError(
            f"pipeline_parallel_size={num_stages}: a stage has a layer at least, and "
            f"num_hidden_layers={spec.num_layers}; give 1 to {spec.num_layers}"
        )
    if expert_parallel and spec.moe is None:
        raise UserError("enable_expert_parallel: the model has no experts; leave it out")
    if expert_parallel and world == 1:
        raise UserError(
            "enable_expert_parallel with tensor_parallel_size=1: one rank holds all experts; give "
            "tensor_parallel_size of 2 or more, or leave it out"
        )
    spec = replace(spec, expert_parallel=expert_parallel)
    if reason := why_not(spec, world):
        sizes = ", ".join(map(str, fitting(spec, _MOST_RANKS)))
        raise UserError(f"tensor_parallel_size={world}: {reason}; this model spreads over {sizes}")


def fitting(spec: ModelSpec, most: int) -> list[int]:
    """The numbers of ranks up to ``most`` over which a model spreads."""
    return [world for world in range(1, most + 1) if not why_not(spec, world)]


def _unsplit_kind(spec: ModelSpec, quantization: str | None) -> str:
    """Why the quantized layers of a captured model do not spread, or an empty string."""
    kinds = [kind for _, kind in spec.quantized_kinds]
    for kind in (*kinds, *([full_name(quantization) or ""] if quantization else [])):
        form = FORMATS.get(kind)
        if form is not None and (not isinstance(form, StoredFormat) or form.x_dtype):
            return f"layers in {kind} quantize their input"
    if spec.quant is not None and spec.quant.gathered:
        return "layers take the columns of their input in an order of their own (desc_act)"
    return ""


def why_not(spec: ModelSpec, world: int) -> str:
    """Why a model does not spread over ``world`` ranks, or an empty string: what does not
    divide of a model without an adapter stays whole on every rank."""
    if spec.captured:
        return ""
    sizes = {"num_attention_heads": spec.num_heads, **_inner(spec), "vocab_size": spec.vocab_size}
    for name, size in sizes.items():
        if size % world:
            return f"{name}={size} is no multiple of it"
    heads = spec.num_kv_heads
    if heads % world and world % heads:
        return f"num_key_value_heads={heads} is neither a multiple nor a divisor of it"
    return _blocks_cut(spec, world)


def _inner(spec: ModelSpec) -> dict[str, int]:
    """The sizes of feed-forwards that are spread, by their names in a config."""
    moe, sizes = spec.moe, {}
    if moe is None or not all(moe.layers):
        sizes["intermediate_size"] = spec.intermediate_size
    if moe is not None:
        if spec.expert_parallel:
            sizes["num_experts"] = moe.num_experts
        else:
            sizes["moe_intermediate_size"] = moe.intermediate_size
        sizes["shared_expert_intermediate_size"] = moe.shared_intermediate_size
    return sizes


def _blocks_cut(spec: ModelSpec, world: int) -> str:
    """Why what shares a scale in a checkpoint does not spread; weights that are quantized while
    they are loaded have blocks of their own on each rank."""
    quant = spec.quant
    if world == 1 or quant is None or quant.online:
        return ""
    local = replace(spec, tensor_parallel_size=world)
    for linear, kind in spec.quantized_kinds:
        form = FORMATS[kind]
        if linear in quant.gathered and linear.endswith((".o", ".down")):
            return f"columns of {linear} are sorted by activation (desc_act) across all ranks"
        if isinstance(form, StoredFormat):
            if reason := local.why_not_stored(linear, form):
                return reason
            continue
        if not form.blocks:
            continue
        sizes = [local.in_features(linear.replace("gate_up", "down"))]
        if linear == "attention.qkv":
            sizes = [*local.part_rows(linear)]
        for size in sizes:
            if size % BLOCK:
                return (
                    f"a rank would hold {size} features of {linear}, whose scales are of blocks of "
                    f"{BLOCK}"
                )
    return ""
