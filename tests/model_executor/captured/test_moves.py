"""The library's conversions, run on tensors without data, say which copies they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import core_model_loading as library

from fusewright.model_executor.captured.moves import copy_moves, narrowed
from fusewright.model_executor.captured.stored_moves import dump_moves, load_moves
from fusewright.model_executor.captured.traced import InexpressibleError, TracedTensor, traced
from fusewright.model_executor.checkpoint import TensorInfo

DTYPE = torch.bfloat16


def test_stored_moves_of_another_checkpoint_are_planned_anew(tmp_path: Path) -> None:
    info = TensorInfo(tmp_path / "a.safetensors", "a", (2, 3), "F32")
    moves = list(traced(info, DTYPE).moves)
    text = dump_moves(moves, {"a": info})
    moved = TensorInfo(tmp_path / "b.safetensors", "a", (2, 3), "F32")
    assert load_moves(text, {"a": moved}) == [moves[0]._replace(source=moved)]
    assert load_moves(text, {"a": TensorInfo(info.file, "a", (3, 2), "F32")}) is None
    assert load_moves(text[:-5], {"a": info}) is None
    assert load_moves(json.dumps({}), {"a": info}) is None


CONFIG = transformers.LlamaConfig(num_attention_heads=2)
CHAINS: dict[str, tuple[list[Any], list[tuple[int, ...]], int]] = {
    # Operations, shapes of the sources, number of targets.
    "chunk": ([library.Chunk(1)], [(4, 6)], 3),
    "concatenate": ([library.Concatenate(1)], [(4, 1), (4, 3), (4, 2)], 1),
    "interleave": ([library.Interleave(1)], [(3, 8, 2)], 1),
    "interleave and back": (
        [library.Interleave(0), library.Interleave(0, inverse=True)],
        [(8, 2)],
        1,
    ),
    "interleave, chunk": ([library.Interleave(0), library.Chunk(0)], [(12, 5)], 2),
    "transpose": ([library.Transpose(1, 2)], [(2, 3, 4)], 1),
    "rope": ([library.PermuteForRope()], [(12, 5)], 1),
    "rope of a bias, back": ([library.PermuteForRope(inverse=True)], [(12,)], 1),
    "chunk, rope": ([library.Chunk(0), library.PermuteForRope()], [(36, 5)], 3),
    "one list": ([library.SplitModulelist(0)], [(3, 4, 1)], 1),
    "conv": ([library.Conv3dToLinear(3, (2, 2, 2))], [(4, 3, 2, 2, 2)], 1),
    "conv back": ([library.LinearToConv3d(3, (2, 2, 2))], [(4, 24)], 1),
    "experts of two kinds": ([library.ErnieFuseAndSplitTextVisionExperts()], [(2, 3), (2, 3)], 2),
}


def run_chain(operations: list[Any], sources: list[Any], targets: int) -> dict[str, Any]:
    names = [f"s{number}" for number in range(len(sources))]
    tensors: Any = {name: [source] for name, source in zip(names, sources, strict=True)}
    if operations[0].supports_many_to_many:
        tensors = {name: [source] * 4 for name, (source,) in tensors.items()}
    out = [f"t{number}.*" for number in range(targets)]
    for operation in operations:
        tensors = operation.convert(
            tensors, source_patterns=names, target_patterns=out, config=CONFIG, model=None
        )
    return {name: t[0] if isinstance(t, list) else t for name, t in tensors.items()}


@pytest.mark.parametrize("chain", CHAINS)
def test_operations_of_the_library_become_moves(chain: str, tmp_path: Path) -> None:
    operations, shapes, targets = CHAINS[chain]
    file = tmp_path / "x.safetensors"
    sources = {f"s{n}": torch.randn(shape) for n, shape in enumerate(shapes)}
    save_file(sources, file)
    infos = [TensorInfo(file, name, tuple(t.shape), "F32") for name, t in sources.items()]
    expected = run_chain(operations, list(sources.values()), targets)
    results = run_chain(operations, [traced(info, DTYPE) for info in infos], targets)
    assert list(results) == list(expected)
    for name, result in results.items():
        assert isinstance(result, TracedTensor)
        assert result.shape == expected[name].shape
        filled = torch.full(result.shape, torch.nan)
        copy_moves([move._replace(parameter="p") for move in result.moves], {"p": filled})
        assert torch.equal(filled, expected[name])
        for dim, size in enumerate(result.shape):  # every part that a rank could hold
            for start in range(size):
                for length in range(1, size - start + 1):
                    part = torch.full_like(filled.narrow(dim, start, length), torch.nan)
                    own = (p for m in result.moves for p in narrowed(m, dim, start, length))
                    copy_moves([move._replace(parameter="p") for move in own], {"p": part})
                    assert torch.equal(part, expected[name].narrow(dim, start, length))


def test_reshapes_across_rows_are_refused(tmp_path: Path) -> None:
    tensor = traced(TensorInfo(tmp_path, "a", (4, 6), "F32"), DTYPE)
    assert tensor.view(2, 2, 3, 2).reshape(4, 6).moves == tensor.moves
    with pytest.raises(InexpressibleError, match="unevenly"):
        tensor.view(3, 8)
    with pytest.raises(InexpressibleError, match="across"):
        torch.cat([tensor[:1, :1], tensor[1:2, :3], tensor[2:3, :2]], 1).view(2, 3)
