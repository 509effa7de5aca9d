"""Capture, split, dedupe and link: what compiles, how often, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewright import ops
from fusewright.compiler import build
from fusewright.compiler.artifacts.artifact import Refusal
from fusewright.compiler.artifacts.key import Key, Wanted
from fusewright.compiler.artifacts.store import Store
from fusewright.compiler.capture.source import Example, Source
from fusewright.compiler.capture.trace import TraceError
from fusewright.compiler.compiled import Compiled, compile
from fusewright.compiler.run.load import TABLE
from fusewright.compiler.run.plan import OpStep, PieceStep, Plan
from fusewright.compiler.run.program import InputError
from fusewright.config import LEVELS, CompileConfig, UserError
from fusewright.config.device_table import DeviceTable, Measured
from fusewright.config.expert_tables import ExpertTable, ExpertTile
from fusewright.ops.core import device_table as _device_table
from fusewright.passes import PassReport, RequiredFusionError

HIDDEN, HEADS, HEAD_DIM, BLOCK = 32, 2, 16, 8


TILES_OF_EXPERTS = ExpertTable(8, 64, "bfloat16", ((16, ExpertTile(16, 64, 64, 1, 4, 2)),))
OWN_TABLE = DeviceTable(
    *("device_table.json", "a GPU", 90, 132),
    measured={"experts": Measured("a GPU", {"Triton": "3.6.0"}, how="-O3")},
    experts=(TILES_OF_EXPERTS,),
).text()


class Layer(nn.Module):
    """Attention and a gated feed-forward, of semantic ops, as small as they get."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.qkv = nn.Parameter(torch.randn(3 * HIDDEN, HIDDEN) * 0.1)
        self.up = nn.Parameter(torch.randn(2 * HIDDEN, HIDDEN) * 0.1)

    def forward(self, residual: Tensor, slots: Tensor, table: Any, cache: Tensor) -> Tensor:
        x = ops.linear(ops.rms_norm(residual, self.norm, 1e-5), self.qkv, None)
        q, k, v = (part.view(-1, HEADS, HEAD_DIM) for part in x.split([HIDDEN] * 3, dim=-1))
        ops.kv_store(k, v, cache, slots)
        out = torch.empty(q.shape, dtype=q.dtype)
        ops.paged_attention(q, cache, *table, out, HEAD_DIM**-0.5, 0, 0.0)
        residual = residual + out.view(-1, HIDDEN)
        gate, up = ops.linear(residual, self.up, None).chunk(2, dim=-1)
        return residual + nn.functional.silu(gate) * up


class Model(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(11, HIDDEN))
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(
        self, ids: Tensor, slots: Tensor, table: tuple[Tensor, ...], caches: list[Tensor]
    ) -> Tensor:
        x = ops.embedding(ids, self.embed)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, slots, table, cache)
        return ops.linear(ops.gather_last_token(x, table[2]), self.embed, None)


def step_inputs(lengths: list[int], num_layers: int) -> dict[str, Tensor]:
    """Prompts of these lengths, each in blocks of its own."""
    starts = [0]
    slots: list[int] = []
    for row, length in enumerate(lengths):
        starts.append(starts[-1] + length)
        slots += [(row * 2) * BLOCK + i for i in range(length)]
    values = {
        "ids": torch.arange(starts[-1]) % 11,
        "slots": torch.tensor(slots),
        "block_table": torch.tensor([[2 * row, 2 * row + 1] for row in range(len(lengths))]),
        "seq_lens": torch.tensor(lengths),
        "query_start_loc": torch.tensor(starts),
    }
    inputs = {name: value.to(torch.int32) for name, value in values.items()}
    for i in range(num_layers):
        inputs[f"cache/{i}"] = torch.zeros(14, 2, BLOCK, HEADS, HEAD_DIM)
    return inputs


def arguments(inputs: dict[str, Tensor], num_layers: int) -> tuple[Any, ...]:
    table = tuple(inputs[name] for name in ("block_table", "seq_lens", "query_start_loc"))
    return inputs["ids"], inputs["slots"], table, [inputs[f"cache/{i}"] for i in range(num_layers)]


