"""Every op's reference agrees with its float64 oracle, and no oracle lets a small mistake pass."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fusewright.ops import ALL_OPS, SemanticOp
from fusewright.ops.conformance import ConformanceError
from fusewright.ops.core.float8 import E4M3
from fusewright.ops.norm.gated_act import ACTIVATIONS
from fusewright.ops.norm.norm import Norm
from fusewright.ops.norm.quantize import SCHEMES
from fusewright.ops.oracles import ORACLES, check_case, few_cases
from fusewright.serve.cli import main

# Those of ranks are sums and other ops of this list: test_all_reduce.py.
LOCAL_OPS = [op for op in ALL_OPS if not op.collective]
EVERY = pytest.mark.parametrize("op", LOCAL_OPS, ids=lambda op: op.name)
Run = Callable[..., Any]


def test_every_op_has_an_oracle() -> None:
    assert ORACLES.keys() == {op.name for op in LOCAL_OPS}


@pytest.mark.product
@EVERY
def test_reference_agrees_with_its_oracle(op: SemanticOp, fw_seed: int) -> None:
    for dtype in op.dtypes:
        generator = torch.Generator().manual_seed(fw_seed)
        for case in op.cases(dtype, torch.device("cpu"), generator):
            try:
                check_case(op, case, dtype)
            except ConformanceError as error:
                pytest.fail(f"{error}\nreplay with --fw-seed={fw_seed}", pytrace=False)


def caught(op: SemanticOp, run: Run) -> bool:
    """Whether one of the cases of ``--verify`` shows that ``run`` is not ``op``."""
    dtype = op.dtypes[0]
    for case in few_cases(op, dtype, 11):
        try:
            check_case(op, case, dtype, run)
        except ConformanceError as error:
            assert op.name in str(error) and repr(case.label) in str(error)
            return True
    return False


def places(op: SemanticOp) -> list[int | str]:
    case = next(case for case in few_cases(op, op.dtypes[0], 11))
    results = op.overload()(*tree_map_only(Tensor, Tensor.clone, case.args))
    count = 0 if results is None else 1 if isinstance(results, Tensor) else len(results)
    return [*range(count), *op.mutates]


def change_last(tensor: Tensor) -> None:
    """Four tolerances to the last number of it, the next integer, or one beyond tolerance of
    FP8 or int8."""
    if not tensor.numel():
        return
    last = tensor[tuple(size - 1 for size in tensor.shape)]
    if tensor.dtype == E4M3:
        last.copy_(torch.where(last.float().abs() < 100, last.float() * 1.5 + 1, 2.0).to(E4M3))
    elif tensor.dtype.is_floating_point:
        last.copy_(last * 1.2 + 0.1)
    else:
        last += 1 if tensor.dtype != torch.int8 else torch.where(last < 100, 4, -4)


@EVERY
def test_a_change_of_any_one_result_is_caught(op: SemanticOp) -> None:
    names = [argument.name for argument in op.overload()._schema.arguments]
    for place in places(op):

        def changed(*args: Any, place: int | str = place) -> Any:
            results = op.reference(*args)
            outputs = [results] if isinstance(results, Tensor) else results
            change_last(outputs[place] if isinstance(place, int) else args[names.index(place)])
            return results

        assert caught(op, changed), f"{op.name}, {place}"
    assert not caught(op, op.reference)


def given(name: str, change: Callable[[Any], Any]) -> Callable[[SemanticOp], Run]:
    """The op as if one of its arguments was read in another way."""

    def mutant(op: SemanticOp) -> Run:
        at = [argument.name for argument in op.overload()._schema.arguments].index(name)

        def run(*args: Any) -> Any:
            if len(args) <= at or args[at] is None:
                return op.reference(*args)
            return op.reference(*args[:at], change(args[at]), *args[at + 1 :])

        return run

    return mutant


def operand(at: int, change: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Change one of the operands of a chain that has so many."""

    def changed(operands: list[Tensor]) -> list[Tensor]:
        return [change(t.float()).to(t.dtype) if i == at else t for i, t in enumerate(operands)]

    return changed


def swap_halves(x: Tensor) -> Tensor:
    return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)


def negate_sines(table: Tensor) -> Tensor:
    cosines, sines = table.chunk(2, dim=-1)
    return torch.cat((cosines, -sines), dim=-1)


def off_by_one(x: Tensor) -> Tensor:
    return x + 1


def percent(x: Any) -> Any:
    return x * 1.01


def more_eps(eps: float) -> float:
    return eps + 1e-3


def next_token(ids: Tensor) -> Tensor:
    return torch.where(ids >= 0, ids + 1, ids)


