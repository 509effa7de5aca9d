"""Claims about several frontends and replicas: who gets a request, and who what comes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusewright import LLM
from fusewright.config import UserError
from fusewright.engine.messages.requests import (
    AddRequest,
    Finished,
    NewTokens,
    PromptLogprobs,
    StepOutputs,
)
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.engine.messages.step import Logprobs
from fusewright.engine.process.owners import Owners
from fusewright.engine.process.replica import gpus_of_replica
from fusewright.engine.process.router import Router


def request(name: str, ids: list[int], salt: str | None = None) -> AddRequest:
    return AddRequest(name, ids, SamplingParams(), len(ids) + 16, cache_salt=salt)


def place(router: Router, asked: AddRequest) -> int:
    """The replica of a request for one output."""
    (replica,) = router.choose(asked)
    return replica


def prompt(first: int, length: int = 40) -> list[int]:
    return [first, *range(length - 1)]


def test_requests_spread_evenly_and_a_freed_replica_gets_the_next() -> None:
    router = Router(3, num_blocks=100, block_size=8)
    places = [place(router, request(str(i), prompt(i))) for i in range(12)]
    assert [places.count(replica) for replica in range(3)] == [4, 4, 4]
    for name, chosen in enumerate(places):
        if chosen == 1:
            assert router.close(str(name)) == [1]
    assert [place(router, request(f"n{i}", prompt(100 + i))) for i in range(4)] == [1] * 4
    assert router.close("unknown") == []
    assert len(router) == 12


def test_a_known_prefix_draws_a_request_until_its_replica_is_busier_than_the_others() -> None:
    router = Router(2, num_blocks=100, block_size=8)
    home = place(router, request("first", prompt(7)))
    other = place(router, request("other", prompt(8)))
    assert home != other
    longer = [*prompt(7), 99, 98]
    assert [place(router, request(f"a{i}", longer)) for i in range(4)] == [home] * 3 + [other]
    assert place(router, request("b", longer)) in (home, other)


def test_a_salt_keeps_prefixes_apart_and_old_blocks_are_forgotten() -> None:
    router = Router(2, num_blocks=5, block_size=8)
    home = place(router, request("a", prompt(7)))
    router.close("a")
    assert place(router, request("b", prompt(7))) == home
    router.close("b")
    assert place(router, request("salted", prompt(7), "s")) != home
    router.close("salted")
    for number in range(2):  # a replica's five blocks each, so that it has no other
        place(router, request(f"full{number}", prompt(50 + number)))
    assert place(router, request("again", prompt(7))) == 1 - home  # the one with fewer requests


LOGPROBS = Logprobs(*(np.zeros((1, 1)[:n], t) for n, t in zip((1, 1, 2, 2), "fifi", strict=True)))


def step(names: list[str], **more: Any) -> StepOutputs:
    ids = np.arange(len(names), dtype=np.int32)
    ranks = np.ones(len(names), np.int32)
    floats = -ids.astype(np.float32)
    logprobs = Logprobs(floats, ranks, floats[:, None], ids[:, None])
    tokens = NewTokens(names, ids, logprobs)
    return StepOutputs(tokens, **{"finished": [], "preempted": [], **more})


def test_each_frontend_gets_its_own_part_of_a_step() -> None:
    owners = Owners(3)
    for name in ("a0", "b1", "c0", "d1"):
        owners.add(request(name, [1]), int(name[1]))
    outputs = step(
        ["a0", "b1", "gone", "c0"],
        finished=[Finished("c0", "stop", 3), Finished("d1", "error", 0, error="why")],
        preempted=["b1"],
        scored=[PromptLogprobs("b1", 1, LOGPROBS)],
        cached_tokens={"a0": 16, "c0": 32},
        started={"b1": 1.5},
    )
    (first, of_first), (second, of_second) = owners.split(outputs)
    assert (first, second) == (0, 1)
    assert of_first.tokens is not None and of_second.tokens is not None
    assert of_first.tokens.request_ids == ["a0", "c0"]
    assert of_first.tokens.token_ids.tolist() == [0, 3]
    assert of_second.tokens.logprobs is not None
    assert of_second.tokens.logprobs.chosen.tolist() == [-1.0]
    assert [each.request_id for each in of_first.finished] == ["c0"]
    assert [each.request_id for each in of_second.finished] == ["d1"]
    assert (of_first.preempted, of_second.preempted) == ([], ["b1"])
    assert [len(part.scored) for part in (of_first, of_second)] == [0, 1]
    assert of_first.cached_tokens == {"a0": 16, "c0": 32}
    # Every field of the message is split.
    assert all(
        getattr(of_first, name) or getattr(of_second, name) for name in outputs.__struct_fields__
    )
    # What has finished is forgotten.
    assert [frontend for frontend, _ in owners.split(step(["c0", "b1"]))] == [1]


def test_one_frontend_gets_the_message_as_it_is() -> None:
    outputs = step(["a"])
    assert Owners(1).split(outputs) == [(0, outputs)]


def test_gpus_are_dealt_out_by_replica() -> None:
    gpus = ["0", "2", "GPU-5", "7"]
    assert [gpus_of_replica(i, 2, 2, gpus) for i in range(2)] == ["0,2", "GPU-5,7"]
    assert gpus_of_replica(0, 1, 4, gpus) is None
    assert gpus_of_replica(1, 2, 4, []) is None
    with pytest.raises(UserError, match=r"data_parallel_size=3: .* needs 6 GPUs, and there are 4"):
        gpus_of_replica(0, 3, 2, gpus)


def test_an_llm_of_several_replicas_names_the_server() -> None:
    with pytest.raises(UserError, match="fusewright serve --data-parallel-size"):
        LLM("abacus", data_parallel_size=2)
