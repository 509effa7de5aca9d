"""Whatever runs on a CPU in place of an op's reference is held against the op's oracle too, and
``--verify`` holds against it what a model calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.ops import BY_NAME, SemanticOp, oracles
from fusewright.ops.conformance import ConformanceError
from fusewright.ops.oracles import check_reference
from tests.ops.test_oracles import EVERY, run_abacus

UNMASKED = """
import sys
from torch.nn import functional
right = functional.scaled_dot_product_attention
functional.scaled_dot_product_attention = lambda *args, is_causal, **others: right(*args, **others)
from fusewright.serve.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.product
@EVERY
def test_whatever_runs_on_a_cpu_is_compared(
    op: SemanticOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference, and each implementation that is other code, on one case or more."""
    runs: set[Any] = set()
    compared = oracles._compare_run

    def recorded(op: SemanticOp, case: Any, dtype: Any, run: Any, expected: Any) -> None:
        runs.add(run)
        compared(op, case, dtype, run, expected)

    monkeypatch.setattr(oracles, "_compare_run", recorded)
    for dtype in op.dtypes:
        assert check_reference(op, dtype, 3) > 0
    others = [i.name for i in op.implementations if "cpu" in i.devices and i.fn is not op.reference]
    assert runs == {op.overload(), *map(op.overload, others)}


def test_attention_without_its_causal_mask_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's attention, which runs on a CPU in place of the reference."""
    right = torch.nn.functional.scaled_dot_product_attention

    def unmasked(*args: Any, **kwargs: Any) -> Tensor:
        return right(*args, **{**kwargs, "is_causal": False})

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", unmasked)
    expected = "implementation native of paged_attention, case "
    with pytest.raises(ConformanceError, match=expected):
        check_reference(BY_NAME["paged_attention"], torch.float32, 3)


@pytest.mark.usefixtures("warm")
def test_verify_refuses_attention_without_a_causal_mask() -> None:
    refused = run_abacus(UNMASKED, "--verify")
    (line,) = [line for line in refused.stderr.splitlines() if "error:" in line]
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "is wrong: implementation native of paged_attention, case 'mixed gqa'" in line


def test_verify_checks_the_ops_of_the_model_and_of_sampling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fusewright import LLM
    from fusewright.compiler import build
    from fusewright.passes import check_references

    class Checked(Exception):
        """Ends the start before it generates code."""

    found: dict[str, int] = {}

    def recorded(*args: Any) -> dict[str, int]:
        found.update(check_references(*args))
        if len(args) == 1:  # those that the passes made, last
            raise Checked
        return found

    monkeypatch.setattr(build, "check_references", recorded)
    with pytest.raises(Checked):
        LLM("abacus", device="cpu", verify=True, compile_cache=False, max_model_len=64)
    named = {key.partition(",")[0] for key in found}
    assert named >= {"rotary_embedding", "paged_attention", "kv_store", "linear", "rms_norm"}
    assert named >= {"embedding", "gather_last_token", "sample", "argmax", "keep_tokens"}
    assert named <= set(BY_NAME) and min(found.values()) > 0
    assert "sample, torch.bfloat16" in found and "sample, torch.float32" in found
