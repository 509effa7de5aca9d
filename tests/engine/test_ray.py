"""Ray starts the ranks: a real cluster of two nodes on this machine, each with room for a rank."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.cluster_utils import Cluster

from fusewright import LLM, SamplingParams
from fusewright.config import EngineDeadError, EngineOptions, MachineError, UserError
from fusewright.engine.ranks import ray as ray_ranks
from fusewright.engine.ranks.executor import started_ranks
from fusewright.engine.ranks.link import Link
from fusewright.engine.ranks.ray import RayRanks
from fusewright.engine.worker.place import Seat, places
from tests.engine.test_rank_faults import LONG, OPTIONS, is_gone, others, rank_0_killed
from tests.serve.server_process import wait_for

RAY: dict[str, Any] = {**OPTIONS, "distributed_executor": "ray"}
PROMPTS = ["37+58=", "sort 5 3 9 1="]
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    """Two nodes, which our process finds as any user's does."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(prefix="ray-") as folder:
        patch.setenv("RAY_TMPDIR", folder)  # pytest's own are too long for sockets
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # other tests take memory beside these
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONBREAKPOINT", "0")  # Ray sets it: processes would start cold ever after
        # Ray may take long to answer, and to free what the engine before has had.
        patch.setattr(ray_ranks, "_CONNECT_S", 300.0)
        patch.setattr(ray_ranks, "_FREE_S", 300.0)
        patch.setattr(ray_ranks, "_GREET_S", 300.0)
        made = Cluster(initialize_head=True, head_node_args=NODE)
        try:
            made.add_node(**NODE)
            yield made
        finally:
            made.shutdown()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    return [
        tuple(output.outputs[0].token_ids)
        for output in llm.generate(PROMPTS, params, use_tqdm=False)
    ]


@pytest.mark.parametrize("level", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_ranks_on_two_nodes_answer_as_one_rank(level: int) -> None:
    """Above level 0 each node finds or compiles the program for itself."""
    with LLM("abacus", **{**OPTIONS, "tensor_parallel_size": 1}) as llm:
        expected = tokens(llm)
    with LLM("abacus", **{**RAY, "optimization_level": level}) as llm:
        (pid,) = others(llm)
        actor = parent(pid)
        assert actor != os.getpid()
        assert tokens(llm) == expected
    wait_for(lambda: is_gone(pid) and is_gone(actor))  # on a busy machine Ray takes its time


@pytest.mark.thorough
def test_a_rank_lost_in_a_step_ends_the_engine() -> None:
    """The next test starts another engine in the same cluster."""
    with LLM("abacus", **RAY) as llm:
        (pid,) = others(llm)
        actor = parent(pid)
        llm.engine.on_tokens = lambda _: os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"^rank 1 of 2 on [\d.]+ .* \(signal SIGKILL"):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
        wait_for(lambda: is_gone(pid))
    wait_for(lambda: is_gone(actor))


@pytest.mark.slow
def test_no_rank_outlives_rank_0() -> None:
    with rank_0_killed("ray") as pid:
        actor = parent(pid)
    wait_for(lambda: is_gone(pid) and is_gone(actor))


# Refused starts


def refused(options: EngineOptions) -> str:
    with pytest.raises(UserError) as caught, started_ranks(options) as ranks:
        assert ranks is not None
        ranks.processes()
    return str(caught.value)


def test_a_cluster_that_is_too_small_is_refused_with_its_size() -> None:
    said = refused(EngineOptions(**{**RAY, "tensor_parallel_size": 4}))
    assert said.startswith("tensor_parallel_size=4: 4 ranks need a CPU each, rank 0 on this node,")
    assert "the Ray cluster has 2 (" in said


def test_what_others_hold_is_named_when_it_stays_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_ranks, "_FREE_S", 0.5)
    with started_ranks(EngineOptions(**RAY)) as ranks:
        assert isinstance(ranks, RayRanks)
        ranks.processes()
        said = refused(EngineOptions(**RAY))
        ranks.close()
    assert (
        "Ray has not given 2 x 1 CPU, the first on this node; 0 of the cluster's are free" in said
    )


def test_a_node_with_another_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {**ray_ranks.versions(), "torch": "1.0"}
    monkeypatch.setattr(ray_ranks, "versions", lambda: ours)
    said = refused(EngineOptions(**RAY))
    assert "has another installation than rank 0 runs" in said
    assert "(here -> there): torch: 1.0 -> " in said


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MachineError, match=r"package ray: pip install 'fusewright\[ray\]'$"):
        LLM("abacus", **RAY)


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({}, {"tensor_parallel_size": 1}, "distributed_executor=ray: there is one rank"),
        ({}, {"distributed_executor": "slurm"}, "distributed_executor='slurm': expected mp or ray"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, {}, "ray under torchrun: both start"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    environment: dict[str, str],
    options: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        LLM("abacus", **{**RAY, **options})


def test_only_who_knows_the_secret_is_listened_to() -> None:
    for sent, is_known in ((b"secret", True), (b"guess!", False)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(sent)
            assert Link(ours).begins_with(b"secret") is is_known


# Where ranks are


def test_stages_on_a_host_each_have_its_gpus() -> None:
    seats = [Seat(host, host, gpu) for host in "AB" for gpu in ("4", "2")]
    found = places(2, 2, seats)
    assert [place.visible_gpus for place in found] == ["4,2"] * 4
    assert [place.gpu for place in found] == [0, 1, 0, 1]
    assert [place.stage_gpus for place in found] == [(0, 1)] * 4
    assert [place.first for place in found] == [0, 0, 2, 2]


def test_a_stage_over_two_hosts_has_no_peer_memory_and_an_artifact_on_each() -> None:
    seats = [Seat(host, host, gpu) for host in "AB" for gpu in "01"]
    found = places(4, 1, seats)
    assert [place.stage_gpus for place in found] == [()] * 4
    assert [place.gpu for place in found] == [0, 1, 0, 1]
    assert [place.first for place in found] == [0, 0, 2, 2]


def test_rank_0_numbers_gpus_by_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    (place, _) = places(2, 1, [Seat("A", "A", "5"), Seat("A", "A", "3")])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert ray_ranks._as_numbered_here(place).stage_gpus == (5, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")
    assert ray_ranks._as_numbered_here(place).stage_gpus == (2, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES=3,4: Ray gave ranks .* 5,3"):
        ray_ranks._as_numbered_here(place)


def test_the_end_of_a_node_ends_the_engine(cluster: Cluster) -> None:
    """This is the last test here: it leaves the cluster with one node."""
    with LLM("abacus", **RAY) as llm:
        (pid,) = others(llm)
        (node,) = cluster.worker_nodes

        def lose(_: object) -> None:
            if cluster.worker_nodes:
                cluster.remove_node(node, allow_graceful=False)

        llm.engine.on_tokens = lose
        with pytest.raises(EngineDeadError, match=r"^rank 1 of 2 on .* or its node has ended\)"):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
        wait_for(lambda: is_gone(pid))
