"""Launches as data: what they are specialized on, and that a model needs few variants of them."""

from __future__ import annotations

import pkgutil
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import fusewright.ops.launches as host
from fusewright import ops
from fusewright.config import STEP
from fusewright.engine.worker.drafts.state import draft_calls
from fusewright.ops import BY_NAME, Launch, Variant, representative_sizes, variants_of

META = torch.device("meta")
FP8 = torch.float8_e4m3fn
WITH_TRITON = [op.name for op in ops.ALL_OPS if any(i.launches for i in op.implementations)]


@dataclass(frozen=True)
class Model:
    """Shapes of a model, and limits of an engine that must change nothing."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    intermediate: int = 14336
    vocab: int = 128256
    window: int = 0
    dtype: torch.dtype = torch.bfloat16
    max_num_seqs: int = 256
    max_blocks: int = 512
    num_blocks: int = 5000
    fp8: bool = False  # KV cache, and output of attention


LLAMA_3_8B = Model()
OTHERS = {
    "abacus": Model(256, 4, 2, 64, 768, 40, 0, torch.float32),
    "smol, 9 heads": Model(576, 9, 3, 64, 1536, 49152),
    "fp8 KV and output of attention": Model(fp8=True),
    "one head, window": Model(64, 1, 1, 256, 100, 262144, 512),
}


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def calls(op: str, m: Model, tokens: int, seqs: int) -> Iterator[tuple[Any, ...]]:
    """Arguments of every call of ``op`` that a model and its sampler make at these sizes."""
    x = empty(tokens, m.hidden, dtype=m.dtype)
    qkv = empty(tokens, m.heads + 2 * m.kv_heads, m.dim, dtype=m.dtype)
    q, k, v = qkv.split([m.heads, m.kv_heads, m.kv_heads], dim=1)
    weight, cache = empty(m.hidden, dtype=m.dtype), (m.num_blocks, 2, 16, m.kv_heads, m.dim)
    starts, per_token, per_seq = empty(seqs + 1), empty(tokens), empty(seqs)
    floats, slots = empty(seqs, dtype=torch.float32), empty(m.max_num_seqs)
    logits = empty(seqs, m.vocab, dtype=m.dtype)
    state = (m.max_num_seqs, m.vocab)
    kv_cache = empty(*cache, dtype=FP8 if m.fp8 else m.dtype)
    kv_scale = empty(2, m.kv_heads, dtype=torch.float32) if m.fp8 else None
    if op == "rms_norm":
        yield x, weight, 1e-5
        yield q, empty(m.dim, dtype=m.dtype), 1e-5
        yield k, empty(m.dim, dtype=m.dtype), 1e-5
    elif op == "add_rms_norm":
        yield x, x, weight, 1e-5
    elif op == "layer_norm":
        yield x, weight, 1e-5, weight
    elif op == "add_layer_norm":
        yield x, x, weight, 1e-5, weight
    elif op in ("silu_mul", "gelu_tanh_mul"):
        yield (empty(tokens, 2 * m.intermediate, dtype=m.dtype),)
    elif op == "rotary_embedding":
        yield per_token, q, k, empty(8192, m.dim, dtype=torch.float32)
    elif op == "kv_store":
        yield k, v, kv_cache, per_token, kv_scale
    elif op == "rope_kv_store":
        table, head = empty(8192, m.dim, dtype=torch.float32), empty(m.dim, dtype=m.dtype)
        given = (per_token, q, k, v, table, kv_cache, per_token)
        yield *given, None, None, 0.0, kv_scale
        yield *given, head, head, 1e-6, kv_scale
    elif op == "paged_attention":
        table, out_scale = empty(seqs, m.max_blocks), None
        out = empty(tokens, m.heads, m.dim, dtype=FP8 if m.fp8 else m.dtype)
        if m.fp8:
            out_scale = empty(1, 1, dtype=torch.float32)
        given = (q, kv_cache, table, per_seq, starts, out)
        yield *given, m.dim**-0.5, m.window, 0.0, kv_scale, out_scale
    elif op in LAYERS:
        yield from LAYERS[op](m, tokens)
    elif op in EXPERT_OPS:
        yield from expert_calls(op, m, tokens)
    elif op.startswith("all_reduce_"):
        yield from norm_calls(op, m, tokens, seqs)
    elif "quant" in op:
        yield from quant_calls(op, m, tokens)
    elif op == "embedding":
        yield per_token, empty(m.vocab, m.hidden, dtype=m.dtype)
    elif op == "gather_last_token":
        yield x, starts
    elif op == "write_inputs":
        for columns in (0, 1, 5):
            packed = empty(STEP.packed_size(tokens, seqs, columns), dtype=torch.int32)
            fields = (len(STEP.tokens) - 1, tokens), (len(STEP.rows), seqs + 1), (seqs, 1, 5)
            yield packed, slots, *(empty(*shape, dtype=torch.int32) for shape in fields)
    elif op == "keep_tokens":
        yield slots, per_seq, per_seq, per_seq
    elif op in ("accept_tokens", "place_rows", "propose_ngrams", "propose_suffix"):
        yield from (args for name, args in draft_calls(seqs, 1) if name == op)
    elif op == "argmax":
        yield (logits,)
    elif op == "sample":
        for filters in (0, 1, 2, 4, 7):
            some = [(floats if filters & bit else None) for bit in (1, 2, 4)]
            seeds = empty(seqs, dtype=torch.int64)
            yield (logits.float(), floats, *some, seeds, per_seq)
    elif op == "token_logprobs":
        for num_logprobs in (0, 1, 5, 32):
            yield logits, per_seq, num_logprobs
    elif op == "apply_penalties":
        masks = empty(*state, dtype=torch.bool)
        yield (logits.float(), empty(*state), masks, per_seq, *[floats] * 3)
    elif op == "count_tokens":
        yield per_seq, per_seq, empty(*state)
    else:
        raise AssertionError(f"{op} has Triton kernels: add its calls here")


def chain_calls(m: Model, tokens: int) -> Iterator[tuple[Any, ...]]:
    """The chains of a dense layer in each format, and of experts, that is not a model's last."""
    x, norm = empty(tokens, m.hidden, dtype=m.dtype), empty(m.hidden, dtype=m.dtype)
    sizes = (m.hidden, m.hidden), (2 * m.intermediate, m.hidden), (m.hidden, m.intermediate)
    dense = [empty(*size, dtype=m.dtype) for size in sizes]
    pair = "linear(weight) > add_norm(weight, eps=1e-05) > linear(weight{})"
    text = pair.format(", activation='silu'") + " > " + pair.format("")
    yield x, x, [dense[0], norm, *dense[1:], norm, dense[0]], text
    experts = [
        empty(*shape, dtype=m.dtype) for shape in ((128, 512, m.hidden), (128, m.hidden, 256))
    ]
    router = empty(128, m.hidden, dtype=m.dtype)
    how = "top_k=8, scoring='softmax', renormalize=True, num_groups=1, topk_groups=1, scaling=1.0"
    for group in (None, 0, 128):
        if group and any(size % group for shape in sizes for size in shape):
            continue
        size = "" if group is None else f", group_size={group}"
        scale = "" if group is None else ", weight_scale"
        layer, add = f"linear(weight{scale}{size})", f"add_norm(weight, eps=1e-05{size})"

        def held(*weights: Tensor, group: int | None = group) -> list[Tensor]:
            if group is None:
                return [*weights]
            fp8 = [w.to(torch.float8_e4m3fn) for w in weights]
            return [t for w in fp8 for t in (w, scales_of(w, group))]

        o, gate_up, down = (held(weight) for weight in dense)
        if group is not None:
            text = f"{layer} > {add} > {layer} > act(activation='silu'{size}) > {layer}"
            yield x, x, [*o, norm, *gate_up, *down, norm, *o], f"{text} > {add} > {layer}"
        names = "router_weight, gate_up, down"
        moe = f"experts({names}{', gate_up_scale, down_scale' if scale else ''}, {how}, "
        moe += f"activation='silu'{size})"
        weights = [router, *held(*experts)[:: 1 if group is None else 2]]
        weights += [] if group is None else held(*experts)[1::2]
        text = (
            f"linear(weight{scale}{size}) > add_norm(weight, eps=1e-05) > {moe} > {add} > {layer}"
        )
        yield x, x, [*o, norm, *weights, norm, *o], text


