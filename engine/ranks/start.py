"""``start_ranks`` starts the other ranks of an engine, if there are any."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from ...config import EngineOptions, Hardware, UserError
from ...model_executor.parallel import describe_ranks, fitting
from ...model_executor.spec import ModelSpec
from ..messages.step import Runner
from ..worker.peers import Alone
from .executor import StartedRanks
from .leader import Leader
from .runner import RanksRunner
from .torchrun import claim_ranks, join_torchrun


class OneRank(Alone):
    """Stands where ``Leader`` would in an engine of one rank."""

    def ready(self) -> None:
        """Nobody is waited for."""

    def guard(self) -> AbstractContextManager[object]:
        """Errors are rank 0's own."""
        return nullcontext()

    def capture_next(self) -> None:
        """Nobody else captures."""

    def report(self) -> list[int]:
        """Report no process ids, because there are no other ranks."""
        return []

    def peer_memory(self) -> str:
        """Nobody to write to."""
        return "one rank"

    def stop(self) -> None:
        """Nobody is there to end."""


def start_ranks(
    options: EngineOptions, spec: ModelSpec, hardware: Hardware, others: StartedRanks | None = None
) -> OneRank | Leader:
    """Tell the processes of all ranks but 0, which is this one, what to be; returns at once.  They
    are started unless they have been.  Under torchrun, which has started them, another rank does
    not return.

    Raises:
        UserError: torchrun has started another number of them, there are fewer GPUs than ranks, or
            this process has such an engine already.
    """
    sizes = options.tensor_parallel_size, options.pipeline_parallel_size
    launch = join_torchrun(*sizes)
    if options.num_ranks == 1:
        return OneRank()
    has_all = options.distributed_executor == "mp"  # the GPUs of all ranks are of this host
    if hardware.device == "cuda" and has_all and options.num_ranks > hardware.num_devices:
        products = [
            f"{fits}" if sizes[1] == 1 else f"{fits} x {stages}"
            for stages in range(1, sizes[1] + 1)
            for fits in fitting(spec, hardware.num_devices // stages)
        ]
        raise UserError(
            f"{describe_ranks(*sizes)}: a rank needs a GPU of its own, and there are "
            f"{hardware.num_devices}; this model runs here with {', '.join(products)}"
        )
    if launch is not None:
        claim_ranks()
    return Leader(options, hardware, torchrun=launch is not None, others=others)


def on_all(ranks: OneRank | Leader, runner: Runner) -> Runner:
    """The runner of rank 0, and with it those of the other ranks."""
    return RanksRunner(ranks, runner) if isinstance(ranks, Leader) else runner
