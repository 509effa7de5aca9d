"""Programmatic launches: kernels that start early see what a slow one ahead of them writes late.

``test_triton_compile.py`` shows that the code of each waits; here it runs on a GPU.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fusewright.ops import (
    ALL_OPS,
    BY_NAME,
    Implementation,
    Launch,
    SemanticOp,
    load_cuda_library,
)
from fusewright.ops.attention.paged_attention_cases import batch
from fusewright.ops.core.driver import Function
from fusewright.ops.triton_kernels.dependent import start_next_and_wait, wait_for_previous

pytestmark = pytest.mark.gpu

WITH_TRITON = [
    op.name
    for op in ALL_OPS
    if any(i.launches for i in op.implementations)
    and "group_name" not in str(op.overload()._schema)  # kernels of norms, behind a library's sum
]
CACHE, TABLE, OUT = 1, 2, 5  # arguments of paged_attention
NANOSECONDS = 100_000  # more than the host takes to launch two kernels


@triton.jit
def slow_copy_kernel(
    from_ptr, to_ptr, n, nanoseconds, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr
):
    """Lets the next kernel start, then takes its time."""
    start_next_and_wait(PROGRAMMATIC)
    begin = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - begin < nanoseconds:
        pass
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + at, tl.load(from_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def copy_kernel(from_ptr, to_ptr, n, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    wait_for_previous(PROGRAMMATIC)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + at, tl.load(from_ptr + at, mask=at < n), mask=at < n)


@pytest.fixture(autouse=True)
def kernels_of_this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch names its kernel by module and function."""
    monkeypatch.setitem(
        sys.modules, "fusewright.ops.triton_kernels.test_programmatic", sys.modules[__name__]
    )