LOOKS: list[tuple[str, Callable[[Any], Any]]] = [
    ("lengths", lambda lengths: lengths - 1),
    ("shortest", lambda shortest: shortest + 1),
    ("longest", lambda longest: max(1, longest // 2)),
]
MISTAKES: dict[str, list[tuple[str, Callable[[Any], Any]]]] = {
    "rms_norm": [("eps", more_eps), ("weight", percent), ("weight_offset", lambda w: w - 0.01)],
    "add_rms_norm": [("eps", more_eps), ("residual", torch.neg), ("weight", percent)],
    "silu_mul": [
        ("gate_up", swap_halves),
        ("up", torch.neg),
        ("alpha", percent),
        ("limit", percent),
        ("up_offset", percent),
    ],
    "gelu_tanh_mul": [("gate_up", swap_halves), ("up", torch.neg)],
    "rotary_embedding": [
        ("cos_sin_cache", negate_sines),
        ("positions", off_by_one),
        ("layout", lambda name: {"pairs": "pairs_to_halves"}.get(name, name)),
    ],
    "kv_store": [
        ("slot_mapping", lambda slots: slots.flip(0)),
        ("kv_scale", lambda scale: scale.flip(0)),
    ],
    "rope_kv_store": [
        ("cos_sin_cache", negate_sines),
        ("positions", off_by_one),
        ("q_weight", percent),
        ("eps", lambda eps: eps + 1e-3),
        ("kv_scale", lambda scale: scale.flip(0)),
        ("layout", lambda name: {"pairs": "pairs_to_halves"}.get(name, name)),
        ("weight_offset", percent),
    ],
    "paged_attention": [
        ("scale", percent),
        ("sliding_window", lambda window: window + 1 if window else 0),
        ("soft_cap", percent),
        ("kv_scale", lambda scale: scale.flip(0)),
        ("kv_cache", lambda cache: cache.flip(1)),
        ("out_scale", lambda scale: scale * 1.3),
        ("sinks", lambda sinks: sinks + 0.1),
        ("sinks", lambda sinks: sinks.flip(0)),
        ("chunk", lambda chunk: chunk // 2),
    ],
    "linear": [
        ("weight", lambda w: w.flip(0)),
        ("weight", lambda w: w.roll(len(w) // 2, 0)),
        ("bias", torch.neg),
        ("x", percent),
        ("x_scale", percent),
        ("weight_scale", lambda s: s.flip(0)),
        ("weight_scale", lambda s: s * 1.3),
        ("activation", lambda name: "gelu_tanh"),
        ("out_scale", lambda s: s * 1.3),
    ],
    "route": [
        ("router_logits", percent),
        ("correction_bias", torch.neg),
        ("scoring", lambda name: "softmax" if name == "sigmoid" else "sigmoid"),
        ("renormalize", lambda done: not done),
        ("num_groups", lambda groups: max(groups // 2, 1)),
        ("topk_groups", lambda groups: max(groups - 1, 1)),
        ("scaling", percent),
    ],
    "expert_linear": [
        ("weight", lambda w: w.flip(0)),
        ("weight", lambda w: w.roll(w.shape[1] // 2, 1)),
        ("topk_ids", lambda ids: ids.flip(-1)),
        ("x_scale", percent),
        ("weight_scale", lambda s: s.flip(0)),
        ("activation", lambda name: "gelu_tanh"),
    ],
    "combine_experts": [
        ("topk_weights", lambda w: w.flip(-1)),
        ("shared", torch.neg),
        ("shared_gate", torch.neg),
        ("residual", torch.neg),
    ],
    "fused_moe": [
        ("gate_up", lambda w: w.flip(0)),
        ("gate_up", lambda w: w.roll(w.shape[1] // 2, 1)),
        ("down", lambda w: w.flip(0)),
        ("gate_up_scale", lambda s: s.flip(0)),
        ("down_input_scale", lambda s: s / 100),  # too small: the layer saturates
        ("shared_gate", torch.neg),
        ("renormalize", lambda done: not done),
        ("activation", lambda name: "silu" if name == "gelu_tanh" else "gelu_tanh"),
    ],
    "chain": [
        ("residual", torch.neg),
        *(("operands", operand(at, torch.neg)) for at in range(8)),
        ("operands", operand(0, lambda w: w.flip(0))),
        ("stages", lambda text: text.replace("eps=1e-05", "eps=0.5")),
        ("stages", lambda text: text.replace("'silu'", "'gelu_tanh'")),
        ("stages", lambda text: text.replace("offset=1.0", "offset=0.0")),
        ("stages", lambda text: text.replace("'sigmoid'", "'softmax'")),
        ("stages", lambda text: text.replace("top_k=2", "top_k=1")),
    ],
    "embedding": [("ids", off_by_one)],
    "gather_last_token": [("query_start_loc", lambda starts: (starts - 1).clamp(min=0))],
    "argmax": [
        ("logits", torch.neg),
        ("logits", lambda x: x.nan_to_num(0.0, torch.inf, -torch.inf)),
    ],
    "sample": [
        ("temperature", lambda t: t * 1.5),
        ("top_k", lambda k: (k - 3).clamp(min=1)),
        ("top_p", lambda p: p * 0.5),
        ("min_p", lambda p: p * 4),
        ("seeds", off_by_one),
        ("positions", off_by_one),
    ],
    "token_logprobs": [("logits", percent), ("token_ids", lambda ids: ids * 0)],
    "apply_penalties": [
        ("repetition_penalty", percent),
        ("frequency_penalty", percent),
        ("presence_penalty", torch.neg),
        ("prompt_mask", torch.logical_not),
        ("output_counts", lambda counts: counts.clamp(max=1)),
    ],
    "count_tokens": [
        ("token_ids", lambda ids: ids.clamp(min=0)),
        ("slots", lambda s: s.clamp(min=0)),
    ],
    "keep_tokens": [("slots", lambda slots: slots.flip(0)), ("token_ids", next_token)],
    "accept_tokens": [
        ("token_ids", next_token),
        ("input_ids", off_by_one),
        ("chances", lambda c: None if c is None else 1 - c),
        ("order", lambda order: order.clamp(max=0)),
        ("seq_lens", off_by_one),
    ],
    "place_rows": [
        ("lengths", off_by_one),
        ("drafts", off_by_one),
        ("tables", lambda tables: tables.flip(2)),
        ("block_size", lambda size: 2 * size),
    ],
    "propose_ngrams": [*LOOKS, ("history", lambda history: history.flip(1))],
    "propose_suffix": [
        *LOOKS,
        ("ring", lambda ring: ring.flip(0)),
        ("salts", lambda salts: salts + 1),
    ],
    "write_inputs": [("last_tokens", off_by_one), ("packed", off_by_one)],
    **{
        f"{add}layer_norm": [("x", lambda x: x.abs()), ("weight", percent), ("bias", torch.neg)]
        for add in ("", "add_")
    },
    **{
        f"quant_{dtype}_{kind}": [(name, change), ("x", torch.neg)]
        for dtype in ("fp8", "int8")
        for kind, name, change in (
            ("static", "scale", lambda s: s * 1.3),
            ("dynamic", "x", percent),
        )
    },
    **{
        f"{norm}_quant_{kind}": [("eps", lambda eps: eps + 1e-1), ("weight", torch.neg)]
        for norm in ("rms_norm", "add_rms_norm")
        for kind in SCHEMES
    },
    **{
        f"{act}_mul_quant_{kind}": [("x", swap_halves), ("x", torch.neg)]
        for act in ACTIVATIONS
        for kind in SCHEMES
    },
}


@EVERY
def test_a_mistake_in_a_reference_is_caught(op: SemanticOp) -> None:
    for name, change in MISTAKES[op.name]:
        assert caught(op, given(name, change)(op)), f"{op.name}: {name}"


FLIPPED = """
import importlib, sys
rotary = importlib.import_module("fusewright.ops.attention.rotary_embedding")
right = rotary._rotate
rotary._rotate = lambda x, cos, sin, layout: right(x, cos, -sin, layout)
from fusewright.serve.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run_abacus(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = ["run", "-p", "37+58=", "--device", "cpu", "--temperature", "0", "--no-cache"]
    run = [sys.executable, "-P", "-c", program, *command, *flags]
    return subprocess.run(run, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("warm")
def test_verify_refuses_a_rotary_embedding_of_the_wrong_sign() -> None:
    """Without --verify the model calls it, answers wrong and nothing else can know."""

    refused = run_abacus(FLIPPED, "--verify")
    assert (refused.returncode, refused.stdout) == (1, "")
    (line,) = [line for line in refused.stderr.splitlines() if "error:" in line]
    assert "Traceback" not in refused.stderr
    assert line.startswith(
        "error: verification failed: the reference of an op is wrong: rotary_embedding, case "
    )
    assert "output 0 differs in" in line and "by the definition" in line
    unseen = run_abacus(FLIPPED, "-O0")
    assert unseen.returncode == 0 and unseen.stdout.strip() != "37+58=95"


def test_a_wrong_rewrite_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("fusewright.ops.norm.norm")
    right = module.definition

    def wrong(axes: Norm, *args: Any) -> Any:
        results = right(axes, *args)
        return (1.01 * results[0], results[1]) if axes == Norm(add=True) else results

    monkeypatch.setattr(module, "definition", wrong)
    command = ["run", "-p", "1+1=", "--device", "cpu", "-O2", "--no-cache", "--verify"]
    assert main(command) == 1
    said = capfd.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert "Traceback" not in said
    assert line.startswith("error: verification failed: rewrite fuse_add_norm at ")
