"""The plan's greedy step: in place of the last one where a step needs tokens and no logits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.compiler.compiled import Compiled
from fusewright.compiler.kernels import program_variants
from fusewright.compiler.lower import lower
from fusewright.compiler.make_plan import _take_greedy as take_greedy
from fusewright.compiler.plan import OpStep, PieceStep, Plan, Value
from fusewright.config import LEVELS
from fusewright.passes import build_passes, run_passes
from tests.compiler.test_compile import Model, arguments, compile_model, config, step_inputs
from tests.compiler.test_unroll import SPEC, traced

PASS = "fuse_lm_head_argmax"


class Biased(Model):
    """Its head adds one number to every logit."""

    def forward(
        self, ids: Tensor, slots: Tensor, table: tuple[Tensor, ...], caches: list[Tensor]
    ) -> Tensor:
        return super().forward(ids, slots, table, caches) + 1.0


@pytest.fixture(scope="module", params=[1, 2])
def two_layers(request: pytest.FixtureRequest) -> tuple[Model, Compiled]:
    torch.manual_seed(1)
    model = Model(2).requires_grad_(False)
    passes = (*LEVELS[request.param].passes, PASS)
    return model, compile_model(model, 2, config(request.param, passes=passes))


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [9, 3, 5], [16]])
def test_it_gives_the_likeliest_tokens_of_the_logits(
    two_layers: tuple[Model, Compiled], lengths: list[int]
) -> None:
    model, compiled = two_layers
    inputs, theirs = step_inputs(lengths, 2), step_inputs(lengths, 2)
    with torch.inference_mode():
        logits = compiled.program.run(inputs)
        tokens = compiled.program.ending(greedy=True).run(inputs)
        want = model(*arguments(theirs, 2)).argmax(-1)
    assert logits.shape == (len(lengths), 11)
    assert tokens.dtype == torch.int32 and torch.equal(tokens, want.int())


def test_it_is_a_call_of_its_own_with_its_choice_and_site(
    two_layers: tuple[Model, Compiled],
) -> None:
    _, compiled = two_layers
    plan = compiled.plan
    assert plan is not None and plan.greedy is not None
    last = plan.steps[-1]
    assert isinstance(last, OpStep) and last.op == "fw_native::linear"
    assert plan.greedy.op == "fw_native::lm_head_argmax" and not plan.greedy.per_token
    assert plan.greedy.args == last.args[:2] and plan.greedy.outputs != last.outputs
    (choice,) = (c for c in compiled.report["choices"] if c.startswith("lm_head_argmax"))
    assert choice.startswith("lm_head_argmax -> native")
    (report,) = (r for r in compiled.report["passes"] if r["name"] == PASS)
    assert report["sites"] == report["matched"] == 1
    assert compiled.report["steps"] == len(compiled.program.steps) == len(plan.steps)


def test_it_survives_the_plan_as_json(two_layers: tuple[Model, Compiled]) -> None:
    plan = two_layers[1].plan
    assert plan is not None and plan.greedy is not None
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    without = replace(plan, greedy=None)
    assert Plan.from_json(json.loads(json.dumps(without.to_json()))) == without


def test_temporaries_are_released_by_either_end(two_layers: tuple[Model, Compiled]) -> None:
    for greedy in (False, True):
        program = two_layers[1].program.ending(greedy=greedy)
        env = program.environment(step_inputs([9, 3, 5], 2))
        given = {i for i, value in enumerate(env) if value is not None}
        with torch.inference_mode():
            for step in program.steps:
                step.run(env)
        left = {i for i, value in enumerate(env) if value is not None}
        assert left == given | {program.output}


def test_without_the_pass_or_the_site_there_is_none() -> None:
    plain = compile_model(Model(1).requires_grad_(False), 1, config())
    assert plain.plan is not None and plain.plan.greedy is None and plain.program.greedy is None
    options = config(passes=(*LEVELS[2].passes, PASS))
    biased = compile_model(Biased(1).requires_grad_(False), 1, options)
    (report,) = (r for r in biased.report["passes"] if r["name"] == PASS)
    (missed,) = report["missed"]
    assert missed["reason"] == "the last step is not a linear layer"
    assert biased.program.greedy is None


def call(reads: str, output: str) -> OpStep:
    return OpStep("fw_native::lm_head_argmax", (Value(reads),), (output,), per_token=False)


@pytest.mark.parametrize(
    ("last", "greedy"),
    [
        (PieceStep("p", ("x",), ("logits",), per_token=True), call("x", "tokens")),
        (PieceStep("p", ("x",), ("logits",), per_token=False), call("logits", "tokens")),
        (call("x", "logits"), PieceStep("p", ("x",), ("tokens",), per_token=False)),
        (call("x", "tokens"), call("x", "logits")),
    ],
)
def test_a_step_that_cannot_take_the_place_of_the_last_is_refused(
    last: PieceStep | OpStep, greedy: PieceStep | OpStep
) -> None:
    with pytest.raises(ValueError, match=r"cannot take the place of|a single call"):
        take_greedy([last, greedy], "tokens")


def test_every_kernel_that_it_launches_is_compiled_ahead() -> None:
    """For a GPU that is not here."""
    found = {}
    for passes in (("cleanup",), ("cleanup", PASS)):
        graph = traced(SPEC, "cuda")
        run_passes(graph.gm, build_passes(passes))
        kernels = {"lm_head_argmax": "triton"} if PASS in passes else {}
        lower(graph.gm, hand_kernels=True, kernels=kernels, sm=90)
        found[passes[-1]] = program_variants(graph)
    logits = torch.empty(3, SPEC.vocab_size, dtype=SPEC.dtype, device="meta")
    argmax = ops.BY_NAME["argmax"].implementation("triton").launches
    assert argmax is not None and found["cleanup"] < found[PASS]
    assert found[PASS] - found["cleanup"] == ops.variants_of(argmax(logits)[0])
