"""``torch.compile(backend="fusewright")``: fuses plain modules, says what it did not fuse."""

from __future__ import annotations

import importlib.metadata
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.attention.flex_attention import flex_attention

from fusewright.compiler.dynamo_backend import (
    GraphReport,
    UnfusedWarning,
    clear_reports,
    fusewright,
    reports,
)
from tests.compiler.plain_decoder import Norm, PlainDecoder

EAGER = {"rest": "eager"}
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    clear_reports()
    torch.manual_seed(0)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error", UnfusedWarning)
        yield
    torch._dynamo.reset()


def compiled(model: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Any:
    return torch.compile(model, backend=fusewright, dynamic=dynamic, options=options)


def only_report() -> GraphReport:
    (report,) = reports()
    return report


def counts(report: GraphReport) -> dict[str, int]:
    assert not [site for one in report.passes for site in one.missed]
    return {one.name: one.matched for one in report.passes if one.name != "cleanup"}


def assert_close(got: Tensor, want: Tensor) -> None:
    """Within what roundings of bf16 in another order may do to the logits of a small model."""
    assert got.dtype == want.dtype
    error = (got.float() - want.float()).abs().max() / want.float().abs().max()
    bound = {
        torch.float32: 1e-4 if want.is_cuda else 1e-5,
        torch.float16: 5e-3,
        torch.bfloat16: 2e-2,
    }[want.dtype]
    assert error < bound, error


ALL = {"canonicalize_norm": 5, "canonicalize_rope": 4, "fuse_add_norm": 4, "fuse_act": 2}
ONE_LAYER = {"canonicalize_norm": 3, "canonicalize_rope": 2, "fuse_add_norm": 2, "fuse_act": 1}


@pytest.mark.product
@pytest.mark.parametrize(
    ("gemma", "dtype", "dynamic"),
    [(False, torch.float32, None), (True, torch.float16, None), (True, torch.bfloat16, True)],
)
def test_a_plain_decoder_is_fused(gemma: bool, dtype: torch.dtype, dynamic: bool | None) -> None:
    model = PlainDecoder(gemma=gemma, layers=1 if gemma else 2).to(dtype)
    run = compiled(model, dynamic, verify=True, **EAGER)
    for shape in [(2, 7), (3, 5)] if dynamic else [(2, 7)]:
        ids = torch.randint(0, 128, shape)
        assert_close(run(ids), model(ids))
    assert counts(only_report()) == (ONE_LAYER if gemma else ALL)
    assert sum(only_report().library_calls.values()) == (1 if gemma else 2)


@pytest.mark.product(2, of="what Inductor compiles of the rest")
def test_inductor_compiles_the_rest() -> None:
    norm = Norm(64, gemma=True).bfloat16()
    run = compiled(norm)
    x = torch.randn(3, 64).bfloat16()
    torch.testing.assert_close(run(x), norm(x))
    assert list(only_report().choices) == ["rms_norm -> native (triton: not for cpu)"]


@pytest.mark.product
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_rounds_where_the_model_casts(dtype: torch.dtype) -> None:
    def overflows(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return F.silu(g) * (u * 7e4).half(), F.silu(g).bfloat16().float() * u

    g, u = torch.randn(2, 4, 64).to(dtype)
    want, got = overflows(g, u), compiled(overflows)(g, u)
    assert want[0].isinf().any() and torch.equal(want[0].isinf(), got[0].isinf())
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)


def test_inductor_has_random_numbers_for_random_ops() -> None:
    def random(x: Tensor, q: Tensor) -> tuple[Tensor, ...]:
        attended = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        drawn = torch.bernoulli(torch.full_like(x, 0.25))
        return torch.rand_like(x) + x, F.dropout(x, 0.5), drawn, F.gumbel_softmax(x), attended

    x, q = torch.randn(64, 32), torch.randn(1, 2, 8, 16)
    added, dropped, drawn, softmax, attended = compiled(random)(x, q)
    assert (added - x).min() >= 0 and (added - x).max() <= 1 + 1e-5
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * x[kept])
    assert 0.4 < kept.float().mean() < 0.6 and 0.2 < drawn.mean() < 0.3
    torch.testing.assert_close(softmax.sum(-1), torch.ones(64))
    want = F.scaled_dot_product_attention(q, q, q)
    assert attended.isfinite().all() and (attended - want).abs().max() > 0.1


