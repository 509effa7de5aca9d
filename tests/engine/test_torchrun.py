"""``torchrun`` starts the ranks: its process of rank 0 leads, and the others follow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fusewright.config import UserError
from fusewright.engine.ranks.torchrun import join_torchrun
from tests.engine.test_rank_faults import TIMEOUT_S, is_gone
from tests.serve.server_process import wait_for

pytestmark = pytest.mark.usefixtures("warm_servers")
TORCHRUN = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
RUN = "run abacus --tensor-parallel-size 2 --device cpu -O0 --max-num-seqs 4 --temperature 0"

STOP_A_RANK = """
import os, signal
from fusewright import LLM
llm = LLM("abacus", tensor_parallel_size=2, optimization_level=0, device="cpu", max_num_seqs=4)
(other,) = llm.report()["ranks"]["processes"]
print(os.getpid(), other, flush=True)
llm.engine.on_tokens = lambda _: os.kill(other, signal.SIGSTOP)
llm.generate("1+1=", use_tqdm=False)
"""


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Two processes of torchrun, until they have ended."""
    return subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "2", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.product(2, of="torchrun")
def test_the_command_line_runs_under_torchrun() -> None:
    """What rank 0 says is said once."""
    done = launch("-m", "fusewright.serve.cli", *RUN.split(), "-p", "37+58=")
    assert (done.returncode, done.stdout) == (0, "95\n"), done.stderr


@pytest.mark.product(2, of="torchrun")
def test_the_end_of_a_rank_is_the_end_of_all(tmp_path: Path) -> None:
    """Rank 0 says why before torchrun ends it for the end of another."""
    script = tmp_path / "script.py"
    script.write_text(STOP_A_RANK)
    done = launch(str(script))
    assert done.returncode != 0
    reason = "error: rank 1 of 2 has ended (it was stopped, and did not go on)"
    assert reason in done.stderr, done.stderr
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 2
    wait_for(lambda: all(is_gone(pid) for pid in pids))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"WORLD_SIZE": "4"},
            "tensor_parallel_size=2: torchrun has started WORLD_SIZE=4 processes",
        ),
        ({"WORLD_SIZE": "1"}, "give --nproc-per-node 2, or tensor_parallel_size=1$"),
        ({"LOCAL_WORLD_SIZE": "1"}, "WORLD_SIZE=2: torchrun has started 1 of them on this host"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' in the environment: expected a number"),
    ],
)
def test_sizes_that_do_not_fit_are_named(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitting = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    for name, value in (fitting | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        join_torchrun(2)


def test_without_torchrun_nobody_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert join_torchrun(2) is None
