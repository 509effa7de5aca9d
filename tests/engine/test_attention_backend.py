"""``--attention-backend``: what it forces, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from fusewright.config import EngineOptions, Hardware, ResolvedConfig, UserError
from fusewright.engine.worker.startup import read_model
from fusewright.model_executor.spec import ModelSpec

GPU = Hardware("cuda", "a GPU", sm=90, num_sms=132, graphs="cuda")


def model(**options: Any) -> tuple[ModelSpec, ResolvedConfig]:
    _, spec, config = read_model(EngineOptions(**options), GPU)
    return spec, config


def test_auto_forces_nothing() -> None:
    assert model()[1].compile.kernels == ()


def test_a_backend_is_a_forced_implementation() -> None:
    assert model(attention_backend="triton")[1].compile.kernels == (("paged_attention", "triton"),)
    named = {"kernels": ("paged_attention=triton",), "attention_backend": "triton"}
    assert model(**named)[1].compile.kernels == (("paged_attention", "triton"),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_backend": "paper"}, "attention_backend='paper': expected auto or"),
        ({"attention_backend": "triton", "optimization_level": 0}, "-O0 runs references"),
        (
            {"attention_backend": "triton", "kernels": ("paged_attention=native",)},
            "paged_attention is given twice, triton and native",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        model(**options)