@pytest.mark.slow
def test_flex_attention_is_inductors() -> None:
    norm, q = Norm(16, gemma=False), torch.randn(1, 2, 128, 16)
    got = compiled(lambda q: flex_attention(norm(q), q, q))(q)
    torch.testing.assert_close(
        got, F.scaled_dot_product_attention(norm(q), q, q), rtol=1e-4, atol=1e-4
    )
    assert only_report().matched("canonicalize_norm") == 1


def test_random_ops_are_eagers_where_the_rest_is_eager() -> None:
    def random(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.rand(3) + x[0, :3], F.dropout(x, 0.5)

    x = torch.randn(4, 8)
    torch.manual_seed(1)
    want = random(x)
    run = compiled(random, verify=True, **EAGER)
    torch.manual_seed(1)
    for one, other in zip(run(x), want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_norm_of_one_width_then_another(dynamic: bool | None) -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), w, 1e-5)

    run = compiled(norm, dynamic, verify=True, **EAGER)
    for width in (64, 96, 80):
        x, w = torch.randn(3, width), torch.randn(width)
        torch.testing.assert_close(run(x, w), norm(x, w))
    (choice,) = reports()[-1].choices
    assert "is dynamic: a kernel is compiled for one width" in choice


def test_a_product_behind_a_transposed_gate_keeps_the_strides_of_eager() -> None:
    linear = nn.Linear(5, 5)

    def gated(g: Tensor, u: Tensor) -> Tensor:
        made: Tensor = linear(u * F.silu(g.transpose(0, 1)))
        return made

    g, u = torch.randn(7, 32, 5), torch.randn(32, 7, 5)
    torch.testing.assert_close(compiled(gated, verify=True, **EAGER)(g, u), gated(g, u))
    assert only_report().matched("fuse_act") == 1


@pytest.mark.product
@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_numbers_of_the_caller_are_inputs_of_one_graph(rest: str) -> None:
    model = nn.Linear(32, 32)

    def scaled(x: Tensor, eps: float, scale: float) -> Tensor:
        hidden = model(x) * scale
        normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
        return normed * torch.arange(1.0, 1.0 + hidden.shape[-1])

    run, x = compiled(scaled, dynamic=True, rest=rest), torch.randn(2, 7, 32)
    for scale in (0.5, 0.7, 1.9):
        assert_close(run(x, 1e-5, scale), scaled(x, 1e-5, scale))
    assert counts(only_report())["canonicalize_norm"] == 1
    assert_close(run(x, 1e-3, 0.5), scaled(x, 1e-3, 0.5))
    assert len(reports()) == 2, "eps is a constant of the graph"


def test_a_sum_with_a_transposed_tensor_is_normed_in_the_strides_of_eager() -> None:
    linear, norm, conv = nn.Linear(32, 32), nn.RMSNorm(32, eps=1e-5), nn.Conv1d(4, 32, 1)
    places = torch.randn(2, 7, 32)

    def embedded(x: Tensor) -> Tensor:
        made: Tensor = linear(norm(places + conv(x).transpose(1, 2)))
        return made

    x = torch.randn(2, 4, 7)
    torch.testing.assert_close(compiled(embedded, verify=True, **EAGER)(x), embedded(x))
    assert only_report().matched("fuse_add_norm") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hand_kernels_run_on_a_gpu(gemma: bool, dtype: torch.dtype) -> None:
    model = PlainDecoder(gemma=gemma, size=256).to("cuda", dtype)
    run = compiled(model, True, verify=True)
    for shape in [(2, 33), (3, 5)]:
        ids = torch.randint(0, 128, shape, device="cuda")
        assert_close(run(ids), model(ids))
    assert counts(only_report()) == ALL
    assert all("-> triton" in choice for choice in only_report().choices), str(only_report())


