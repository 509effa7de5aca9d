"""What Inductor gets has the strides of eager mode, whatever strides its decompositions have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusewright.compiler.dynamo_backend import fusewright
from tests.compiler.tiny_transformers import fresh_dynamo

fresh = pytest.fixture(autouse=True)(fresh_dynamo)


def test_a_view_that_eagers_strides_permit_stays_legal_behind_a_decomposition() -> None:
    """As in attention of GPT-J: an empty cache is joined with keys, and the result is viewed."""

    def joined(cache: Tensor, k: Tensor, q: Tensor) -> Tensor:
        keys = torch.cat([cache, k.transpose(1, 2)], dim=-2)  # contiguous in eager mode
        return torch.baddbmm(q.new_zeros(8, 5, 5), q, keys.view(8, 5, 16).transpose(1, 2))

    given = torch.randn(2, 4, 0, 16), torch.randn(2, 5, 4, 16), torch.randn(8, 5, 16)
    torch.testing.assert_close(torch.compile(joined, backend=fusewright)(*given), joined(*given))