def copy(source: Tensor, target: Tensor, nanoseconds: int = 0) -> Launch:
    """A launch that copies between contiguous tensors of equal size, as bytes."""
    source, target = source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8)
    args: dict[str, Any] = {"from_ptr": source, "to_ptr": target, "n": source.numel()}
    name = "copy_kernel"
    if nanoseconds:
        name, args = f"slow_{name}", args | {"nanoseconds": nanoseconds}
    return Launch(
        f"test_programmatic:{name}",
        (-(-source.numel() // 1024),),
        args,
        {"BLOCK": 1024},
        dynamic=("n",),
    )


def replayed(call: Callable[[], Any]) -> Callable[[], Any]:
    """``call`` as a graph, whose results lie at one place."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def contents(*values: Any) -> list[Tensor]:
    """The bytes of all tensors in ``values``: a NaN equals itself."""
    found = [t for v in values for t in (v if isinstance(v, tuple | list) else (v,))]
    return [t.flatten().view(torch.uint8).clone() for t in found if torch.is_tensor(t)]


def cloned(args: tuple[Any, ...]) -> list[Any]:
    return [a.clone() if torch.is_tensor(a) else a for a in args]


def moved(t: Tensor) -> Tensor:
    """The same values, each one place on."""
    plain = t.view(torch.uint8) if t.itemsize == 1 else t
    return plain.flatten().roll(1).view(t.dtype).view(t.shape)


def implementation(op: SemanticOp) -> Implementation:
    """The one whose kernels are Triton's, else the one that runs some around the library's."""
    named = {impl.name: impl for impl in op.implementations}
    return named.get("triton") or named["library"]


def cases(name: str) -> Iterator[tuple[tuple[Any, ...], int]]:
    """(arguments, index of one to arrive late): such as are not all one value."""
    op = BY_NAME[name]
    dtype = torch.bfloat16 if torch.bfloat16 in op.dtypes else op.dtypes[0]
    generator = torch.Generator("cuda").manual_seed(0)
    for case in op.cases(dtype, torch.device("cuda"), generator):
        if implementation(op).supports(op.describe(case.args, sm=90)):
            continue
        for i, a in enumerate(case.args):
            late = torch.is_tensor(a) and a.is_contiguous() and a.data_ptr() % 16 == 0
            if late and contents(a) and not torch.equal(*contents(a, moved(a))):
                yield case.args, i


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", WITH_TRITON)
def test_every_op_waits_for_a_slow_kernel_ahead(name: str, captured: bool) -> None:
    """An input's values arrive late, from a kernel two places ahead; until then they are others."""
    run = BY_NAME[name].overload(implementation(BY_NAME[name]).name)
    idle = [torch.zeros(64, dtype=torch.uint8, device="cuda") for _ in range(2)]
    every = [*cases(name)]
    chosen = every[:: max(len(every) // 12, 1)]  # of linear also FP8 layers, and gated ones
    assert chosen
    for args, index in chosen:
        calm, late = cloned(args), cloned(args)
        want = contents(run(*calm), calm)

        def chain(args: Any = args, index: int = index, late: list[Any] = late) -> Any:
            copy(args[index], late[index], NANOSECONDS).run()
            copy(*idle).run()
            return run(*late)

        call = replayed(chain) if captured else chain
        for _ in range(3):
            for i, value in enumerate(args):
                if torch.is_tensor(value):
                    late[i].copy_(moved(value) if i == index else value)
            assert all(map(torch.equal, contents(call(), late), want)), f"{name}: argument {index}"


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 300)],
        [(1, 17)],
        [(1, 16), (1, 17), (1, 40), (1, 0), (1, 200)],
        [(1, 64), (1, 65)] + [(1, 33)] * 38,
        [(3, 40), (1, 41), (1, 200)],
    ],
    ids=str,
)
def test_decode_attention_sees_the_slots_that_are_stored_late(
    lengths: list[tuple[int, int]], block_size: int
) -> None:
    """It reads older slots before the kernel ahead has finished.  The second sequence goes on where
    the first one ends: it reads what the first one's queries store."""
    if not load_cuda_library():
        pytest.skip("needs csrc")
    generator = torch.Generator("cuda").manual_seed(0)
    args = [
        *batch(torch.bfloat16, torch.device("cuda"), generator, lengths, (4, 1, 64), block_size)
    ]
    whole = torch.randn(args[CACHE].shape, generator=generator, device="cuda").bfloat16()
    args[CACHE], table = whole, args[TABLE]
    if len(lengths) > 1:
        shared = -(-lengths[0][1] // block_size)
        table[1, :shared] = table[0, :shared]
    newest = [(s, n - i - 1) for s, (queries, n) in enumerate(lengths) for i in range(queries) if n]
    late = cloned(tuple(args))
    attention = BY_NAME["paged_attention"].overload("cuda")
    want = args[OUT]
    BY_NAME["paged_attention"].overload()(*args)

    def chain() -> None:
        copy(whole, late[CACHE], NANOSECONDS).run()
        attention(*late)

    replay = replayed(chain)
    for _ in range(5):
        late[CACHE].copy_(whole)
        for seq, position in newest:
            late[CACHE][table[seq, position // block_size], :, position % block_size] = float("nan")
        late[OUT].fill_(7.0)
        torch.cuda.synchronize()
        replay()
        torch.testing.assert_close(late[OUT], want, atol=1e-2, rtol=1.6e-2)


def test_a_kernel_that_does_not_wait_is_seen_to_read_early() -> None:
    """So the test above sees a missing wait, and launches overlap inside a graph."""
    from fusewright.ops.core._triton_compile import compile_variant

    source, middle, target = (torch.full((4096,), i, device="cuda") for i in (1.0, 2.0, 3.0))
    launch = copy(middle, target)
    waiting = launch.variant()
    heedless = compile_variant(dataclasses.replace(waiting, programmatic=False), 90)
    function = Function(waiting, heedless, torch.cuda.current_device())
    values = [middle.data_ptr(), target.data_ptr(), middle.nbytes]

    def chain() -> None:
        copy(source, middle, NANOSECONDS).run()
        function.launch(launch.grid, torch.cuda.current_stream().cuda_stream, values)

    replay = replayed(chain)
    middle.fill_(2.0)
    replay()
    assert middle.eq(1.0).all() and target.eq(2.0).any()
