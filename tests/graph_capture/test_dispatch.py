"""FULL first, else PIECEWISE, else no graph; every choice is counted."""

from __future__ import annotations

import logging

import pytest

from fusewright.config import CudagraphMode, capture_sizes
from fusewright.graph_capture import Dispatch, Dispatcher, GraphKind

FULL, PIECEWISE, NONE = GraphKind.FULL, GraphKind.PIECEWISE, GraphKind.NONE


def dispatcher(mode: str, max_num_seqs: int = 20) -> Dispatcher:
    return Dispatcher(CudagraphMode(mode), capture_sizes(max_num_seqs), max_num_seqs)


def test_the_size_rule() -> None:
    sizes = capture_sizes(256)
    assert sizes[:5] == (1, 2, 4, 8, 16) and len(sizes) == 51
    assert 248 in sizes and 256 in sizes and 272 in sizes and sizes[-1] == 512
    assert capture_sizes(20) == (1, 2, 4, 8, 16, 20, 24, 32, 40)
    assert capture_sizes(1) == (1, 2)
    assert 300 in capture_sizes(300)


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        ("NONE", (NONE, 5, 5), (NONE, 5, 3)),
        ("PIECEWISE", (PIECEWISE, 8, 5), (PIECEWISE, 8, 3)),
        ("FULL_DECODE_ONLY", (FULL, 8, 8), (NONE, 5, 3)),
        ("FULL_AND_PIECEWISE", (FULL, 8, 8), (PIECEWISE, 8, 3)),
        ("FULL", (FULL, 8, 8), (FULL, 8, 20)),
    ],
)
def test_modes(
    mode: str, decode: tuple[GraphKind, int, int], mixed: tuple[GraphKind, int, int]
) -> None:
    chooser = dispatcher(mode)
    query_len = int(decode[0] is FULL)
    assert chooser.choose(5, 5, query_len=1) == Dispatch(*decode, query_len)
    assert chooser.choose(5, 3, query_len=0) == Dispatch(*mixed)


def test_a_prompt_by_itself_has_one_graph_while_it_is_short() -> None:
    chooser = dispatcher("FULL_AND_PIECEWISE", max_num_seqs=256)
    assert chooser.choose(5, 1, query_len=0) == Dispatch(FULL, 8, 1)
    assert chooser.choose(256, 1, query_len=0) == Dispatch(FULL, 256, 1)
    assert chooser.choose(257, 1, query_len=0) == Dispatch(PIECEWISE, 272, 1)
    assert (1, 1) not in chooser.prompt_sizes  # that is a decode
    for mode in ("PIECEWISE", "FULL_DECODE_ONLY", "FULL"):
        assert not dispatcher(mode).prompt_sizes


def test_beyond_the_sizes_there_is_no_graph() -> None:
    chooser = dispatcher("FULL_AND_PIECEWISE")
    assert chooser.choose(40, 7, query_len=0).kind is PIECEWISE
    assert chooser.choose(41, 7, query_len=0) == Dispatch(NONE, 41, 7)


def test_full_decode_graphs_stop_at_max_num_seqs() -> None:
    sizes = dispatcher("FULL_AND_PIECEWISE").full_sizes
    assert max(sizes) == (20, 20) and all(tokens == seqs for tokens, seqs in sizes)


def test_mixed_full_graphs_never_look_like_decode() -> None:
    chooser = dispatcher("FULL")
    mixed = [size for size in chooser.full_sizes if size[1] >= 20 and size != (20, 20)]
    assert len(mixed) == 9 and all(tokens != seqs for tokens, seqs in mixed)
    assert chooser.max_seqs == 21


def test_a_mixed_step_of_single_tokens_is_not_decode_in_full_mode() -> None:
    """20 tokens of 3 sequences must not replay the graph of 20 decodes."""
    assert dispatcher("FULL").choose(20, 3, query_len=0) == Dispatch(FULL, 20, 21)


def test_every_choice_is_counted() -> None:
    chooser = dispatcher("FULL_AND_PIECEWISE")
    for tokens, uniform in [(1, True), (3, True), (30, False), (99, False)]:
        chooser.choose(tokens, 1, query_len=int(uniform))
    chooser.choose(30, 2, query_len=0)
    mixed = {"FULL": 1, "NONE": 1, "PIECEWISE": 1}
    assert chooser.report() == {"decode": {"FULL": 2}, "mixed": mixed}


def test_steps_beyond_the_sizes_are_counted_and_said_once(said: list[logging.LogRecord]) -> None:
    made = Dispatcher(CudagraphMode.FULL_AND_PIECEWISE, (1, 2, 8), 20)
    for tokens in (8, 12, 9):
        made.choose(tokens, tokens, query_len=1)
        made.choose(tokens + 100 * (tokens > 8), 3, query_len=0)
    assert made.report_outside() == {
        "decode": {"steps": 2, "most_tokens": 12},
        "mixed": {"steps": 2, "most_tokens": 112},
    }
    decode, mixed = said
    assert decode.levelname == "WARNING" and mixed.levelname == "INFO"
    assert decode.getMessage() == (
        "a decode step of 12 tokens is beyond the largest captured size, 8, and runs without a "
        "graph, as others of its size will: add it to --cudagraph-sizes, or lower --max-num-seqs"
    )
    assert "112 tokens" in mixed.getMessage() and "--max-num-batched-tokens" in mixed.getMessage()


@pytest.mark.parametrize(("mode", "step"), [("NONE", True), ("FULL_DECODE_ONLY", False)])
def test_steps_that_the_mode_does_not_capture_are_not_outside(
    mode: str, step: bool, said: list[logging.LogRecord]
) -> None:
    made = dispatcher(mode)
    made.choose(900, 3, query_len=int(step))
    assert not made.outside and not said
