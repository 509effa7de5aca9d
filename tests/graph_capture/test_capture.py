"""Capture and replay over a small program, on the recording backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.compiler.run.program import Program, Step
from fusewright.config import (
    FEED,
    NO_SLOT,
    STEP,
    CudagraphMode,
    Per,
    StepField,
    StepSchema,
)
from fusewright.graph_capture import (
    CaptureMemoryError,
    Dispatch,
    Dispatcher,
    GraphKind,
    Graphs,
    HostRing,
    MemoryReport,
    RecordingGraphs,
    StepBuffers,
)
from fusewright.graph_capture.capture import _BYTES_A_GRAPH, _BYTES_A_STEP

MAX_TOKENS, MAX_SEQS = 8, 4
NAMES = ("input_ids", "positions", "seq_lens", "hidden", "mixed", "tail", "output")
SLOT = {name: i for i, name in enumerate(NAMES)}


def program(log: list[str]) -> Program:
    """Per-token, per-sequence, per-token, per-sequence: as pieces, attention and the head are."""

    def step(name: str, output: str, per_token: bool, *inputs: str) -> Step:
        def call(env: list[Any]) -> Sequence[Any]:
            log.append(name)
            return [sum(env[SLOT[i]].float().sum() for i in inputs) + torch.zeros(2)]

        return Step(name, call, (SLOT[output],), (), per_token)

    steps = [
        step("first", "hidden", True, "input_ids"),
        step("attention", "mixed", False, "hidden", "seq_lens"),
        step("last", "tail", True, "hidden", "positions"),
        step("head", "output", False, "tail", "mixed"),
    ]
    names = ("input_ids", "positions", "seq_lens")
    return Program(steps, SLOT, dict.fromkeys(names), SLOT["output"])


def buffers() -> StepBuffers:
    return StepBuffers(torch.device("cpu"), max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS, max_blocks=2)


def dispatcher(mode: str, sizes: tuple[int, ...] = (2, 4, 8)) -> Dispatcher:
    return Dispatcher(CudagraphMode(mode), sizes, MAX_SEQS)


def captured(mode: str, log: list[str]) -> tuple[Graphs, StepBuffers, RecordingGraphs]:
    made, backend = buffers(), RecordingGraphs()
    graphs = Graphs(program(log), made, dispatcher(mode), backend)
    while graphs.capture_next():
        pass
    log.clear()
    return graphs, made, backend


def fill(made: StepBuffers, num_tokens: int, num_seqs: int) -> dict[str, Tensor]:
    views = made.views(num_tokens=num_tokens, num_seqs=num_seqs)
    for name, value in (("input_ids", 3), ("positions", 5), ("seq_lens", 7)):
        views[name].fill_(value)
    return views


def test_piecewise_runs_what_is_per_sequence_between_the_graphs() -> None:
    log: list[str] = []
    graphs, made, backend = captured("PIECEWISE", log)
    assert graphs.num_captured == 3 and backend.captures == 6
    views = fill(made, 4, 3)
    hidden = 4 * 3  # twice, as is every value
    mixed, tail = 2 * hidden + 3 * 7, 2 * hidden + 4 * 5
    want = torch.full((2,), float(2 * tail + 2 * mixed))
    assert torch.equal(graphs.replay_piecewise(4, views), want)
    assert log == ["first", "attention", "last", "head"] and backend.replays == 2


def test_a_size_that_a_piece_computes_is_a_number_of_its_graph() -> None:
    """The router of a captured model gives its number of choices to the next piece."""
    steps = [
        Step("first", lambda env: [2 * env[0].shape[0]], (3,), (), per_token=True),
        Step("head", lambda env: [torch.full((2,), float(env[3]))], (6,), (), per_token=False),
    ]
    names = ("input_ids", "positions", "seq_lens")
    sized = Program(steps, SLOT, dict.fromkeys(names), SLOT["output"])
    made = buffers()
    graphs = Graphs(sized, made, dispatcher("PIECEWISE"), RecordingGraphs())
    while graphs.capture_next():
        pass
    for num_tokens in (4, 8, 4):
        want = torch.full((2,), 2.0 * num_tokens)
        assert torch.equal(graphs.replay_piecewise(num_tokens, fill(made, num_tokens, 2)), want)


def test_what_ran_between_the_graphs_is_not_kept() -> None:
    graphs, made, _ = captured("PIECEWISE", [])
    graphs.replay_piecewise(4, fill(made, 4, 3))
    env = graphs._piecewise[4].env
    assert env[SLOT["output"]] is None and env[SLOT["mixed"]] is None
    assert env[SLOT["hidden"]] is not None
    first = graphs.replay_piecewise(4, fill(made, 4, 3))
    assert torch.equal(graphs.replay_piecewise(4, fill(made, 4, 2)), first - 14)


def test_a_full_graph_is_the_whole_program() -> None:
    log: list[str] = []
    graphs, made, backend = captured("FULL_AND_PIECEWISE", log)
    assert graphs.num_captured == 8 and backend.captures == 11
    for num_tokens, num_seqs in ((4, 4), (8, 1)):  # decode; a prompt by itself
        want = program([]).run(fill(made, num_tokens, num_seqs))
        replays = backend.replays
        assert torch.equal(graphs.replay_full(num_tokens, num_seqs), want)
        assert backend.replays == replays + 1


def test_each_distinct_step_warms_up_once_a_size() -> None:
    """Two layers of one piece: captured twice, run once before."""
    log: list[str] = []
    twice = program(log)
    first, attention, *rest = twice.steps
    layers = [first, attention, first, attention, *rest]
    names = ("input_ids", "positions", "seq_lens")
    made = Program(layers, SLOT, dict.fromkeys(names), SLOT["output"])
    graphs = Graphs(made, buffers(), dispatcher("PIECEWISE", (2,)), RecordingGraphs())
    assert graphs.capture_next() and not graphs.capture_next()
    assert log == ["first", "attention", "last", "head", "first", "first", "last"]


def test_largest_sizes_are_captured_first() -> None:
    sizes: list[int] = []

    class Watch(StepBuffers):
        def dummy(self, *, num_tokens: int, num_seqs: int) -> dict[str, Tensor]:
            sizes.append(num_tokens)
            return super().dummy(num_tokens=num_tokens, num_seqs=num_seqs)

    made = Watch(torch.device("cpu"), max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS, max_blocks=2)
    wanted = dispatcher("FULL_AND_PIECEWISE")
    graphs = Graphs(program([]), made, wanted, RecordingGraphs())
    graphs.capture_largest()  # one of each kind: what the others share memory with
    assert sizes == [4, 8] and graphs.num_pending == 6
    while graphs.capture_next():
        pass
    assert sizes == [4, 8, 2, 4, 2, 8, 4, 2] and graphs.num_pending == 0  # prompts at the end


def test_a_capture_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = RecordingGraphs()
    graphs = Graphs(program([]), buffers(), dispatcher("FULL_DECODE_ONLY"), backend)
    pending, capture = graphs.num_pending, backend.capture

    def fail(fn: Any) -> Any:
        fn()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(backend, "capture", fail)
    dispatch = Dispatch(GraphKind.FULL, 4, 4)
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.ensure(dispatch)
    assert graphs.num_pending == pending and graphs.num_captured == 0
    monkeypatch.setattr(backend, "capture", capture)
    graphs.ensure(dispatch)
    assert graphs.num_pending == pending - 1
    assert graphs.replay_full(4, 4) is not None


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be …"),  # instantiation
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["torch", "CUDA", "cuBLAS"])
@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_graph_without_room_says_so(
    monkeypatch: pytest.MonkeyPatch, error: Exception, when: str
) -> None:
    """In the capture, or in the step that runs ahead of it."""
    log: list[str] = []
    backend = RecordingGraphs()
    graphs = Graphs(program(log), buffers(), dispatcher("FULL_AND_PIECEWISE"), backend)

    class Full(list[str]):
        def append(self, name: str) -> None:
            super().append(name)
            if len(self) == (1 if when == "before" else 5):
                raise error

    full = Full()
    monkeypatch.setattr(graphs, "program", program(full))
    with pytest.raises(CaptureMemoryError) as refused:
        graphs.ensure(Dispatch(GraphKind.FULL, 4, 4))
    assert len(full) == (1 if when == "before" else 5)
    assert str(refused.value) == (
        "FULL graph of 4 tokens: out of memory while it was captured; capture fewer or smaller "
        "sizes (--cudagraph-sizes), or lower --gpu-memory-utilization"
    )
    assert refused.value.__cause__ is error
    graphs.ensure(Dispatch(GraphKind.FULL, 4, 4))
    assert graphs.num_captured == 1


def test_the_largest_are_captured_anew_over_other_tensors() -> None:
    """As a sample is, before the size of the KV cache is known."""
    log: list[str] = []
    made, backend = buffers(), RecordingGraphs()
    graphs = Graphs(program(log), made, dispatcher("FULL_AND_PIECEWISE"), backend)
    graphs.capture_largest()
    sampled, predicted = graphs.num_captured, graphs.predict_bytes()
    assert backend.captures == 1 + 2  # a piecewise graph has two parts
    graphs.capture_largest()
    assert graphs.num_captured == sampled == 2 and backend.captures == 6
    assert graphs.num_pending == 6 and graphs.predict_bytes() == predicted
    # Five FULL graphs of four steps; three piecewise ones of two parts.
    assert predicted == 5 * (_BYTES_A_GRAPH + 4 * _BYTES_A_STEP) + 3 * 2 * _BYTES_A_GRAPH


def test_a_step_waits_for_its_own_graph_only() -> None:
    backend = RecordingGraphs()
    graphs = Graphs(program([]), buffers(), dispatcher("FULL_AND_PIECEWISE"), backend)
    graphs.capture_largest()
    before = backend.captures
    missing = Dispatch(GraphKind.FULL, 2, 2)
    graphs.ensure(missing)
    assert backend.captures == before + 1 and graphs.num_pending == 5
    graphs.ensure(missing)
    graphs.ensure(Dispatch(GraphKind.NONE, 7, 3))
    graphs.ensure(Dispatch(GraphKind.FULL, 4, 4))
    assert backend.captures == before + 1
    made = Dispatch(GraphKind.PIECEWISE, 4, 3)  # one graph for any number of sequences
    graphs.ensure(made)
    assert graphs.num_pending == 4 and backend.captures == before + 3


def test_nothing_is_captured_without_a_backend() -> None:
    graphs = Graphs(program([]), buffers(), dispatcher("FULL_AND_PIECEWISE"), None)
    graphs.capture_largest()
    graphs.ensure(Dispatch(GraphKind.NONE, 2, 2))
    assert not graphs.capture_next() and graphs.num_captured == 0


def test_the_account_of_memory_has_each_purpose_once_and_begins_at_nothing() -> None:
    assert not any(MemoryReport().to_json().values())
    report = MemoryReport(1, 2, 4, 8, 16, graphs_predicted=32, driver=64)
    assert report.to_json() == {**vars(report), "accounted": 1 + 2 + 4 + 8 + 16}


@pytest.mark.parametrize(("num_tokens", "num_seqs"), [(8, 4), (5, 3), (1, 1)])
def test_a_dummy_step_stores_nothing_and_is_well_formed(num_tokens: int, num_seqs: int) -> None:
    views = buffers().dummy(num_tokens=num_tokens, num_seqs=num_seqs)
    starts = views["query_start_loc"]
    assert starts[0] == 0 and starts[-1] == num_tokens and bool((starts.diff() > 0).all())
    assert torch.equal(views["seq_lens"], starts.diff())
    assert bool((views["slot_mapping"] == -1).all())


def test_a_step_is_read_in_one_piece_of_its_own_size() -> None:
    made, sizes = buffers(), {"num_tokens": 3, "num_seqs": 2}
    host = made.next_host(**sizes)
    for first, values in enumerate(host.arrays.values()):
        values[:] = 10 * first + np.arange(len(values))
    host.cells[:4] = [80, 81, 82, 83]
    ops.write_inputs(host.filled(4), torch.zeros(100, dtype=torch.int32), *host.targets)
    views = made.views(**sizes)
    assert views["positions"].tolist() == [10, 11, 12] and views["slot_mapping"][0] == 20
    assert views["seq_lens"].tolist() == [40, 41] and made.view("slots", 2).tolist() == [50, 51]
    assert made.view("order", 2).tolist() == [60, 61]
    assert views["query_start_loc"].tolist() == [70, 71, 72]
    assert views["block_table"].tolist() == [[80, 81], [82, 83]]
    assert made.next_host(**sizes).packed is not host.packed


def test_a_step_takes_a_field_that_is_added_to_the_schema() -> None:
    """A field of each kind beside those of ``STEP``, one of them in floating point."""
    added = (
        StepField("adapter", Per.TOKEN, padding=-1),
        StepField("temperature", Per.SEQUENCE, dtype="float32"),
        StepField("window_table", Per.TABLE),
    )
    schema = StepSchema((*added, *STEP.fields))
    made = StepBuffers(torch.device("cpu"), max_tokens=9, max_seqs=4, max_blocks=3, schema=schema)
    sizes = {"num_tokens": 3, "num_seqs": 2}
    host = made.next_host(**sizes)
    for values in host.arrays.values():
        values[:] = 0
    host.arrays[FEED][:] = [NO_SLOT, 2, NO_SLOT]
    host.arrays["adapter"][:] = [5, 6, 7]
    host.arrays["temperature"][:] = [0.5, 1.5]
    host.cells[:4] = [1, 2, 3, 4]  # of each sequence, a column of each table
    sampled = torch.tensor([0, 0, 9, 0], dtype=torch.int32)
    ops.write_inputs(host.filled(4), sampled, *host.targets)
    views = made.views(**sizes)
    assert views["input_ids"].tolist() == [0, 9, 0]
    assert views["adapter"].tolist() == [5, 6, 7]
    assert views["temperature"].tolist() == [0.5, 1.5]
    assert views["window_table"][:, 0].tolist() == [1, 3]
    assert views["block_table"][:, 0].tolist() == [2, 4]


def test_steps_run_before_they_are_captured_unless_they_have_at_this_size() -> None:
    log: list[str] = []
    graphs = Graphs(program(log), buffers(), dispatcher("FULL_AND_PIECEWISE"), RecordingGraphs())
    whole, per_token = ["first", "attention", "last", "head"], ["first", "last"]

    def capture(kind: GraphKind, tokens: int) -> list[str]:
        log.clear()
        graphs.ensure(Dispatch(kind, tokens, tokens))
        return log

    assert capture(GraphKind.FULL, 4) == whole + whole
    assert capture(GraphKind.PIECEWISE, 4) == per_token
    assert capture(GraphKind.PIECEWISE, 8) == whole + per_token
    assert capture(GraphKind.PIECEWISE, 2) == whole + per_token
    assert capture(GraphKind.FULL, 2) == whole + whole


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_host_and_the_device_see_the_same_memory(device: str) -> None:
    ring = HostRing(torch.device(device), 6)
    turns = [ring.take() for _ in range(4)]
    assert len({host.data_ptr() for host, _ in turns}) == 3 and turns[3][0] is turns[0][0]
    for number, (host, seen) in enumerate(turns[:3]):
        host[:3] = number
        assert seen.device.type == device
        assert (seen[:3] * 2).tolist() == [2 * number] * 3
        seen[3:] = torch.arange(3, dtype=torch.int32, device=device) + number
        if device == "cuda":
            torch.cuda.synchronize()
        assert host.tolist() == [number] * 3 + [number, number + 1, number + 2]


@pytest.mark.gpu
@pytest.mark.parametrize("late", [False, True], ids=["one stream", "another stream later"])
def test_memory_given_back_with_a_step_in_flight_serves_nobody_before_its_end(late: bool) -> None:
    size, device = 12_345, torch.device("cuda")
    ring, stream = HostRing(device, size), torch.cuda.Stream()
    if late:
        ring.take()
    with torch.cuda.stream(stream):
        host, seen = ring.take()
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        seen.fill_(7)
        running = torch.cuda.Event()
        running.record()
    address = host.data_ptr()
    del ring, host, seen

    def pinned() -> list[Tensor]:
        return [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(3)]

    others = pinned()
    assert not running.query(), "the step is over: this shows nothing"
    running.synchronize()
    assert all(not other.any() for other in others), "another's memory was written"
    assert address not in {other.data_ptr() for other in others}
    assert address in {other.data_ptr() for other in pinned()}, "it never came back"