def test_torch_rms_norm_and_a_changed_eps() -> None:
    norm = nn.RMSNorm(32, eps=1e-5)
    run = compiled(norm, verify=True, **EAGER)
    x = torch.randn(3, 32) * 1e-2
    for eps in (1e-5, 1e-2):
        norm.eps = eps
        torch.testing.assert_close(run(x), norm(x))
    assert [report.matched("canonicalize_norm") for report in reports()] == [1, 1]


def test_mutated_inputs_and_views_are_as_eager() -> None:
    norm = Norm(32, gemma=False)

    def step(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache[1:2].copy_(norm(x)[:1])
        return cache[1], x[:2]

    x, eager, fused = torch.randn(3, 32), torch.zeros(4, 32), torch.zeros(4, 32)
    want, (got, view) = step(x, eager)[0], compiled(step, **EAGER)(x, fused)
    assert torch.equal(eager, fused) and torch.equal(got, want)
    assert got.data_ptr() == fused[1].data_ptr() and view.data_ptr() == x.data_ptr()
    assert only_report().matched("canonicalize_norm") == 1


def test_a_graph_without_inputs_runs() -> None:
    made = compiled(lambda: torch.arange(5) * 2)()
    assert made.tolist() == [0, 2, 4, 6, 8]


def test_gradients_are_computed_without_fusions_and_said_so() -> None:
    with torch.inference_mode(False):
        model = Norm(32, gemma=False)
        x = torch.randn(3, 32)
        with pytest.warns(UnfusedWarning, match="gradients are required.*inference_mode"):
            got = compiled(model)(x)
        got.sum().backward()
        gradient = model.weight.grad
        model.weight.grad = None
        model(x).sum().backward()
    torch.testing.assert_close(gradient, model.weight.grad)
    assert "gradients" in only_report().notice and not only_report().passes


def broken(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        y = norm(x)
        if y.sum() > 0:  # depends on data
            return norm(y)
        return norm(-y)

    return step


def test_a_graph_break_is_said_and_the_parts_are_fused() -> None:
    norm = Norm(32, gemma=False)
    step = broken(norm)
    x = torch.randn(3, 32)
    with pytest.warns(UnfusedWarning, match="compiled in parts: the graph breaks") as caught:
        got = compiled(step, **EAGER)(x)
    torch.testing.assert_close(got, step(x))
    assert len([w for w in caught if w.category is UnfusedWarning]) == 1
    assert [report.matched("canonicalize_norm") for report in reports()] == [1, 1]


def refusal(run: Callable[[], Any]) -> str:
    with pytest.raises(BackendCompilerFailed) as caught:
        run()
    return str(caught.value)


def test_required_fusions_refuse_what_is_not_fused() -> None:
    norm = Norm(32, gemma=False)
    x = torch.randn(3, 32)
    assert compiled(norm, require_fusion="canonicalize_norm:1", **EAGER)(x) is not None
    torch._dynamo.reset()
    run = compiled(norm, require_fusion=["canonicalize_norm:2"], **EAGER)
    assert "only 1 sites matched" in refusal(lambda: run(x))
    rows = compiled(
        lambda x: x * torch.rsqrt(x.pow(2).mean(0, True) + 1e-6), require_all_fusions=True
    )
    assert "require_fusion=canonicalize_norm: missed mean" in refusal(lambda: rows(x))
    whole = compiled(broken(norm), require_all_fusions=True, **EAGER)
    assert "the graph breaks" in refusal(lambda: whole(x))
    with torch.inference_mode(False):
        training = compiled(Norm(32, gemma=False), require_fusion="canonicalize_norm")
        assert "gradients are required" in refusal(lambda: training(torch.randn(3, 32)))


def test_a_model_of_which_nothing_is_expected_cannot_require_all_fusions() -> None:
    layer = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    run = compiled(layer, require_all_fusions=True, **EAGER)
    said = refusal(lambda: run(torch.randn(3, 32)))
    assert "no fusion is expected in graph 0/0, so there is nothing to require" in said
    assert "canonicalize_norm" in said and "drop require_all_fusions" in said
    torch._dynamo.reset()
    assert compiled(layer, **EAGER)(torch.randn(3, 32)) is not None


def test_a_further_graph_of_a_function_may_have_nothing_to_fuse() -> None:
    norm = Norm(32, gemma=False)

    def model(x: Tensor, whole: bool) -> Tensor:
        return norm(x) if whole else x * 2  # type: ignore[no-any-return]

    run = compiled(model, require_all_fusions=True, **EAGER)
    x = torch.randn(3, 32)
    assert_close(run(x, True), norm(x))
    assert torch.equal(run(x, False), x * 2)
    assert [len(r.passes[0].sites) for r in reports()] == [1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levle": 2}, "options has 'levle', expected some of: level, require_fusion"),
        ({"level": 4}, r"options['level'] is 4, expected one of [0, 1, 2, 3]"),
        ({"verify": 1}, "options['verify'] is 1, expected True or False"),
        ({"rest": "aot"}, "options['rest'] is 'aot', expected 'inductor' or 'eager'"),
        ({"require_fusion": "norm"}, "options['require_fusion'] has 'norm', expected NAME"),
        ({"require_fusion": "fuse_act", "level": 1}, "level 1 runs: canonicalize_norm"),
        ({"require_all_fusions": True, "level": 0}, "level 0 fuses nothing"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    run = torch.compile(lambda x: x + 1, backend=fusewright, options=options)
    assert message in refusal(lambda: run(torch.ones(2)))


def test_the_last_graph_before_eager_mode_is_said() -> None:
    """Dynamo compiles so many graphs of a function and then, unasked, none."""
    norm = Norm(32, gemma=False)
    run = compiled(norm, dynamic=False, **EAGER)
    with torch._dynamo.config.patch(recompile_limit=3):
        for tokens in (2, 3):
            run(torch.randn(tokens, 32))
        with pytest.warns(
            UnfusedWarning, match="graph [0-9]+/2: it is the last of 3.*dynamic=True"
        ):
            run(torch.randn(4, 32))
        run(torch.randn(5, 32))  # in eager mode
    assert [bool(report.notice) for report in reports()] == [False, False, True]
    assert "the last of 3" in str(reports())
    torch._dynamo.reset()
    clear_reports()
    run = compiled(norm, dynamic=True, **EAGER)
    for tokens in range(2, 15):
        run(torch.randn(tokens, 32))
    assert counts(only_report())["canonicalize_norm"] == 1 and not only_report().notice


def test_no_report_says_why() -> None:
    assert not reports() and str(reports()).startswith("no graph was compiled: ")
    compiled(Norm(32, gemma=False), **EAGER)(torch.randn(3, 32))
    assert str(reports()) == str(only_report())


def test_lower_levels_fuse_less() -> None:
    norm, x = Norm(32, gemma=True), torch.randn(3, 32)
    torch.testing.assert_close(compiled(norm, level=0)(x), norm(x))
    assert not only_report().passes
    clear_reports()
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(norm, level=1, **EAGER)(x), norm(x))
    passes = [one.name for one in only_report().passes]
    assert passes == ["canonicalize_norm", "canonicalize_rope", "cleanup"]


def test_an_installed_package_is_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, target),) = project["entry-points"]["torch_dynamo_backends"].items()
    info = tmp_path / "fusewright_backend_test-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fusewright-backend-test\nVersion: 1\n"
    )
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = importlib.metadata.entry_points(group="torch_dynamo_backends", name=name)
    assert name == "fusewright" and found  # this project's own too, where it is installed
    assert all(point.load() is fusewright for point in found)
