"""-O3 measures library algorithms for what no table has, within its time."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fusewright import ops
from fusewright.compiler.lowering.tune_library import (
    Measure,
    Range,
    Times,
    algorithms_of,
    fill,
    weights_of,
)
from fusewright.config.device_table import Algorithm, DeviceTable, Weight

A: Weight = ("bfloat16", 4096, 1024)
B: Weight = ("fp8 token", 512, 1024)
TABLE = DeviceTable("a.json", "a GPU", 90, 100)
ROWS = (16, 64, 128)


def entry(weight: Weight, least: int, most: int) -> Algorithm:
    return Algorithm(*weight, least, most, "0a" * 64, 10.0, 12.0)


def recording(log: list[tuple[Weight, int, int]]) -> Measure:
    def measure(at: Range) -> Times[Algorithm | None]:
        log.append((at.weight, at.least, at.most))
        return {None: 12.0, entry(at.weight, at.least, at.most): 10.0 if at.most < 128 else 11.9}

    return measure


def test_every_range_is_measured_once_and_what_gains_is_kept() -> None:
    log: list[tuple[Weight, int, int]] = []
    found = fill([A, B, A], (), recording(log), seconds=60, rows=ROWS)
    assert log == [(B, 9, 16), (A, 17, 64), (B, 17, 64), (A, 65, 128), (B, 65, 128)]
    assert algorithms_of(found) == tuple(entry(*call) for call in log if call[2] < 128)
    assert (len(found.times), found.known, found.skipped) == (5, 0, [])


def test_rows_that_csrc_serves_are_not_measured() -> None:
    log: list[tuple[Weight, int, int]] = []
    fill([A, B], (), recording(log), seconds=60, rows=ROWS, served={A: 64, B: 0}.__getitem__)
    assert log == [(B, 9, 16), (B, 17, 64), (A, 65, 128), (B, 65, 128)]


def test_what_a_table_has_is_not_measured() -> None:
    log: list[tuple[Weight, int, int]] = []
    table = replace(TABLE, algorithms=(entry(A, 17, 64),))
    found = fill([A], [table], recording(log), seconds=60, rows=ROWS)
    assert not log and not found.times and found.known == 2
    fill([A, B], [table], recording(log), seconds=60, rows=ROWS)
    assert {weight for weight, *_ in log} == {B}


def test_measuring_ends_with_its_time_and_says_what_is_left_out() -> None:
    log: list[tuple[Weight, int, int]] = []

    def clock() -> float:
        return 10.0 * len(log)

    found = fill([A, B], (), recording(log), seconds=20, rows=ROWS, clock=clock)
    assert log == [(B, 9, 16), (A, 17, 64)]
    assert len(algorithms_of(found)) == len(found.times) == 2
    assert found.to_json()["us"]["fp8 token [512, 1024] rows 9 to 16"] == [10.0, 12.0]
    assert found.to_json()["skipped"] == [
        "fp8 token [512, 1024] rows 17 to 64",
        "bfloat16 [4096, 1024] rows 65 to 128",
        "fp8 token [512, 1024] rows 65 to 128",
    ]
    assert not fill([A], (), recording(log), seconds=0, rows=ROWS).times


def test_progress_counts_the_ranges() -> None:
    seen: list[tuple[int, int]] = []
    fill(
        [A],
        (),
        recording([]),
        seconds=60,
        rows=ROWS,
        on_point=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(0, 2), (1, 2)]


def test_the_weights_of_a_graph_are_those_of_its_linear_layers() -> None:
    graph, mode = fx.Graph(), FakeTensorMode()
    fp8, bfloat16 = torch.float8_e4m3fn, torch.bfloat16

    def value(dtype: torch.dtype, *shape: int) -> fx.Node:
        node = graph.placeholder(f"value_{len(graph.nodes)}")
        with mode:
            node.meta["example_value"] = torch.empty(shape, dtype=dtype)
        return node

    def call(name: str, *args: object) -> None:
        graph.call_function(ops.BY_NAME[name].overload(), args)

    x, x_fp8 = value(bfloat16, 3, 1024), value(fp8, 3, 1024)
    for _ in range(2):
        call("linear", x, value(bfloat16, 4096, 1024), None)
    call("linear", value(torch.float32, 3, 8), value(torch.float32, 8, 8), None)
    call("rms_norm", x, value(bfloat16, 1024), 1e-5)
    for scales, scale in (((3, 1), (512, 1)), ((1, 1), (1, 1)), ((3, 8), (4, 8))):
        values = [value(torch.float32, *shape) for shape in (scales, scale)]
        call("linear", x_fp8, value(fp8, 512, 1024), None, *values, bfloat16)
    assert weights_of(graph) == [A, B, ("fp8 tensor", 512, 1024)]
