"""``paged_attention`` by FlashInfer: what it takes, says without its module, and computes."""

from __future__ import annotations

import ctypes.util
import importlib.util
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright.ops import (
    PAGED_ATTENTION,
    Case,
    OpDesc,
    choose,
    flashinfer,
    load_cuda_library,
    paged_attention_flashinfer,
)
from fusewright.ops.conformance import check_case
from fusewright.ops.paged_attention_cases import batch

IMPL = PAGED_ATTENTION.implementation("flashinfer")
HEADS = (8, 2, 128)


def description(dtype: torch.dtype = torch.bfloat16, sm: int = 90, **options: Any) -> OpDesc:
    heads = options.pop("heads", HEADS)
    page = options.pop("page", 16)
    cpu = torch.device("cpu")
    args = batch(dtype, cpu, torch.Generator(), [(1, 3), (4, 9)], heads, page, **options)
    return replace(PAGED_ATTENTION.describe(args, sm=sm, csrc=True), device="cuda")


def test_it_takes_bfloat16_on_hopper() -> None:
    assert IMPL.supports(description()) == ""
    assert IMPL.supports(description(heads=(12, 12, 64), page=32)) == ""


@pytest.mark.parametrize(
    ("desc", "reason"),
    [
        (description(sm=80), "built for SM 9.0, not 8.0"),
        (description(sm=100), "built for SM 9.0, not 10.0"),
        (replace(description(), device="cpu"), "on cpu, not CUDA"),
        (description(torch.float16), "torch.float16, torch.float16, torch.float16: the module"),
        (description(fp8="scaled kv"), "torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16"),
        (description(fp8="out"), "torch.bfloat16, torch.bfloat16, torch.float8_e4m3fn"),
        (description(heads=(4, 2, 80)), "head_dim 80: the modules are for 64, 128"),
        (description(window=5), "sliding window"),
        (description(cap=5.0), "soft cap"),
        (description(page=12), "block size 12"),  # what csrc says
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_says_what_it_does_not_take(desc: OpDesc, reason: str) -> None:
    assert reason in IMPL.supports(desc)


def test_only_its_name_chooses_it() -> None:
    desc = description()
    assert choose(PAGED_ATTENTION, desc, inline_first=False).implementation != "flashinfer"
    chosen = choose(PAGED_ATTENTION, desc, inline_first=False, override="flashinfer")
    assert chosen.implementation == "flashinfer"


def test_where_it_does_not_fit_the_next_one_serves_and_it_says_why() -> None:
    override = "flashinfer/cuda/triton"
    desc = description(fp8="scaled kv")
    chosen = choose(PAGED_ATTENTION, desc, inline_first=False, override=override)
    assert chosen.implementation == "cuda"
    assert str(chosen).startswith("paged_attention -> cuda (flashinfer: q, kv_cache and out are")
    desc = description(fp8="scaled kv", heads=(4, 2, 80))
    chosen = choose(PAGED_ATTENTION, desc, inline_first=False, override=override)
    assert chosen.implementation == "triton"


def test_without_its_module_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "_LIBRARIES", {})
    remedy = "`fusewright compile --attention-backend flashinfer` builds it into the artifact"
    assert remedy in IMPL.missing(description())
    args = batch(torch.bfloat16, torch.device("cpu"), torch.Generator(), [(300, 300)], HEADS, 16)
    with pytest.raises(RuntimeError, match="no FlashInfer module for head_dim 128 is loaded"):
        PAGED_ATTENTION.overload("flashinfer")(*args)


@pytest.mark.parametrize("content", [b"", b"\x7fELF, or so it says"])
def test_a_file_that_is_no_module_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "module.so"
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match=f"the FlashInfer module {path} does not load"):
        flashinfer.load_module(128, path)


def test_a_library_without_the_entry_point_is_no_module() -> None:
    libc = ctypes.util.find_library("c")
    assert libc is not None
    with pytest.raises(RuntimeError, match="does not load"):
        flashinfer.load_module(128, Path(libc))


@pytest.fixture(scope="module", params=[64, 128])
def head_dim(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[int]:
    """The head_dim of a module that is built here and loaded."""
    if importlib.util.find_spec("flashinfer") is None or shutil.which("nvcc") is None:
        pytest.skip("flashinfer-python and nvcc build the module, and are not both here")
    if not load_cuda_library():
        pytest.skip("needs csrc")
    from fusewright.compiler.emit.flashinfer_modules import build_module

    dim = int(request.param)
    path = tmp_path_factory.mktemp("flashinfer") / "module.so"
    path.write_bytes(build_module(dim))
    flashinfer.load_module(dim, path)
    yield dim


BATCHES = {
    "prefill": [(300, 300)],
    "chunks": [(70, 300), (29, 700)],
    "mixed": [(1, 40), (23, 23), (1, 1), (5, 150), (1, 0), (2, 64), (500, 900)],
    "skipped": [(0, 0), (3, 3), (0, 0), (2, 2), (4, 0)],
    "tile edges": [(97, 97), (96, 96), (128, 128), (129, 129), (193, 193), (192, 384)],
    "one prefill among decodes": [(1, 64)] * 40 + [(2, 50)] + [(1, 9)] * 40,
    "decodes": [(1, 64), (1, 700)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("page", [8, 16, 128])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (7, 1)], ids=str)
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_it_matches_the_reference(
    head_dim: int,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    page: int,
    device: torch.device,
    fw_seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_attention_flashinfer, "FEWEST_TOKENS", 2)
    gen = torch.Generator(device).manual_seed(fw_seed)
    for padding in (0, 3):
        args = batch(
            torch.bfloat16, device, gen, lengths, (*heads, head_dim), page, padding=padding
        )
        tolerance = PAGED_ATTENTION.tolerances[torch.bfloat16]
        run = PAGED_ATTENTION.overload("flashinfer")
        check_case(PAGED_ATTENTION, run, Case(f"--fw-seed={fw_seed}", args), tolerance)


@pytest.mark.gpu
def test_one_graph_serves_any_lengths(head_dim: int, device: torch.device, fw_seed: int) -> None:
    """What is captured for one batch is replayed over others of as many tokens and sequences."""
    gen, rng = torch.Generator(device).manual_seed(fw_seed), random.Random(fw_seed)
    run = PAGED_ATTENTION.overload("flashinfer")
    most = [(256, 700), (1, 700), (130, 700), (1, 700), (3, 700)]
    static = batch(torch.bfloat16, device, gen, most, (8, 2, head_dim), 16)
    run(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*static)
    for _ in range(5):
        queries = [1, 1, 2, rng.randrange(1, 200)]
        queries.append(sum(n for n, _ in most) - sum(queries))
        rng.shuffle(queries)
        lengths = [(n, rng.randrange(n, 701)) for n in queries]
        fresh = batch(torch.bfloat16, device, gen, lengths, (8, 2, head_dim), 16)
        blocks = len(fresh[1])
        static[1][:blocks].copy_(fresh[1])
        static[2].fill_(1 << 30)
        static[2][:, : fresh[2].shape[1]].copy_(fresh[2])
        for i in (0, 3, 4):
            static[i].copy_(fresh[i])
        want = torch.full_like(static[5], 7.0)
        PAGED_ATTENTION.overload("")(*static[:5], want, *static[6:])
        static[5].fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(static[5], want, atol=1e-2, rtol=1.6e-2)
