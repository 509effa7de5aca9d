"""``--attention-backend``: what it forces, and who serves while FlashInfer is not compiled."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from fusewright import LLM, SamplingParams
from fusewright.compiler.artifacts.store import Store
from fusewright.config import FLASHINFER, EngineOptions, Hardware, ResolvedConfig, UserError
from fusewright.engine.ahead import compile_ahead
from fusewright.engine.attention_backend import (
    say_where_flashinfer_does_not_fit,
    with_compiled_attention,
)
from fusewright.engine.batch import Batch
from fusewright.engine.explain import explain_model
from fusewright.engine.source import artifact_key
from fusewright.engine.startup import read_model
from fusewright.model_executor.abacus.problems import held_out
from fusewright.model_executor.spec import ModelSpec
from fusewright.ops.paged_attention_flashinfer import FEWEST_TOKENS

GPU = Hardware("cuda", "a GPU", sm=90, num_sms=132, graphs="cuda")


def model(**options: Any) -> tuple[ModelSpec, ResolvedConfig]:
    _, spec, config = read_model(EngineOptions(**options), GPU)
    return spec, config


def test_auto_forces_nothing() -> None:
    assert model()[1].compile.kernels == ()


def test_a_backend_is_a_forced_implementation() -> None:
    assert model(attention_backend="triton")[1].compile.kernels == (("paged_attention", "triton"),)
    assert model(attention_backend="flashinfer")[1].compile.kernels == (FLASHINFER,)
    named: dict[str, Any] = {"kernels": ("paged_attention=flashinfer",)}
    assert model(**named)[1].compile.kernels == (FLASHINFER,)
    assert model(**named, attention_backend="flashinfer")[1].compile.kernels == (FLASHINFER,)


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


def test_a_start_without_modules_says_so_in_a_line_and_serves_by_our_own(
    tmp_path: Path, said: list[logging.LogRecord]
) -> None:
    spec, config = model(
        attention_backend="flashinfer", dtype="bfloat16", kernels=("linear=native",)
    )
    own = with_compiled_attention(spec, config, Store((), write_to=tmp_path))
    assert own.compile.kernels == (("linear", "native"),)
    (line,) = (record.getMessage() for record in said)
    assert "`fusewright compile` with the options of this start" in line
    assert "\n" not in line
    # It is another artifact, which does not stand in the way of that with the modules.
    assert artifact_key(spec, own) != artifact_key(spec, config)


def test_a_start_takes_the_artifact_with_modules(
    tmp_path: Path, said: list[logging.LogRecord]
) -> None:
    spec, config = model(attention_backend="flashinfer", dtype="bfloat16")
    store = Store((), write_to=tmp_path)
    store.publish(artifact_key(spec, config), {"plan.json": b"{}"}, {}, "with modules")
    assert with_compiled_attention(spec, config, store) == config
    assert not said


def test_required_artifacts_are_not_replaced(tmp_path: Path) -> None:
    """``compile()`` then refuses, with the nearest artifact and the command."""
    spec, config = model(attention_backend="flashinfer", dtype="bfloat16", require_cache=True)
    assert with_compiled_attention(spec, config, Store((tmp_path,))) is config


def test_auto_takes_flashinfer_where_someone_has_compiled_it(
    tmp_path: Path, said: list[logging.LogRecord]
) -> None:
    store = Store((), write_to=tmp_path)
    spec, config = model(dtype="bfloat16", kernels=("linear=native",))
    assert with_compiled_attention(spec, config, store) is config
    asked = model(attention_backend="flashinfer", dtype="bfloat16", kernels=("linear=native",))
    store.publish(artifact_key(*asked), {"plan.json": b"{}"}, {}, "with modules")
    assert with_compiled_attention(spec, config, store) == asked[1]
    assert not said


@pytest.mark.parametrize(
    "options", [{"attention_backend": "triton"}, {"batch_invariant": True}], ids=str
)
def test_what_names_a_kernel_keeps_it(tmp_path: Path, options: dict[str, Any]) -> None:
    store = Store((), write_to=tmp_path)
    spec, config = model(dtype="bfloat16", **options)
    asked = model(attention_backend="flashinfer", dtype="bfloat16")
    store.publish(artifact_key(*asked), {"plan.json": b"{}"}, {}, "with modules")
    assert with_compiled_attention(spec, config, store) is config


def test_where_flashinfer_does_not_fit_our_own_kernels_serve_and_it_is_said(
    said: list[logging.LogRecord],
) -> None:
    options = EngineOptions(
        attention_backend="flashinfer", dtype="bfloat16", kv_cache_dtype="fp8", device="cuda"
    )
    _, facts = explain_model(options, target_sm=90)
    say_where_flashinfer_does_not_fit(read_model(options, GPU)[2], facts.choices)
    (line,) = (record.getMessage() for record in said)
    assert line.startswith("attention_backend=flashinfer: paged_attention -> cuda (flashinfer: ")
    assert "torch.float8_e4m3fn" in line


def test_other_backends_say_nothing_of_flashinfer(said: list[logging.LogRecord]) -> None:
    choices = ["paged_attention -> triton (flashinfer: KV cache is FP8)"]
    say_where_flashinfer_does_not_fit(model(attention_backend="triton")[1], choices)
    assert not said


@pytest.fixture(scope="module")
def with_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the bundled model's artifact for FlashInfer."""
    if importlib.util.find_spec("flashinfer") is None or shutil.which("nvcc") is None:
        pytest.skip("flashinfer-python and nvcc build the module, and are not both here")
    store = tmp_path_factory.mktemp("store")
    compile_ahead(EngineOptions(attention_backend="flashinfer", compile_cache_dir=(str(store),)))
    return store


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_a_plain_start_serves_by_flashinfer_once_that_is_compiled(
    mode: str, with_modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in steps of their own, in steps beside decodes, and in chunks; FlashInfer has those
    of many tokens."""
    llm = LLM(
        "abacus",
        compile_cache_dir=(str(with_modules),),
        cudagraph_mode=mode,
        max_num_seqs=64,
        max_num_batched_tokens=300,
    )
    (attention,) = (c for c in llm.report()["choices"] if c.startswith("paged_attention"))
    assert attention.startswith("paged_attention -> flashinfer")
    problems = held_out(200, seed=5)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    sizes, launch = [], llm.engine.runner.launch

    def watched(batch: Batch) -> Any:
        sizes.append(batch.num_tokens)
        return launch(batch)

    monkeypatch.setattr(llm.engine.runner, "launch", watched)
    given = llm.generate([p.prompt for p in problems], params, use_tqdm=False)
    assert max(sizes) >= FEWEST_TOKENS, "no step was FlashInfer's"
    right = sum(p.answer == o.outputs[0].text for p, o in zip(problems, given, strict=True))
    assert right >= 198
