"""One layer of each kind is traced: kinds are equal records of ops, and nothing else is divided."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusewright.compiler import build
from fusewright.compiler.build import rewritten
from fusewright.compiler.capture.source import Source
from fusewright.compiler.emit.constants import take_constants
from fusewright.compiler.emit.make_plan import make_plan
from fusewright.compiler.lowering.lower import lower
from fusewright.compiler.lowering.partition import partition
from fusewright.compiler.record import Record
from fusewright.compiler.timer import Timer
from fusewright.config import EngineOptions, Hardware, ModelLimits
from fusewright.config.resolve import resolve
from fusewright.engine.worker.proof import captured_source
from fusewright.engine.worker.step_arguments import example
from fusewright.model_executor.captured.default_configs import default_config
from fusewright.model_executor.captured.facts import AttentionFacts
from fusewright.model_executor.captured.interfaces import AttentionCall
from fusewright.model_executor.captured.layers.alike import LayerRecords
from fusewright.model_executor.captured.layers.once import layer_kinds
from fusewright.model_executor.captured.model import CapturedModel
from fusewright.model_executor.captured.read import spec_of
from fusewright.model_executor.captured.shrink import shrunk
from fusewright.model_executor.loader import fake_model
from fusewright.passes import PassReport
from tests.compiler.test_unroll import without_node_names

FACTS = AttentionFacts(num_heads=1, num_kv_heads=1, head_dim=4, value_dim=4)


class Block(nn.Module):
    def __init__(self, number: int, step: Callable[..., Any]) -> None:
        super().__init__()
        self.number, self.step = number, step
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, angles: Tensor, model: Stack) -> Any:
        return self.step(self, x, angles, model)


class Stack(nn.Module):
    """Four layers, and what their steps may read of the model."""

    def __init__(self, step: Callable[..., Any], call: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, step) for number in range(4))
        self.call = call
        self.state: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        angles = x.cos()
        self.state["outer"] = x.sin()
        for block in self.blocks:
            x = self.call(self, block, x, angles)
        return x.sum(-1)


def plainly(model: Stack, block: Block, x: Tensor, angles: Tensor) -> Any:
    return block(x, angles, model)


def step(
    scale: Callable[[Block], float] = lambda block: 1.0,
    facts: Callable[[Block], AttentionFacts] = lambda block: FACTS,
    inner: Callable[[Block, Tensor, Stack], Tensor] = lambda block, x, model: x,
) -> Callable[..., Any]:
    """A layer's step: attention, angles, a weight, and what a case adds."""

    def run(block: Block, x: Tensor, angles: Tensor, model: Stack) -> Tensor:
        y = x * angles * block.scale
        model.state["records"].attention(AttentionCall(facts(block), y, y, y, 0.5, 0.0, None))
        return inner(block, y * scale(block), model) + x

    return run


def kept(block: Block, x: Tensor, model: Stack) -> Tensor:
    """Layers from the second on read what the first made."""
    return x + model.state.setdefault("first", x)


def overwritten(block: Block, x: Tensor, model: Stack) -> Tensor:
    model.state["outer"].view(-1).add_(1)
    return x * model.state["outer"]


def of_two_kinds(model: Stack, block: Block, x: Tensor, angles: Tensor) -> Any:
    return block(x, angles if block.number != 2 else angles.detach(), model)


def between(model: Stack, block: Block, x: Tensor, angles: Tensor) -> Any:
    return block(x, angles.roll(block.number), model)


