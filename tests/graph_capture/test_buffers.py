"""The static inputs lie where they were asked for, and hold the largest step."""

from __future__ import annotations

import pytest
import torch

from fusewright.graph_capture import StepBuffers

CPU = torch.device("cpu")


@pytest.mark.parametrize("max_seqs", [1, 31, 32, 33])
def test_the_largest_step_fits_whatever_its_size_is_aligned_to(max_seqs: int) -> None:
    made = StepBuffers(CPU, max_tokens=64, max_seqs=max_seqs, max_blocks=2)
    views = made.views(num_tokens=64, num_seqs=max_seqs)
    sizes = {name: len(view) for name, view in views.items()}
    assert sizes["query_start_loc"] == max_seqs + 1
    assert sizes["seq_lens"] == sizes["block_table"] == max_seqs
    assert sizes["input_ids"] == sizes["positions"] == 64
    host = made.next_host(num_tokens=64, num_seqs=max_seqs)
    assert [len(host.arrays[name]) for name in ("input_ids", "query_start_loc")] == [
        64,
        max_seqs + 1,
    ]
    assert len(host.filled(2 * max_seqs)) == host.size + 2 * max_seqs
    assert [target.shape[-1] for target in host.targets[:2]] == [64, max_seqs + 1]


def test_memory_is_on_the_device_that_was_named_and_not_on_torchs_default() -> None:
    with torch.device("meta"):
        made = StepBuffers(CPU, max_tokens=8, max_seqs=4, max_blocks=2)
    host = made.next_host(num_tokens=3, num_seqs=2)
    assert made.device == CPU and host.packed.device == CPU
    views = made.views(num_tokens=3, num_seqs=2)
    assert {tensor.device for tensor in (*views.values(), *host.targets)} == {CPU}


def test_a_step_is_written_through_the_host_and_read_through_the_device() -> None:
    """On a CPU, both are tensors over one memory."""
    made = StepBuffers(CPU, max_tokens=8, max_seqs=4, max_blocks=2)
    ring = made._host._ring
    for turn in (1, 2, 0, 1):
        packed = made.next_host(num_tokens=3, num_seqs=2).packed
        assert packed is ring[turn][1] and packed is not ring[turn][0]
        assert packed.data_ptr() == ring[turn][0].data_ptr()
