"""Generated code computes what its piece does, and says what it is."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from fusewright.compiler.emit.inductor import MAX_SIZE, check_guards, fits_32_bits, runtime_imports
from fusewright.compiler.emit.pieces import EmitError, choose_emitter, emit
from fusewright.compiler.run.runtime import load_piece
from fusewright.passes import Subgraph
from tests.compiler.pieces import HAND_KERNELS, Pieces, copied, lowered_pieces, piece_inputs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def hand(device: torch.device) -> Pieces:
    """All hand kernels, as on a GPU; under Triton's interpreter elsewhere."""
    return lowered_pieces(2, device, HAND_KERNELS)


@pytest.fixture(scope="module")
def with_head_norms(device: torch.device) -> Pieces:
    return lowered_pieces(2, device, HAND_KERNELS, qk_norm=True)


@pytest.mark.product
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
@pytest.mark.parametrize("model", ["hand", "with_head_norms"])
def test_printed_code_equals_its_graph_bit_for_bit(
    model: str, num_tokens: int, request: pytest.FixtureRequest, tmp_path: Any, fw_seed: int
) -> None:
    pieces: Pieces = request.getfixturevalue(model)
    code = emit(pieces.by_digest, tune=False, dims=pieces.dims)
    assert len(code) == 3
    for digest, piece in pieces.by_digest.items():
        assert code[digest].emitter == "direct" and not code[digest].files
        call = load_piece(code[digest].source.encode(), tmp_path / digest / "code.py")
        ours = piece_inputs(piece, pieces.dims, num_tokens, fw_seed)
        theirs = copied(ours)
        with torch.inference_mode():
            got, want = call(*ours), piece.module(*theirs)
        assert len(got) == len(want)
        # What `empty_like` made for attention to write into has no values yet.
        allocated = [n.target is torch.empty_like for n in _returned(piece)]
        for ours_out, theirs_out, is_empty in zip(got, want, allocated, strict=True):
            assert ours_out.stride() == theirs_out.stride()
            assert ours_out.shape == theirs_out.shape
            assert is_empty or torch.equal(ours_out, theirs_out)
        for ours_in, theirs_in in zip(ours, theirs, strict=True):
            assert not isinstance(ours_in, Tensor) or torch.equal(ours_in, theirs_in)


def _returned(piece: Subgraph) -> list[fx.Node]:
    (output,) = piece.module.graph.find_nodes(op="output")
    return output.args[0]  # type: ignore[return-value]


def test_printed_code_is_readable(hand: Pieces) -> None:
    code = emit(hand.by_digest, tune=False, dims=hand.dims)
    source = [piece.source for piece in code.values()][1]
    assert source.startswith('"""One piece of a model. Every op is one call')
    assert "Ops: view x 4, fw_library::chain," in source
    assert "Size inputs: num_tokens, num_blocks." in source
    assert "    arg4,  # bfloat16[1408, 256]\n" in source
    lines = source.splitlines()
    (split,) = (line for line in lines if ".split([256, 128, 128], dim=-1)" in line)
    names, _, rest = split.strip().partition(" = ")
    assert len(names.split(", ")) == 3
    assert rest.endswith(
        "# bfloat16[num_tokens, 256]; bfloat16[num_tokens, 128]; bfloat16[num_tokens, 128]"
    )
    assert lines[lines.index(split) + 1].strip() == f"del {rest.partition('.')[0]}"
    imports = [line for line in lines if line.startswith(("import", "from"))]
    assert imports == ["import torch"]


def test_printed_code_frees_what_is_dead(hand: Pieces) -> None:
    """At the return, only inputs and results have names."""
    for piece in emit(hand.by_digest, tune=False).values():
        body = piece.source.partition("):\n")[2].splitlines()
        alive: set[str] = set()
        for line in (text.strip() for text in body[:-1]):
            if line.startswith("del "):
                alive -= set(line.removeprefix("del ").split(", "))
            elif " = " in line:
                alive |= set(line.partition(" = ")[0].split(", "))
        assert body[-1].strip().startswith("return [")
        assert alive <= set(body[-1].strip().removeprefix("return [").rstrip("]").split(", "))


def test_the_choice_of_emitter_is_explained(hand: Pieces) -> None:
    for piece in hand.by_digest.values():
        assert str(choose_emitter(piece)) == "direct: opaque ops, library calls and views only"
    first, *_ = lowered_pieces(1, CPU).by_digest.values()
    choice = choose_emitter(first)
    assert choice.emitter == "inductor"
    assert choice.reason.startswith("it can fuse fw_native::embedding, fw_native::rms_norm")


def small_piece(function: Any, *shapes: tuple[int, ...]) -> Subgraph:
    """A piece of one call, on static float tensors of these shapes, shape by shape an input."""
    graph, mode = fx.Graph(), FakeTensorMode(shape_env=ShapeEnv())
    inputs = [graph.placeholder(f"arg{i}") for i in range(len(shapes))]
    with mode:
        for node, shape in zip(inputs, shapes, strict=True):
            node.meta["example_value"] = torch.empty(shape)
        result = graph.call_function(function[0], (*inputs, *function[1:]))
        result.meta["example_value"] = function[0](
            *(n.meta["example_value"] for n in inputs), *function[1:]
        )
    graph.output([result])
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Subgraph(module, tuple(inputs), (result,))


