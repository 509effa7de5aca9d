"""Generated code runs where there is no compiler: no Dynamo, Inductor, Triton, no g++."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.compiler.emit.inductor import compile_piece
from fusewright.compiler.emit.pieces import PieceCode, emit
from fusewright.compiler.run import runtime
from fusewright.compiler.run.program import InputError, eager_program
from fusewright.compiler.run.runtime import load_piece
from fusewright.passes import Subgraph, fake_value
from tests.compiler.pieces import HAND_KERNELS, Pieces, copied, lowered_pieces, piece_inputs

NUM_TOKENS = (1, 2, 17, 300)

CHILD = """
import sys
from importlib.machinery import ModuleSpec

class Refuse:  # torch itself looks whether there is a Triton, which is no import
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("torch._dynamo", "torch._inductor", "triton")):
            return ModuleSpec(name, self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        raise AssertionError(f"{module.__name__} is forbidden here")

sys.meta_path.insert(0, Refuse())
from pathlib import Path
import torch
from fusewright.compiler.run.runtime import load_piece

folder = Path(sys.argv[1])
calls = {file.parent.name: load_piece(file.read_bytes(), file) for file in folder.glob("*/code.py")}
with torch.inference_mode():
    for file in folder.glob("*/*.inputs"):
        inputs = torch.load(file)
        outputs = list(calls[file.parent.name](*inputs))
        torch.save((outputs, inputs), file.with_suffix(".outputs"))
"""


def write(folder: Path, code: Mapping[str, PieceCode]) -> None:
    for digest, piece in code.items():
        (folder / digest).mkdir()
        (folder / digest / "code.py").write_text(piece.source)
        for name, content in piece.files.items():
            (folder / digest / name).write_bytes(content)


def run_without_compilers(folder: Path) -> None:
    """Runs every piece on its inputs in a process that can compile nothing."""
    empty = folder / "empty"
    empty.mkdir()
    environment = {**os.environ, "PATH": str(empty), "TORCHINDUCTOR_CACHE_DIR": str(empty)}
    command = [sys.executable, "-c", CHILD, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not [*empty.iterdir()]


def assert_same(got: list[Any], want: list[Any], skip: list[bool]) -> None:
    assert len(got) == len(want)
    for ours, theirs, is_empty in zip(got, want, skip, strict=True):
        if isinstance(ours, Tensor):
            assert ours.shape == theirs.shape and ours.stride() == theirs.stride()
            assert is_empty or torch.equal(ours, theirs)
        else:
            assert ours == theirs


def uninitialized(piece: Subgraph) -> list[bool]:
    """Which outputs are memory for attention to write into."""
    (output,) = piece.module.graph.find_nodes(op="output")
    return [node.target is torch.empty_like for node in output.args[0]]


@pytest.fixture(scope="module", params=[1, 2])
def compiled(
    request: pytest.FixtureRequest, device: torch.device
) -> tuple[Pieces, dict[str, PieceCode]]:
    # Not Triton's: its ops need the artifact's kernels, which is another test's subject.
    pieces = lowered_pieces(request.param, device, NATIVE)
    return pieces, emit(pieces.by_digest, tune=False, dims=pieces.dims)


NATIVE = dict.fromkeys(HAND_KERNELS, "native")


@pytest.mark.product
def test_pieces_run_without_compilers_as_inductor_runs_them(
    compiled: tuple[Pieces, dict[str, PieceCode]], tmp_path: Path, fw_seed: int
) -> None:
    pieces, code = compiled
    assert {piece.emitter for piece in code.values()} == {"inductor"}
    write(tmp_path, code)
    for digest, piece in pieces.by_digest.items():
        for n in NUM_TOKENS:
            inputs = piece_inputs(piece, pieces.dims, n, fw_seed)
            torch.save(inputs, tmp_path / digest / f"{n}.inputs")
    run_without_compilers(tmp_path)
    for digest, piece in pieces.by_digest.items():
        reference = inductor_callable(piece)
        for n in NUM_TOKENS:
            inputs = piece_inputs(piece, pieces.dims, n, fw_seed)
            with torch.inference_mode():
                want = list(reference(*inputs))
            got, mutated = torch.load(tmp_path / digest / f"{n}.outputs")
            assert_same(got, want, uninitialized(piece))
            assert_same(mutated, inputs, [False] * len(inputs))


def inductor_callable(piece: Subgraph) -> Any:
    """Inductor's own callable: on a CPU with AOTAutograd's wrapper; on a GPU, where tuning twice
    may end differently, of the very kernels that were stored."""
    examples = [fake_value(n) for n in piece.module.graph.find_nodes(op="placeholder")]
    if any(isinstance(v, Tensor) and v.device.type == "cuda" for v in examples):
        call = compile_piece(piece, tune=False).call
        return lambda *inputs: call(list(inputs))
    with torch.inference_mode():
        return torch._inductor.standalone_compile(
            piece.module, examples, dynamic_shapes="from_graph"
        )


def test_emission_does_not_depend_on_inductors_cache(
    compiled: tuple[Pieces, dict[str, PieceCode]],
) -> None:
    """The second time Inductor finds everything; the code is the same, byte for byte.  On a GPU
    but for what was measured: which of a kernel's configurations is fastest may end differently."""
    pieces, code = compiled
    again = emit(pieces.by_digest, tune=False, dims=pieces.dims)
    assert without_configurations(again) == without_configurations(code)


def without_configurations(code: dict[str, PieceCode]) -> dict[str, PieceCode]:
    """The pieces less their Triton kernels' launch parameters and machine code."""
    construct = re.compile(r"^\w+ = cuda_kernel\($.*?^\)$", re.MULTILINE | re.DOTALL)
    return {
        digest: replace(
            piece,
            source=construct.sub("", piece.source),
            files={n: data for n, data in piece.files.items() if not n.endswith(".cubin")},
        )
        for digest, piece in code.items()
    }


def test_generated_code_imports_torch_and_the_runtime_only(
    compiled: tuple[Pieces, dict[str, PieceCode]],
) -> None:
    for piece in compiled[1].values():
        imports = [n for n in piece.source.splitlines() if n.startswith(("import ", "from "))]
        assert imports == ["import torch", "from fusewright.compiler.run.runtime import ("]
        for word in ("inductor.", "async_compile", "benchmark", "__main__", "globals()"):
            assert word not in piece.source
        assert ",  # bfloat16[512, 256]\n" in piece.source or ",  # bfloat16[256]\n" in piece.source
        assert "empty_strided_cpu((num_tokens, " in piece.source.replace("_cuda(", "_cpu(")
        kernels = [name for name in piece.files if name.endswith((".so", ".cubin"))]
        assert kernels and all(f'"{name}"' in piece.source for name in kernels)


def test_kernels_are_read_through_the_reader(
    compiled: tuple[Pieces, dict[str, PieceCode]], tmp_path: Path
) -> None:
    digest, piece = next(iter(compiled[1].items()))
    write(tmp_path, {digest: piece})
    asked: list[str] = []

    def read(name: str) -> bytes:
        asked.append(name)
        return piece.files[name]

    path = tmp_path / digest / "code.py"
    load_piece(piece.source.encode(), path, read)
    assert asked and set(asked) <= set(piece.files)

    def refuse(name: str) -> bytes:
        raise ValueError(f"{name} was changed")

    with pytest.raises(ValueError, match="was changed"):
        load_piece(piece.source.encode(), path, refuse)


def test_a_piece_is_loaded_twice_from_two_places(
    compiled: tuple[Pieces, dict[str, PieceCode]], tmp_path: Path, fw_seed: int
) -> None:
    """An artifact may be moved while it is in use."""
    pieces, code = compiled
    digest, piece = [*pieces.by_digest.items()][-1]
    outputs = []
    for place in ("first", "second"):
        (tmp_path / place).mkdir()
        write(tmp_path / place, {digest: code[digest]})
        path = tmp_path / place / digest / "code.py"
        call = load_piece(code[digest].source.encode(), path)
        with torch.inference_mode():
            outputs.append(call(*piece_inputs(piece, pieces.dims, 5, fw_seed)))
    assert_same(list(outputs[0]), list(outputs[1]), uninitialized(piece))


def test_errors_in_generated_code_name_its_file(tmp_path: Path) -> None:
    path = tmp_path / "abc" / "code.py"
    call = load_piece(b"def call(x):\n    return x.nothing\n", path)
    with pytest.raises(AttributeError) as caught:
        call(torch.zeros(1))
    assert Path(caught.traceback[-1].path) == path and caught.traceback[-1].lineno == 1


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("size", [0, 1, 4])
def test_misaligned_tensors_are_copied_with_their_strides(offset: int, size: int) -> None:
    memory = torch.arange(100.0)
    x = memory[offset:].as_strided((size, 3), (7, 2))
    got = runtime.copy_if_misaligned(x)
    assert torch.equal(got, x) and got.stride() == x.stride()
    assert got.data_ptr() % 16 == 0
    assert (got is x) == (x.data_ptr() % 16 == 0)


def test_misaligned_outputs_are_refused() -> None:
    memory = torch.zeros(9)
    runtime.require_aligned(memory, "arg6_1")
    with pytest.raises(ValueError, match=r"arg6_1: starts at address 0x.*, expected a multiple of"):
        runtime.require_aligned(memory[1:], "arg6_1")


@pytest.mark.parametrize("rows", ["one", "expanded", "all"])
def test_bias_addmm_adds_the_bias_to_every_row(rows: str) -> None:
    a, b = torch.randn(5, 4), torch.randn(4, 3)
    bias = {
        "one": torch.randn(1, 3),
        "expanded": torch.randn(3).expand(5, 3),
        "all": torch.randn(5, 3),
    }[rows]
    out = torch.empty(5, 3)
    runtime.extern_kernels.bias_addmm(bias, a, b, out=out, alpha=1, beta=1)
    assert torch.allclose(out, bias + a @ b, atol=1e-5)


@pytest.mark.gpu
def test_misaligned_inputs_of_gpu_kernels_are_copied(
    device: torch.device, tmp_path: Path, fw_seed: int
) -> None:
    """Its kernels read 16 bytes at a time where the compiler could assume that."""
    pieces = lowered_pieces(1, device, NATIVE)
    digest, piece = [*pieces.by_digest.items()][-1]
    write(tmp_path, emit({digest: piece}, tune=False))
    path = tmp_path / digest / "code.py"
    call = load_piece(path.read_bytes(), path)
    inputs = piece_inputs(piece, pieces.dims, 5, fw_seed)
    shifted = copied(inputs)
    for index, value in enumerate(shifted):
        if isinstance(value, Tensor):
            memory = value.new_empty(value.numel() + 1)
            shifted[index] = memory[1:].view(value.shape).copy_(value)
    with torch.inference_mode():
        assert_same(list(call(*shifted)), list(call(*inputs)), uninitialized(piece))


@pytest.mark.gpu
def test_tuned_kernels_are_stored_as_tuned(
    device: torch.device, tmp_path: Path, fw_seed: int
) -> None:
    pieces = lowered_pieces(1, device, NATIVE)
    digest, piece = [*pieces.by_digest.items()][-1]
    write(tmp_path, emit({digest: piece}, tune=True))
    path = tmp_path / digest / "code.py"
    call = load_piece(path.read_bytes(), path)
    reference = compile_piece(piece, tune=True).call
    inputs = piece_inputs(piece, pieces.dims, 300, fw_seed)
    with torch.inference_mode():
        got, want = list(call(*inputs)), list(reference(list(inputs)))
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours.float(), theirs.float(), atol=2e-2, rtol=2e-2)


def test_a_weight_that_is_never_bound_is_named() -> None:
    names = ["weights/a", "weights/b", "x"]
    program = eager_program(torch.nn.Identity(), lambda values: (values["x"],), names)
    program.bind({"weights/a": torch.ones(1)})
    with pytest.raises(InputError, match=r"without a value: weights/b$"):
        program.check_bound("weights/")
