"""Model types of the library, by their twins: equal through the graph, or refused in words."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewright.config import UserError
from fusewright.engine.check_model import EQUAL, REFUSED, check_model, check_models
from fusewright.model_executor.captured import interfaces
from fusewright.model_executor.captured.default_configs import default_config
from fusewright.model_executor.captured.interfaces import PagedAttention
from fusewright.model_executor.captured.linears import Siblings, replace_linears, tensors_of
from fusewright.model_executor.captured.twin import ATOL, ProofError, compare, make_twin

EQUAL_TYPES = (
    "arcee",  # squared ReLU
    "bart",  # learned positions, the decoder of a pair
    "cohere",  # parallel blocks, rotates pairs
    "gemma2",  # windows, soft caps
    "gpt_oss",  # sinks, experts with biases
    "olmoe",  # experts by the interface
    "deepseek_v3",  # values narrower than keys, whose zeros fix no size
    "opt",  # learned positions
)
"""Drawn once from each group of models; all of them: ``make models``."""
REFUSALS = {
    "bamba": r"states the engine does not keep yet \(modeling_bamba.py, line \d+: Bamba.* 0\)",
    "mamba2": r"it has recurrent layers, .* \(modeling_mamba2.py, line \d+: Mamba2Block of layer 0",
    "bloom": r"with the mask itself \(modeling_bloom.py, .* of layer 0\); it would work",
    "xlnet": r"attention interface \(modeling_xlnet.py, line .*: XLNetLayer of layer 0\); it would",
    "dbrx": (
        r"its code follows the values of a tensor \(aten.nonzero.default\), which no graph can hold"
        r" \(modeling_dbrx.py, line \d+: .*; a mixture of experts has to go through the library's"
    ),
    "falcon": r"library's attention interface: .* \(modeling_falcon.py, line .*: FalconDecoder",
    "qwen4_exp_text": "it reads a layer of its cache itself, as compressed and indexed attention",
}


@pytest.mark.product(6)
@pytest.mark.parametrize("model_type", EQUAL_TYPES)
def test_eager_step_and_rewritten_graph_are_equal_to_the_library(model_type: str) -> None:
    check = check_model(model_type, level=2)
    assert (check.outcome, check.why) == (EQUAL, "")
    assert check.eager_error is not None and check.eager_error <= ATOL
    assert check.error is not None and check.error <= ATOL
    assert check.sites["attention"] == [check.layers, check.layers]


@pytest.mark.parametrize("model_type", REFUSALS)
def test_a_refusal_says_what_is_missing_in_one_line(model_type: str) -> None:
    check = check_model(model_type, level=2)
    assert check.outcome == REFUSED
    assert re.search(REFUSALS[model_type], check.why)
    assert "\n" not in check.why


def test_an_unknown_name_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r"neither a folder with a config.json nor a causal"):
        check_model("no-such-type", level=2)


@pytest.mark.parametrize("jobs", [1, 2])
def test_without_the_library_no_model_is_checked(
    jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"install fusewright\[transformers\]"):
        check_models(["gemma3_text", "opt"], 2, jobs, lambda check: None)


Facts = Callable[..., dict[str, Any]]
MISTAKES: dict[str, tuple[str, Facts]] = {
    "scale doubled": ("llama", lambda facts, scale, sinks: {"scale": 2 * scale}),
    "window off by one": (
        "gemma2",
        lambda facts, scale, sinks: {
            "facts": replace(facts, window=facts.window and facts.window + 1)
        },
    ),
    "chunk ignored": (
        "llama4_text",
        lambda facts, scale, sinks: {"facts": replace(facts, chunk=0)},
    ),
    "sinks dropped": ("gpt_oss", lambda facts, scale, sinks: {"sinks": None}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_attention_is_caught_and_names_the_module(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, change = MISTAKES[mistake]
    twin = make_twin(default_config(model_type), model_type)
    right = PagedAttention.__call__

    def wrong(self: PagedAttention, call: interfaces.AttentionCall) -> Tensor:
        return right(self, replace(call, **change(call.facts, call.scale, call.sinks)))

    monkeypatch.setattr(interfaces.PagedAttention, "__call__", wrong)
    with pytest.raises(
        ProofError, match=r"the first module that differs is \S*layers\.\d\.\S*attn"
    ):
        compare(twin, twin.ours, model_type)


def test_shifted_positions_are_caught() -> None:
    twin = make_twin(default_config("gpt2"), "gpt2")

    def shifted(ids: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        return twin.ours(ids, torch.add(positions, 1), *rest)  # type: ignore[no-any-return]

    with pytest.raises(ProofError):
        compare(twin, shifted, "gpt2")


class Layers(nn.Module):
    """Runs a gated network twice, beside whose gate and up another layer reads their input."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("gate", "up", "down")})
        self.score = nn.Linear(4, 1)
        self.first, self.second = (nn.ModuleDict({"of": nn.Linear(4, 4)}) for _ in range(2))

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            gated = self.mlp["gate"](x) * self.score(x)
            x = self.mlp["down"](gated + self.mlp["up"](x))
        return self.first["of"](x) + self.second["of"](x)  # type: ignore[no-any-return]


def test_layers_are_siblings_within_a_module_and_however_often_they_run() -> None:
    model, x = Layers(), torch.randn(3, 4)
    watch = Siblings(model)
    expected = model(x)
    found = watch.found()
    assert found == (("mlp.gate", "mlp.up"), ("first.of", "second.of"))
    weights = dict(model.state_dict())
    replace_linears(model, found)
    model.to_empty(device="cpu")
    for name, tensor in tensors_of(model).items():
        tensor.data.copy_(weights[name])
    torch.testing.assert_close(model(x), expected)


def test_the_library_shows_no_bars_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    (check,) = check_models(["llama"], 0, 1, lambda check: None)
    assert check.adapter_error is not None, "the twin is saved and loaded by the adapter"
    assert capfd.readouterr().err == ""
