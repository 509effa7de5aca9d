"""Linear layers, experts, attention and sums over ranks are chosen and printed alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright.ops import BY_NAME, choose
from fusewright.ops.core.choice import Choice, KernelName

META = torch.device("meta")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def linear(rows: int) -> tuple[Any, ...]:
    return empty(rows, 4096), empty(4096, 4096), None


def experts(tokens: int) -> tuple[Any, ...]:
    ids = empty(tokens, 8, dtype=torch.int32)
    return empty(tokens, 2048), empty(128, 1536, 2048), ids, None, None, None, "silu"


def attention(tokens: int, seqs: int, dtype: torch.dtype = BF16) -> tuple[Any, ...]:
    cache = empty(9, 2, 16, 8, 128, dtype=dtype)
    sizes = [empty(*shape, dtype=torch.int32) for shape in ((seqs, 5), (seqs,), (seqs + 1,))]
    return (empty(tokens, 32, 128), cache, *sizes, empty(tokens, 32, 128), 0.1, 0, 0.0, None, None)


@pytest.mark.parametrize(
    ("op", "implementation", "args", "texts"),
    [
        ("linear", "skinny", linear(16), ["linear [4096, 4096] bfloat16 -> skinny_linear"]),
        (
            *("linear", "skinny", linear(65)),
            [
                (
                    "linear [4096, 4096] bfloat16 -> cuBLAS (skinny_linear: 65 rows: fastest from "
                    "1 to 16; cluster_linear: 65 rows: fastest up to 64; persistent_linear: serves "
                    "gated layers alone (silu, gelu_tanh), and quantizes nothing; cuBLASLt: "
                    "algorithms are measured on a GPU; cuBLASLt with activation: no relu or "
                    "gelu_new of sums with a bias)"
                )
            ],
        ),
        (
            *("expert_linear", "triton", experts(64)),
            [
                "expert_linear 128 x [1536, 2048] bfloat16 -> _sort_by_expert_kernel",
                (
                    "expert_linear 128 x [1536, 2048] bfloat16 -> _expert_linear_kernel [tile 16 x "
                    "64 x 128, 4 warps, 3 stages, by the rule] (_expert_linear_kernel: 64 tokens: "
                    "an expert's weight is read once a token, up to 8)"
                ),
            ],
        ),
        (
            *("paged_attention", "cuda", attention(70, 64)),
            [
                "attention of prefills -> csrc prefill_attention",
                "attention of decodes -> csrc paged_attention",
            ],
        ),
        (
            *("paged_attention", "cuda", attention(70, 1, FP8)),
            [
                "attention of prefills -> csrc prefill_attention",
            ],
        ),
        (
            *("all_reduce", "cuda", (empty(257, 4096), "any")),
            ["all_reduce -> push twice [2 ranks] (push: 257 rows: fastest up to 256)"],
        ),
    ],
)
def test_a_choice_says_the_kernel_its_parameters_and_the_reason(
    op: str, implementation: str, args: tuple[Any, ...], texts: list[str]
) -> None:
    found = BY_NAME[op].implementation(implementation)
    assert found.selects is not None and found.runs is not None
    choices = found.selects(*args)
    assert [*map(str, choices)] == texts
    assert found.runs(*args) == tuple(choice.name for choice in choices)


def test_an_op_that_is_made_of_others_hands_their_choices_on() -> None:
    runs = BY_NAME["chain_over_ranks"].implementation("cuda").runs
    assert runs is not None
    text = "linear(weight) > add_norm(weight, eps=1e-05, reduce=True) > "
    text += "linear(weight, activation='silu')"
    weights = [empty(4096, 4096), empty(4096), empty(28672, 4096)]
    names = runs(empty(65, 4096), empty(65, 4096), weights, text, "any")
    choices = [name.choice for name in names if isinstance(name, KernelName)]
    assert [f"{choice.of} -> {choice.name}" for choice in choices] == [
        "linear [4096, 4096] bfloat16 -> cuBLAS",
        "all_reduce_add_rms_norm -> push + add_rms_norm",
        "linear [28672, 4096] bfloat16 -> persistent_linear",
    ]
    (few, _) = runs(empty(1, 4096), empty(1, 4096), weights, text, "any")
    assert str(few.choice).startswith(
        "chain linear > add_norm > linear -> skinny_linear, push, add"
    )


def test_an_implementation_is_a_choice_too() -> None:
    op = BY_NAME["linear"]
    choice = choose(op, op.describe((torch.ones(2, 8), torch.ones(4, 8))), inline_first=False)
    assert isinstance(choice, Choice) and (choice.of, choice.name) == ("linear", "native")
    assert str(choice).startswith("linear -> native (skinny: ") and choice.kernel.inline