DYNAMIC = {
    "ids": {0: "num_tokens"},
    "slots": {0: "num_tokens"},
    "block_table": {0: "num_seqs"},
    "seq_lens": {0: "num_seqs"},
    "query_start_loc": {0: "num_seqs_plus_1"},
}


def config(level: int = 2, **changes: Any) -> CompileConfig:
    row = LEVELS[level]
    made = CompileConfig(
        level=level,
        trace=row.trace,
        passes=row.passes,
        required=(),
        hand_kernels=row.hand_kernels,
        tune=row.tune,
        kernels=(),
        verify=True,
    )
    return replace(made, **changes)


def compile_model(model: nn.Module, num_layers: int, options: CompileConfig) -> Compiled:
    inputs = step_inputs([9, 3, 5], num_layers)
    caches = {name: {0: "num_blocks"} for name in inputs if name.startswith("cache")}
    example = Example(arguments(inputs, num_layers), inputs, {**DYNAMIC, **caches})
    with TemporaryDirectory() as folder:
        store = Store((), write_to=Path(folder))
        source = Source(model, example)
        compiled = compile(lambda: source, options, Wanted(Key({"test": "1"})), store)
    compiled.program.bind({f"weights/{n}": p for n, p in model.named_parameters()})
    return compiled


@pytest.fixture(scope="module")
def five_layers() -> tuple[Model, Compiled]:
    torch.manual_seed(0)
    model = Model(5).requires_grad_(False)
    return model, compile_model(model, 5, config())


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [9, 3, 5], [16], [2, 1], [4] * 7])
def test_one_program_serves_every_batch(
    five_layers: tuple[Model, Compiled], lengths: list[int]
) -> None:
    model, compiled = five_layers
    ours, theirs = step_inputs(lengths, 5), step_inputs(lengths, 5)
    with torch.inference_mode():
        got = compiled.program.run(ours)
        want = model(*arguments(theirs, 5))
    assert torch.allclose(got, want, atol=1e-5, rtol=1e-5)
    for i in range(5):
        assert torch.equal(ours[f"cache/{i}"] != 0, theirs[f"cache/{i}"] != 0)
        assert torch.allclose(ours[f"cache/{i}"], theirs[f"cache/{i}"], atol=1e-5)


def test_identical_layers_share_their_pieces(five_layers: tuple[Model, Compiled]) -> None:
    plan = five_layers[1].plan
    assert plan is not None
    pieces = [step.piece for step in plan.steps if isinstance(step, PieceStep)]
    assert len(pieces) == 6 and sorted(Counter(pieces).values()) == [1, 1, 4]
    calls = [step.op for step in plan.steps if isinstance(step, OpStep)]
    attention, head = ["fw_native::paged_attention"], ["fw_native::gather_last_token"]
    assert calls == [*attention * 5, *head, "fw_native::linear"]


def test_per_token_steps_are_those_that_no_sequence_count_enters(
    five_layers: tuple[Model, Compiled],
) -> None:
    plan = five_layers[1].plan
    assert plan is not None
    assert all(step.per_token == isinstance(step, PieceStep) for step in plan.steps)


def test_every_fusion_is_accounted_for(five_layers: tuple[Model, Compiled]) -> None:
    entries = five_layers[1].report["passes"]
    reports = {entry["name"]: PassReport.from_json(entry) for entry in entries}
    assert reports["fuse_act"].matched == 5 and not reports["fuse_act"].missed
    assert reports["fuse_add_norm"].matched == 4 and not reports["fuse_add_norm"].missed
    assert [report.to_json() for report in reports.values()] == entries


def test_no_piece_copies_the_kv_cache(five_layers: tuple[Model, Compiled]) -> None:
    """Storing into the cache must stay in place: a functional copy would move all of it."""
    compiled = five_layers[1]
    inputs = step_inputs([9, 3, 5], 5)
    sizes: list[int] = []
    real = torch.ops.aten.copy_.default

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in (real, torch.ops.aten.clone.default):
                sizes.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(), Watch():
        compiled.program.run(inputs)
    assert inputs["cache/0"].numel() not in sizes