def shared_weight(block: Block, x: Tensor, model: Stack) -> Tensor:
    return x * model.blocks[block.number // 2 * 2].scale  # type: ignore[operator]


ALONE = (0, 1, 2, 3)
CASES: dict[str, tuple[Any, Any, tuple[int, ...] | None, str]] = {
    "alike": (step(), plainly, (0, 0, 0, 0), ""),
    "a constant of the layer's number": (
        step(scale=lambda block: 1 / (block.number + 1)), plainly, ALONE, "",
    ),
    "a constant of one layer": (
        step(scale=lambda block: 0.5 if block.number == 2 else 1.0), plainly, (0, 0, 2, 0), "",
    ),
    "a window": (
        step(facts=lambda block: replace(FACTS, window=8 * (block.number % 2))), plainly,
        (0, 1, 0, 1), "",
    ),
    "a number as a tensor": (
        step(inner=lambda block, x, model: x * torch.tensor(float(block.number == 3))), plainly,
        (0, 0, 0, 3), "",
    ),
    "no op in one layer": (
        step(inner=lambda block, x, model: x if block.number == 3 else x.tanh()), plainly,
        (0, 0, 0, 3), "",
    ),
    "reuse of an earlier layer's": (step(inner=kept), plainly, None, "layer 1 reads more of layer"),
    "memory that layers share": (step(inner=overwritten), plainly, None, "layer 0 writes by aten"),
    "a weight of another layer": (
        step(inner=shared_weight), plainly, None, "layer 1 reads blocks.0.scale",
    ),
    "values between layers": (step(), between, None, "layer 1 reads what the model computes"),
    "a value made for one layer": (step(), of_two_kinds, None, "layer 2 reads what the model"),
    "a layer twice": (
        step(),
        lambda model, block, x, angles: block(block(x, angles, model), angles, model),
        None, "layer 0 runs out of its order, or again",
    ),
    "an op on what is passed on": (
        step(), lambda model, block, x, angles: plainly(model, block, x, angles) + 1,
        None, "the model itself reads a result of layer 0|does not begin with",
    ),
    "no attention": (
        lambda block, x, angles, model: x * block.scale, plainly, None, "calls attention 0 times",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_layers_are_of_one_kind_only_if_they_compute_the_same(case: str) -> None:
    run, call, kinds, undivided = CASES[case]
    model = Stack(run, call)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode():
        tensors = {name: mode.from_tensor(p.detach()) for name, p in model.named_parameters()}
        records = LayerRecords(model, tensors)
        model.state["records"] = records
        with records:
            torch.func.functional_call(model, tensors, (torch.ones(3, 4),))
    found = records.kinds()
    assert records.layers == "blocks"
    if undivided:
        assert re.search(undivided, records.undivided), records.undivided
    else:
        assert (found, records.undivided) == (kinds, "")


TYPES = ("llama", "smollm3", "gpt_oss")
"""One kind of layers; layers that do not rotate; cache groups, sinks and experts.  A layer of
Gemma 3 stands for layers of other cache groups too."""


def source_of(model_type: str, **sizes: Any) -> Source:
    config = shrunk(default_config(model_type))
    for name, value in sizes.items():
        setattr(config, name, value)
    spec = spec_of(config, model_type, model_type)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(spec, torch.device("cpu"))
        inputs = example(spec, 8, torch.device("cpu"))
    assert isinstance(model, CapturedModel)
    return captured_source(spec, model, inputs)


def whole(source: Source) -> Source:
    """The same with all layers traced."""
    return replace(source, repeat=None, while_traced=nullcontext)


def lowered(source: Source) -> tuple[str, Any, dict[str, int], list[PassReport]]:
    options = EngineOptions(optimization_level=2, device="cpu")
    config = resolve(options, Hardware("cpu", "cpu"), ModelLimits(4096, "float32")).compile
    traced, reports, _ = rewritten(source, config, Timer(lambda phase: None), Record())
    traced, _ = take_constants(traced)
    regions = partition(traced.gm)
    choices = lower(traced.gm, hand_kernels=True, kernels={}, sm=90)
    plan, _ = make_plan(traced, regions)
    return without_node_names(plan), plan.inputs, dict(choices), reports


WINDOWS = ("sliding_attention",) * 3 + ("full_attention",) + ("sliding_attention",) * 2


@pytest.mark.product(2)
@pytest.mark.parametrize("model_type", [*TYPES, "gemma3_text"])
def test_unrolled_equals_traced_whole(model_type: str) -> None:
    """The program is the same, and so is what the passes report of each layer."""
    sizes: dict[str, Any] = {"num_hidden_layers": len(WINDOWS), "layer_types": list(WINDOWS)}
    source = source_of(model_type, **sizes if model_type == "gemma3_text" else {})
    assert source.repeat is not None and source.whole == ""
    if model_type == "gemma3_text":
        groups = {tables for _, tables in source.repeat.shared}
        assert len(groups) == 6 and source.repeat.layers == (0, 0, 0, 3, 0, 0)
    steps, inputs, choices, reports = lowered(source)
    all_steps, all_inputs, all_choices, all_reports = lowered(whole(source))
    assert steps == all_steps
    assert sorted(inputs) == sorted(all_inputs) and choices == all_choices
    for report, expected in zip(
        (r for r in reports if r.name not in ("fold_views", "cleanup", "drop_copies")),
        (r for r in all_reports if r.name not in ("fold_views", "cleanup", "drop_copies")),
        strict=True,
    ):
        places = sorted((site.module, site.matched, site.reason) for site in report.sites)
        wanted = sorted((site.module, site.matched, site.reason) for site in expected.sites)
        assert places == wanted, report.name


def test_one_layer_of_a_deep_model_is_traced() -> None:
    source = source_of("llama", num_hidden_layers=12)
    assert source.repeat is not None and set(source.repeat.layers) == {0}
    seen: list[int] = []

    class Nodes(Record):
        def graph(self, title: str, traced: Any) -> None:
            if title == "captured":
                seen.append(len(traced.gm.graph.nodes))

    options = EngineOptions(optimization_level=2, device="cpu")
    config = resolve(options, Hardware("cpu", "cpu"), ModelLimits(4096, "float32")).compile
    for each in (source, source_of("llama", num_hidden_layers=3)):
        rewritten(each, config, Timer(lambda phase: None), Nodes())
    # Every layer has a cache, which is an argument of the model.
    assert seen[0] == seen[1]


def test_layers_of_other_formats_are_of_other_kinds() -> None:
    source = source_of("llama", num_hidden_layers=3)
    model = source.model
    assert isinstance(model, CapturedModel)
    assert layer_kinds(model.spec, model.library) == (0, 0, 0)
    linear: Any = model.library.get_submodule(f"{model.facts.layers}.1.mlp.down_proj")
    linear.weight = nn.Parameter(linear.weight.to(torch.bfloat16), requires_grad=False)
    assert layer_kinds(model.spec, model.library) == (0, 1, 0)


def test_layers_that_cannot_be_repeated_are_all_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(build._log, "warning", lambda text, why: said.append(text % why))
    source = source_of("llama")
    assert source.repeat is not None
    wrong = replace(source, repeat=replace(source.repeat, module="elsewhere"))
    assert lowered(wrong)[0] == lowered(whole(source))[0]
    assert said[0].startswith("all layers are traced: the trace has nodes of layers []")


def test_a_model_of_values_between_its_layers_is_traced_whole() -> None:
    source = source_of("gemma3n_text")
    assert source.repeat is None
    assert re.search("layer . reads what the model computes between its layers", source.whole)
