"""A model traced with one layer of each kind is, written out, the model traced whole."""

from __future__ import annotations

import gc
import re
from dataclasses import replace

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fusewright.compiler.capture.source import Repeat
from fusewright.compiler.capture.trace import Traced, TraceError, trace
from fusewright.compiler.capture.unroll import unroll
from fusewright.compiler.emit.make_plan import make_plan
from fusewright.compiler.lowering.lower import lower
from fusewright.compiler.lowering.partition import partition
from fusewright.compiler.run.plan import Plan
from fusewright.config import PASSES
from fusewright.config.rope import RopeParameters
from fusewright.engine.worker.source import KV_CACHE, example
from fusewright.model_executor.loader import fake_model
from fusewright.model_executor.models.decoder import distinct_layers
from fusewright.model_executor.spec import ModelSpec
from fusewright.passes import build_passes, run_passes
from fusewright.passes.module_paths import STACK

SPEC = ModelSpec(
    architecture="MistralForCausalLM",
    hidden_size=64,
    intermediate_size=96,
    num_layers=7,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=128,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope=RopeParameters(),
    hidden_act="silu",
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(0,) * 7,
    dtype_name="bfloat16",
)
SPECS = {
    "equal layers": SPEC,
    "two kinds": replace(SPEC, sliding_windows=(32, 0, 0, 32, 0, 32, 32)),
    "one layer": replace(SPEC, num_layers=1, sliding_windows=(0,)),
    "tied, normed, biased": replace(SPEC, tie_word_embeddings=True, qk_norm=True, qkv_bias=True),
}


def traced(spec: ModelSpec, device: str) -> Traced:
    with FakeTensorMode():
        model = fake_model(spec, torch.device(device))
        given = example(spec, 16, torch.device(device))
    return trace(model, given.args, given.named, given.dynamic)


def plan_of(graph: Traced) -> tuple[Plan, int]:
    run_passes(graph.gm, build_passes(PASSES))
    regions = partition(graph.gm)
    lower(graph.gm, hand_kernels=True, kernels={}, sm=90)
    plan, pieces = make_plan(graph, regions)
    return plan, len(pieces)


def without_node_names(plan: Plan) -> str:
    numbers: dict[str, str] = {}
    return re.sub(r"%\w+", lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), str(plan.steps))


@pytest.mark.product
@pytest.mark.parametrize(
    ("name", "device"), zip(SPECS, ["cuda", "cpu", "cpu", "cuda"], strict=True)
)
def test_unrolled_equals_traced_whole(name: str, device: str) -> None:
    """Also for a GPU that is not here: the trace is of fake tensors."""
    spec = SPECS[name]
    short, layers = distinct_layers(spec)
    repeat = Repeat("layers", layers, ("weights/layers.{}.", KV_CACHE))
    ours, our_pieces = plan_of(unroll(traced(short, device), repeat))
    whole, whole_pieces = plan_of(traced(spec, device))
    assert without_node_names(ours) == without_node_names(whole)
    assert ours.inputs == whole.inputs and ours.ranges == whole.ranges
    assert ours.sizes == whole.sizes and our_pieces == whole_pieces
    assert len(ours.steps) > 2 * spec.num_layers


def test_a_nodes_outer_layer_is_renumbered_and_no_list_within_it() -> None:
    repeat = Repeat("layers", (0, 0, 0), ())
    path = "L['self'].layers[0].mlp.layers[0]"
    node = fx.Graph().placeholder("x")
    repeat.relocate(node, 2)
    assert not node.meta, "a node of no module"
    node.meta = {STACK: {"a": (path, int), "b": ("L['self'].head", str)}}
    assert repeat.traced_layer(node) == 0
    repeat.relocate(node, 2)
    assert repeat.traced_layer(node) == 2
    renumbered = ("L['self'].layers[2].mlp.layers[0]", int)
    assert node.meta[STACK] == {"a": renumbered, "b": ("L['self'].head", str)}


def test_tracing_does_not_collect_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[object] = []
    monkeypatch.setattr(gc, "collect", lambda *generation: collected.append(generation))
    traced(replace(SPEC, num_layers=1, sliding_windows=(0,)), "cpu")
    assert not collected


def test_a_deep_model_has_three_pieces() -> None:
    deep = replace(SPEC, num_layers=80, sliding_windows=(0,) * 80)
    short, layers = distinct_layers(deep)
    repeat = Repeat("layers", layers, ("weights/layers.{}.", KV_CACHE))
    plan, pieces = plan_of(unroll(traced(short, "cpu"), repeat))
    assert pieces == 3 and len(plan.inputs) > 80 * 6


def test_layers_that_pass_on_more_than_one_value_are_refused() -> None:
    short, layers = distinct_layers(SPEC)
    graph = traced(short, "cpu")
    norms = [n for n in graph.gm.graph.nodes if "rms_norm" in str(n.target)]
    tail = norms[-1]
    with graph.gm.graph.inserting_before(tail):  # the tail reads a second value of the layer
        extra = graph.gm.graph.call_function(torch.add, (tail.args[0], norms[1]))
    extra.meta = {k: v for k, v in tail.meta.items() if k != "nn_module_stack"}
    tail.replace_input_with(tail.args[0], extra)
    repeat = Repeat("layers", layers, ("weights/layers.{}.", KV_CACHE))
    with pytest.raises(
        TraceError, match="passes on 2; layers that are traced once pass on exactly"
    ):
        unroll(graph, repeat)


def test_layers_that_are_not_in_the_trace_are_refused() -> None:
    short, layers = distinct_layers(SPEC)
    repeat = Repeat("blocks", layers, ("weights/layers.{}.", KV_CACHE))
    with pytest.raises(TraceError, match=r"nodes of layers \[\] in 'blocks', expected \[0\]"):
        unroll(traced(short, "cpu"), repeat)


def test_what_else_compiled_the_model_does_not_matter() -> None:
    """Dynamo remembers, by code, which sizes have changed; a trace must not depend on it."""
    short, _ = distinct_layers(SPEC)
    before = traced(short, "cpu")
    for num_tokens in (3, 5, 9):
        with FakeTensorMode():
            model = fake_model(short, torch.device("cpu"))
            given = example(short, 16, torch.device("cpu"), num_tokens=num_tokens)
        torch.compile(model, backend="eager", fullgraph=True)(*given.args)
    after = traced(short, "cpu")
    assert [str(i) for i in after.inputs] == [str(i) for i in before.inputs]
    assert sorted(after.dims.values()) == sorted(before.dims.values())