def test_temporaries_are_released(five_layers: tuple[Model, Compiled]) -> None:
    program = five_layers[1].program
    env = program.environment(step_inputs([9, 3, 5], 5))
    inputs = {i for i, value in enumerate(env) if value is not None}
    with torch.inference_mode():
        for step in program.steps:
            step.run(env)
    assert {i for i, value in enumerate(env) if value is not None} == inputs | {program.output}


def test_the_plan_is_plain_data(five_layers: tuple[Model, Compiled]) -> None:
    plan = five_layers[1].plan
    assert plan is not None
    text = json.dumps(plan.to_json())
    assert "weights/layers.3.qkv" in text and "fw_native::paged_attention" in text
    assert Plan.from_json(json.loads(text)) == plan


def test_the_report_names_the_graph() -> None:
    """Equal for equal models, whatever their weights; another for another depth."""
    one, same, two = (
        compile_model(Model(n).requires_grad_(False), n, config()).report["graph"]
        for n in (1, 1, 2)
    )
    assert one == same != two and len(one) == 16


def test_missing_input_is_named(five_layers: tuple[Model, Compiled]) -> None:
    inputs = step_inputs([3], 5)
    del inputs["slots"]
    with pytest.raises(InputError, match="program inputs without a value: slots"):
        five_layers[1].program.run(inputs)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ids", lambda t: t.long(), r"ids is int64\[17\] on cpu, compiled for int32\[num_tokens\]"),
        ("ids", lambda t: t[:, None], r"ids is int32\[17, 1\]"),
        ("ids", lambda t: t[:5], "slots has num_tokens 17, but ids has 5"),
        ("ids", lambda t: t.repeat(2)[::2], r"ids has strides \(2,\), compiled for a contiguous"),
        ("seq_lens", lambda t: t[:0], "seq_lens: num_seqs is 0, compiled for 1 to "),
        ("cache/2", lambda t: t[:, :, :4], r"cache/2 is float32\[14, 2, 4, 2, 16\]"),
    ],
)
def test_inputs_that_the_code_is_not_for_are_refused(
    five_layers: tuple[Model, Compiled], name: str, change: Any, message: str
) -> None:
    inputs = step_inputs([9, 3, 5], 5)
    inputs[name] = change(inputs[name])
    with pytest.raises(InputError, match=message):
        five_layers[1].program.run(inputs)


def test_weights_that_the_code_is_not_for_are_refused(five_layers: tuple[Model, Compiled]) -> None:
    wrong = {"weights/layers.3.qkv": torch.zeros(3 * HIDDEN, HIDDEN, dtype=torch.float64)}
    with pytest.raises(InputError, match=r"weights/layers\.3\.qkv is float64"):
        five_layers[1].program.bind(wrong)


def test_a_graph_break_is_an_error() -> None:
    class Breaks(Model):
        def forward(self, ids: Tensor, slots: Tensor, table: Any, caches: Any) -> Tensor:
            x = super().forward(ids, slots, table, caches)
            return x if x.sum().item() > 0 else -x

    with pytest.raises(TraceError, match="Breaks cannot be captured as one graph"):
        compile_model(Breaks(1).requires_grad_(False), 1, config())


def test_a_size_made_static_is_an_error() -> None:
    class Specializes(Model):
        def forward(self, ids: Tensor, slots: Tensor, table: Any, caches: Any) -> Tensor:
            x = super().forward(ids, slots, table, caches)
            return x * 2 if ids.shape[0] == 17 else x

    with pytest.raises(TraceError, match=r"made num_tokens .* static"):
        compile_model(Specializes(1).requires_grad_(False), 1, config())


@pytest.mark.parametrize(
    ("branch", "guard"),
    [
        (lambda size: size > 16, ".* > 16"),
        (lambda size: size - 3 != 0, r"Ne\(.* - 3, 0\)"),
        (lambda size: size - 4 != 1, r"Ne\(.* - 4, 1\)"),
        (lambda size: size % 2 != 0, r"Ne\(Mod\(.*, 2\), 0\)"),
    ],
    ids=["many", "three", "five", "odd"],
)
def test_code_that_depends_on_a_size_is_an_error(branch: Any, guard: str) -> None:
    class Branches(Model):
        def forward(self, ids: Tensor, slots: Tensor, table: Any, caches: Any) -> Tensor:
            x = super().forward(ids, slots, table, caches)
            return x * 2 if branch(ids.shape[0]) else x

    with pytest.raises(TraceError, match=f"takes another path unless num_tokens .* {guard}"):
        compile_model(Branches(1).requires_grad_(False), 1, config())


