"""``OpTable`` holds the implementations of the ops that a step runs outside the compiled program;
``outside_calls`` lists their calls, so that an artifact has their kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .... import ops
from ....compiler.lowering.check_kernels import unfit
from ....config import CompileConfig
from ....model_executor.spec import ModelSpec
from ..step_arguments import schema_of


class OpTable:
    """Implementations of the ops that run outside the compiled program, chosen once by dtypes."""

    def __init__(self, config: CompileConfig, sm: int) -> None:
        self._config, self._kernels, self._sm = config, dict(config.kernels), sm
        self._chosen: dict[tuple[Any, ...], Any] = {}
        self.choices: dict[str, str] = {}

    def __call__(self, name: str, *args: Any) -> Any:
        """Run op ``name`` by the implementation that fits ``args``."""
        key = (name, *(a.dtype for a in args if isinstance(a, Tensor)))
        overload = self._chosen.get(key)
        if overload is None:
            op = ops.BY_NAME[name]
            desc = op.describe(args, sm=self._sm)
            forced = self._kernels.get(name, "")
            try:
                choice = ops.choose(
                    op, desc, inline_first=not self._config.hand_kernels, override=forced
                )
            except ops.NoImplementationError as error:
                if forced:
                    raise unfit(name, forced, error) from error
                raise
            self.choices[name] = str(choice)
            overload = self._chosen[key] = op.overload(choice.name)
        return overload(*args)


def outside_calls(
    spec: ModelSpec, num_tokens: int, num_seqs: int
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every form of call that a step of these sizes makes outside the compiled program, but those
    of drafts: the op's name, and arguments on the meta device."""

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    ids = ints(num_seqs)
    floats = torch.empty(num_seqs, dtype=torch.float32, device="meta")
    shape = (num_seqs, spec.vocab_size)
    logits = torch.empty(shape, dtype=spec.dtype, device="meta")
    counts = torch.empty(shape, dtype=torch.int32, device="meta")
    values = torch.empty(shape, dtype=torch.float32, device="meta")
    step = schema_of(spec)
    tables = ints(num_seqs, len(step.tables), 1)
    fields = (ints(len(step.tokens) - 1, num_tokens), ints(len(step.rows), num_seqs + 1), tables)
    yield "write_inputs", (ints(step.packed_size(num_tokens, num_seqs, 1)), ids, *fields)
    yield "keep_tokens", (ids, ids, ids, ids)
    yield "argmax", (logits,)
    for num_logprobs in (0, 1):
        yield "token_logprobs", (logits, ids, num_logprobs)
    yield "apply_penalties", (values, counts, counts.bool(), ids, floats, floats, floats)
    yield "count_tokens", (ids, ids, counts)
    for top_k, top_p, min_p in itertools.product((None, ids), (None, floats), (None, floats)):
        seeds = torch.empty(num_seqs, dtype=torch.int64, device="meta")
        for each in (logits, values):  # as the model gives them, or with penalties and bans
            yield "sample", (each, floats, top_k, top_p, min_p, seeds, ids)