@pytest.mark.product(2)
@pytest.mark.parametrize(
    ("function", "shapes", "emitter"),
    [
        ((torch.reshape, (6,)), [(2, 3)], "direct"),
        ((torch.transpose, 0, 1), [(2, 3)], "direct"),
        ((operator.getitem, (slice(None), slice(1, None, 2))), [(4, 6)], "direct"),
        ((operator.getitem, (..., 2, None)), [(4, 6)], "direct"),
        ((torch.empty_like,), [(4, 6)], "direct"),
        ((operator.getitem, [0, 2]), [(4, 6)], "inductor"),
        ((operator.add,), [(4, 6), (6,)], "inductor"),
        ((torch.flip, (0,)), [(4, 6)], "inductor"),
    ],
)
def test_only_views_and_allocations_are_plain(
    function: Any, shapes: list[tuple[int, ...]], emitter: str, tmp_path: Any
) -> None:
    piece = small_piece(function, *shapes)
    assert choose_emitter(piece).emitter == emitter
    code = emit({"piece": piece}, tune=False)["piece"]
    folder = tmp_path / "piece"
    folder.mkdir()
    for name, content in code.files.items():
        (folder / name).write_bytes(content)
    inputs = [torch.randn(shape) for shape in shapes]
    (got,) = load_piece(code.source.encode(), folder / "code.py")(*inputs)
    (want,) = piece.module(*inputs)
    assert got.shape == want.shape and got.stride() == want.stride()
    assert function[0] is torch.empty_like or torch.equal(got, want)


def test_a_reshape_that_copies_is_not_plain() -> None:
    piece = small_piece((lambda x: x.t().reshape(6),), (2, 3))
    (node,) = piece.module.graph.find_nodes(op="call_function", target=piece.outputs[0].target)
    node.target = torch.reshape
    assert choose_emitter(piece).emitter == "inductor"


def test_an_argument_without_spelling_is_an_error() -> None:
    piece = small_piece((torch.empty_like,), (2, 3))
    piece.outputs[0].kwargs = {"generator": torch.Generator()}
    with pytest.raises(EmitError, match="of type Generator has no spelling"):
        emit({"piece": piece}, tune=False)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return inductor_ops.seed(x)", "uses inductor_ops, which .*runtime does not provide"),
        ("return extern_kernels.conv(x)", "calls extern_kernels.conv, which .* does not provide"),
        ("return torch._inductor.lowering.f(x)", "uses torch._inductor.* not there without"),
        ("return [y for y in x if y in z]", "uses z, which"),
    ],
)
def test_code_that_needs_what_the_runtime_lacks_is_an_error(body: str, message: str) -> None:
    with pytest.raises(EmitError, match=message):
        runtime_imports(f"def call(x):\n    {body}\n")


def test_code_imports_what_it_reads_and_nothing_else() -> None:
    body = (
        "k = cpp_kernel(kernel_files, 'k.so')\ndef call(x):\n    n = aten\n    return k(n, len(x))"
    )
    assert runtime_imports(body).splitlines() == [
        "import torch",
        "",
        "from fusewright.compiler.run.runtime import (",
        "    aten,",
        "    cpp_kernel,",
        ")",
    ]


def test_code_for_some_sizes_only_is_an_error() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    size = mode.from_tensor(torch.empty(37), static_shapes=False).shape[0]
    assert size * 4096 < 2**31
    check_guards(env.guards)
    assert size > 16
    with pytest.raises(EmitError, match=r"holds only if .*16.*, which it does not for 1: the"):
        check_guards(env.guards)


def test_a_count_fits_32_bits_only_if_it_does_at_the_largest_size() -> None:
    size = sympy.Symbol("s0", integer=True)
    fitting = (2**31 - 1) // MAX_SIZE
    assert fits_32_bits(size * fitting) and fits_32_bits(sympy.Integer(2**31 - 1))
    assert not fits_32_bits(size * (fitting + 1)) and not fits_32_bits(sympy.Integer(2**31))


@pytest.mark.gpu
def test_a_kernel_over_wide_rows_has_64_bit_indices(tmp_path: Any) -> None:
    """The soft cap of logits over a vocabulary of 256,000: more than 2**31 values at 8,400 rows."""
    width, rows = 256_000, 8_400
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    graph = fx.Graph()
    count, x = graph.placeholder("s0"), graph.placeholder("x")
    example = torch.empty(37, width, dtype=torch.float16, device="cuda")
    x.meta["example_value"] = mode.from_tensor(example, symbolic_context=dynamic)
    count.meta["example_value"] = x.meta["example_value"].shape[0]
    capped = graph.call_function(torch.tanh, (x,))
    with mode:
        capped.meta["example_value"] = torch.tanh(x.meta["example_value"])
    graph.output([capped])
    piece = Subgraph(fx.GraphModule(torch.nn.Module(), graph), (count, x), (capped,))
    code = emit({"cap": piece}, tune=False)["cap"]
    for name, data in code.files.items():
        (tmp_path / name).write_bytes(data)
    call = load_piece(code.source.encode(), tmp_path / "code.py")
    logits = torch.zeros(rows, width, dtype=torch.float16, device="cuda")
    logits[-1] = torch.randn(width, device="cuda")
    (got,) = call(rows, logits)
    torch.testing.assert_close(got[-1], torch.tanh(logits[-1]))
    assert not got[:-1].any()


def test_inputs_that_autograd_would_rearrange_are_an_error() -> None:
    """One tensor given twice and written to: it would be passed once."""

    def accumulate(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    piece = small_piece((accumulate,), (2, 3), (2, 3))
    x, y = piece.module.graph.find_nodes(op="placeholder")
    y.meta["example_value"] = x.meta["example_value"]
    with pytest.raises(EmitError, match="AOTAutograd changed the inputs of a piece"):
        emit({"piece": piece}, tune=False)


def test_constants_are_an_error() -> None:
    def shift(x: Tensor) -> Tensor:
        return x + torch.tensor([float(i * i) for i in range(64)])

    with pytest.raises(EmitError, match=r"a piece holds the constants .*: make them buffers"):
        emit({"piece": small_piece((shift,), (2, 64))}, tune=False)