def test_hidden_inputs_are_an_error() -> None:
    class Hidden(Model):
        def __init__(self) -> None:
            super().__init__(1)
            self.extra = [torch.ones(1)]

        def forward(self, ids: Tensor, slots: Tensor, table: Any, caches: Any) -> Tensor:
            return super().forward(ids, slots, table, caches) + self.extra[0]

    with pytest.raises(TraceError, match="neither a weight nor a named step input"):
        compile_model(Hidden().requires_grad_(False), 1, config())


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ((("rms_nom", "native"),), "kernels=rms_nom=…: no such op; known: "),
        ((("rms_norm", "cuda"),), "kernels=rms_norm=cuda: rms_norm has no such .*; it has: "),
        ((("linear", "skinny"),), "kernels=linear=skinny: on cpu, not CUDA; use native"),
    ],
)
def test_impossible_kernel_choices_are_refused(
    kernels: tuple[tuple[str, str], ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        compile_model(Model(2).requires_grad_(False), 2, config(kernels=kernels))


def test_required_fusions_that_match_pass_and_those_that_miss_stop() -> None:
    class Early(Model):
        """Its last norm reads a sum that was used before."""

        def forward(self, ids: Tensor, slots: Tensor, table: Any, caches: Any) -> Tensor:
            x = super().forward(ids, slots, table, caches)
            total = x + x
            return ops.rms_norm(total, self.embed[:, 0] * total.sum(), 1e-5)

    model = Model(2).requires_grad_(False)
    compile_model(model, 2, config(required=(("fuse_act", 2), ("fuse_add_norm", 1))))
    with pytest.raises(RequiredFusionError, match="require_fusion=fuse_act:3: only 2 sites"):
        compile_model(model, 2, config(required=(("fuse_act", 3),)))
    early = Early(2).requires_grad_(False)
    with pytest.raises(RequiredFusionError, match=r"missed .* \(the sum is used before the norm"):
        compile_model(early, 2, config(required=(("fuse_add_norm", 1),)))


def test_forced_kernels_run_in_the_program() -> None:
    """Under Triton's interpreter on a CPU: the whole program through hand kernels."""
    torch.manual_seed(0)
    model = Model(1).requires_grad_(False)
    forced = tuple((name, "triton") for name in ("rms_norm", "add_rms_norm", "linear", "kv_store"))
    compiled = compile_model(model, 1, config(kernels=forced))
    assert any("linear -> triton" in choice for choice in compiled.report["choices"])
    ours, theirs = step_inputs([4, 2], 1), step_inputs([4, 2], 1)
    with torch.inference_mode():
        got, want = compiled.program.run(ours), model(*arguments(theirs, 1))
    assert torch.allclose(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        (OWN_TABLE, ""),
        ("{}", "missing required field `gpu`: not a table of a device"),
        (OWN_TABLE.replace('"bfloat16"', '"int4"'), "kind 'int4' is unknown, expected one of"),
        (OWN_TABLE.replace('"16":', '"0":'), "key '0', expected a number of tokens"),
    ],
)
def test_tiles_of_experts_come_with_an_artifact(
    content: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = build.build

    def with_tiles(*args: Any, **named: Any) -> Any:
        files, report = real(*args, **named)
        return files | {TABLE: content.encode()}, report

    monkeypatch.setattr(build, "build", with_tiles)
    _device_table.forget()
    try:
        if refused:
            with pytest.raises(Refusal, match=refused):
                compile_model(Model(1), 1, config())
        else:
            compile_model(Model(1), 1, config())
            assert ops.expert_table(TILES_OF_EXPERTS.shape) == TILES_OF_EXPERTS
    finally:
        _device_table.forget()