def norm_calls(op: str, m: Model, tokens: int, seqs: int) -> Iterator[tuple[Any, ...]]:
    """Those of the norm alone, with a group and no default."""
    norm = op.removeprefix("all_reduce_")
    for args in calls(norm, m, tokens, seqs):
        yield *args, *(() if "quant" in norm else (None,)), "a group"


def quant_calls(op: str, m: Model, tokens: int) -> Iterator[tuple[Any, ...]]:
    """The calls of an op that quantizes: one static, or one a row and one a group of 128."""
    x, gate_up = (empty(tokens, n, dtype=m.dtype) for n in (m.hidden, 2 * m.intermediate))
    weight, scale = empty(m.hidden, dtype=m.dtype), empty(1, 1, dtype=torch.float32)
    inputs: tuple[Any, ...] = (gate_up,) if "mul" in op else (x,)
    inputs += (x,) if "add" in op else ()
    inputs += (weight, 1e-5) if "norm" in op else ()
    width = m.intermediate if "mul" in op else m.hidden
    dynamic = (0, 128) if width % 128 == 0 else (0,)
    for scheme in (scale,) if op.endswith("static") else dynamic:
        yield *inputs, scheme


EXPERT_OPS = ("route", "expert_linear", "combine_experts", "fused_moe")


