"""Two parts are joined over the last dimension, however it is counted, and over no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusewright.passes.cuts import joined
from tests.passes.graphs import aten

SHAPES = [(4,), (4, 4), (2, 4, 4), (2, 3, 4, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=len)
@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_parts_are_joined_over_the_last_dimension(shape: tuple[int, ...], layout: str) -> None:
    num_dims = len(shape) + (layout == "pairs")
    x, y = torch.randn(shape), torch.randn(shape)
    for dim in range(-num_dims, num_dims):

        def join(x: Tensor, y: Tensor, dim: int = dim) -> Tensor:
            x, y = x + 1, y + 1
            if layout == "halves":
                return torch.cat((x, y), dim)
            return torch.stack((x, y), dim).flatten(len(shape) - 1)

        gm = aten(join, x=x, y=y)
        (output,) = gm.graph.find_nodes(op="output")
        parts = list(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor))
        found = joined(output.args[0])
        if dim % num_dims != num_dims - 1:
            assert found is None, dim
            continue
        assert found is not None, dim
        assert (found.layout, [found.first, found.second]) == (layout, parts)