def expert_calls(op: str, m: Model, tokens: int) -> Iterator[tuple[Any, ...]]:
    """Those of 8 of 128 experts, and of 2 of 8."""
    x, inner = empty(tokens, m.hidden, dtype=m.dtype), 256
    for top_k, experts in ((8, 128), (2, 8)):
        router = empty(experts, m.hidden, dtype=m.dtype)
        layers = [empty(experts, 2 * inner, m.hidden, dtype=m.dtype)]
        layers += [empty(experts, m.hidden, inner, dtype=m.dtype)]
        ids, h = empty(tokens, top_k), empty(tokens * top_k, inner, dtype=m.dtype)
        how = (top_k, "softmax", True, 1, 1, 1.0)
        if op == "route":
            yield empty(tokens, experts, dtype=m.dtype), None, *how
        elif op == "expert_linear":
            yield x, layers[0], ids, None, None, None, "silu"
            yield h, layers[1], ids, None, None, None, None
        elif op == "combine_experts":
            y = empty(tokens * top_k, m.hidden, dtype=m.dtype)
            yield y, empty(tokens, top_k, dtype=torch.float32)
        elif op == "fused_moe":
            yield x, router, None, *layers, *[None] * 4, 0, None, None, *how, "silu"


def scales_of(weight: Tensor, group: int) -> Tensor:
    """Scales of rows, or of blocks, of a weight or of those of experts."""
    *experts, rows, columns = weight.shape
    shape = (-(-rows // group), -(-columns // group)) if group else (rows, 1)
    return empty(*experts, *shape, dtype=torch.float32)


def linear_calls(m: Model, tokens: int) -> Iterator[tuple[Any, ...]]:
    """A plain layer and a gated one, and those of each FP8 scheme, which is also quantized."""
    n, k, fp8 = m.intermediate, m.hidden, torch.float8_e4m3fn
    groups = -(-k // 128)

    def scales(rows: int, columns: int) -> Tensor:
        return empty(rows, columns, dtype=torch.float32)

    x, gate_up = empty(tokens, k, dtype=m.dtype), empty(2 * n, k, dtype=m.dtype)
    yield x, gate_up, None
    yield x, gate_up, None, None, None, None, "silu", None
    for x_scale, weight_scale in (
        (scales(1, 1), scales(1, 1)),
        (scales(tokens, 1), scales(2 * n, 1)),
        (scales(groups, tokens).t(), scales(-(-2 * n // 128), groups)),
    ):
        x, weight = empty(tokens, k, dtype=fp8), empty(2 * n, k, dtype=fp8)
        for after in ((None, None), ("silu", scales(1, 1))):
            yield x, weight, None, x_scale, weight_scale, m.dtype, *after


def ranks_calls(m: Model, tokens: int) -> Iterator[tuple[Any, ...]]:
    """The chains whose norms sum over ranks."""
    for x, residual, operands, text in chain_calls(m, tokens):
        if "experts" not in text:
            yield x, residual, operands, text.replace("eps=1e-05", "eps=1e-05, reduce=True"), "tp"


LAYERS = {"linear": linear_calls, "chain": chain_calls, "chain_over_ranks": ranks_calls}


def launches(op: str, m: Model, sizes: Iterable[tuple[int, int]]) -> Iterator[Launch]:
    named = [i for i in BY_NAME[op].implementations if i.name in ("triton", "library")]
    assert named
    seen: set[Any] = set()
    for tokens, seqs in sizes:
        for args in calls(op, m, tokens, seqs):
            key = tuple(
                (a.dtype, a.shape, a.stride()) if isinstance(a, Tensor) else a
                for a in tree_leaves(args)
            )
            if key in seen:  # most ops look at tokens or sequences, not at both
                continue
            seen.add(key)
            for implementation in named:
                assert implementation.launches is not None
                if not implementation.supports(BY_NAME[op].describe(args)):
                    yield from implementation.launches(*args)[0]


def many_sizes() -> list[tuple[int, int]]:
    ones = (*range(1, 140), *range(250, 264), *range(506, 520), 600)
    found = {(tokens, 1) for tokens in ones} | {(seqs, seqs) for seqs in ones}
    found |= {(seqs + 1, seqs) for seqs in ones} | {(8192, seqs) for seqs in ones}
    found |= {(tokens, seqs) for seqs in (2, 64, 65) for tokens in ones if tokens >= seqs}
    large = (1023, 1024, 1025, 2048, 4096)
    for seqs in (1, 2, 64, 65, *large):
        found |= {(tokens, seqs) for tokens in (*large, 4097, 16384, 32768) if tokens >= seqs}
    return sorted(found)


def names(variants: set[Variant]) -> set[str]:
    return {f"{variant.name} {variant.to_json()}" for variant in variants}


@pytest.mark.product
@pytest.mark.parametrize("op", WITH_TRITON)
def test_representative_sizes_need_every_variant_of_llama_3_8b(op: str) -> None:
    few = variants_of(launches(op, LLAMA_3_8B, representative_sizes()))
    assert names(variants_of(launches(op, LLAMA_3_8B, many_sizes()))) == names(few)


@pytest.mark.product
@pytest.mark.parametrize("model", OTHERS)
@pytest.mark.parametrize("op", WITH_TRITON)
def test_representative_sizes_need_every_variant_of_other_models(
    op: str, model: str, fw_seed: int
) -> None:
    rng = random.Random(fw_seed)
    sizes = []
    for _ in range(150):
        tokens = int(2 ** rng.uniform(0, 15))
        sizes.append((tokens, min(rng.randint(1, tokens), 4096)))
    few = variants_of(launches(op, OTHERS[model], representative_sizes()))
    more = variants_of(launches(op, OTHERS[model], sizes))
    assert not names(more) - names(few), f"--fw-seed={fw_seed}"


@pytest.mark.product
@pytest.mark.parametrize("op", WITH_TRITON)
def test_limits_and_memory_add_no_variants(op: str) -> None:
    sizes = representative_sizes()
    usual = variants_of(launches(op, LLAMA_3_8B, sizes))
    for limits in ((1, 1, 1), (16, 16, 16), (4096, 8192, 123457)):
        max_num_seqs, max_blocks, num_blocks = limits
        model = Model(max_num_seqs=max_num_seqs, max_blocks=max_blocks, num_blocks=num_blocks)
        assert names(variants_of(launches(op, model, sizes))) == names(usual)


def test_a_model_needs_few_variants() -> None:
    sizes = representative_sizes()
    count = Counter(
        (op, variant.name)
        for op in WITH_TRITON
        for variant in variants_of(launches(op, LLAMA_3_8B, sizes))
    )
    assert len(sizes) < 30 and max(count.values()) <= 16, count


def example(**args: Any) -> Launch:
    return Launch("module:kernel", (1,), args, {"BLOCK": 8}, dynamic=("n",))


def test_what_a_launch_is_specialized_on() -> None:
    data = empty(64, dtype=torch.bfloat16)
    launch = example(x=data, y=data[1:], none=None, flag=True, one=1, n=1, m=48, k=3, eps=1.0)
    variant = launch.variant()
    assert dict(variant.signature) == {
        "x": "*bf16", "y": "*bf16", "n": "i32", "m": "i32", "k": "i32", "eps": "fp32"
    }  # fmt: skip
    assert dict(variant.constexprs) == {"none": None, "flag": True, "one": 1, "BLOCK": 8}
    assert variant.divisible == ("x", "m")
    assert dict(example(far=2**31, n=16).variant().signature) == {"far": "i64", "n": "i32"}


def test_dynamic_integers_make_no_variants() -> None:
    assert len({example(n=n).variant() for n in (0, 1, 2, 16, 2**31 - 1)}) == 1
    assert len({example(m=m).variant() for m in (1, 2, 16)}) == 3


def test_memory_without_data_counts_as_if_it_began_aligned() -> None:
    real = torch.zeros(64)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
        for make in (lambda t: t, lambda t: t[1:], lambda t: t[4:]):
            expected = example(x=make(empty(64, dtype=torch.float32))).variant()
            assert example(x=make(fake)).variant() == expected


@pytest.mark.parametrize("value", ["text", 1 + 2j, torch.zeros(2, dtype=torch.complex64)])
def test_an_argument_that_no_kernel_takes_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="module:kernel: x is"):
        example(x=value).variant()


def test_importing_ops_and_launches_imports_no_triton() -> None:
    names = [module.name for module in pkgutil.iter_modules(host.__path__)]
    modules = [f"{host.__name__}.{name}" for name in names]
    assert len(modules) > 10
    code = (
        f"import sys, importlib, fusewright.ops\nfor m in {modules}: importlib.import_module(m)\n"
    )
    code += "sys.exit('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_the_interpreter_refuses_names_that_are_not_the_kernels() -> None:
    launch = Launch("kv_store:_kv_store_kernel", (1,), {"k_ptr": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"_kv_store_kernel has parameters .*'k_token_stride'"):
        launch.run()
