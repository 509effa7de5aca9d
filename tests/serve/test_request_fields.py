"""The tables of request fields and of paths say what is true of the bodies and of the routes."""

from __future__ import annotations

from typing import Any

import pytest

from fusewright.config.vllm import Port
from fusewright.config.vllm.requests import PATHS
from fusewright.serve.http.app import BARE_POSTS, GETS, POSTS
from fusewright.serve.http.intake.errors import ApiError
from fusewright.serve.http.intake.fields import FieldNotes, why_no_path
from fusewright.serve.http.intake.protocol import (
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    Fields,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)

BODIES: list[tuple[type[Fields], ...]] = [
    (CompletionRequest, ChatRequest),
    (ResponsesRequest,),
    (MessagesRequest, CountTokensRequest),
    (TokenizeRequest, DetokenizeRequest),
]


@pytest.mark.parametrize("kinds", BODIES, ids=lambda kinds: kinds[0].__name__)
def test_the_tables_have_the_fields_of_the_bodies(kinds: tuple[type[Fields], ...]) -> None:
    table = kinds[0].table
    declared = {name for kind in kinds for name in kind.model_fields}
    assert {name for name, each in table.items() if each.port is Port.SAME} == declared
    assert all(each.says for each in table.values() if each.port is not Port.SAME)
    assert {each.port for each in table.values()} <= {Port.SAME, Port.IGNORED, Port.REFUSED}


@pytest.mark.parametrize("kind", [kinds[0] for kinds in BODIES], ids=lambda kind: kind.__name__)
def test_each_entry_does_what_it_says(kind: type[Fields]) -> None:
    notes = FieldNotes(strict=True)
    for name, argument in kind.table.items():
        if argument.port is Port.SAME:
            continue
        for nothing in (None, False, 0, "", [], {}, *argument.off):
            notes.check(kind.model_construct(**{name: nothing}))
        for value in ("asks for it", ["it"], {"asks": "for it"}, 5, True):
            body: Any = kind.model_construct(**{name: value})
            if argument.port is Port.IGNORED:
                notes.check(body)
                continue
            with pytest.raises(ApiError) as refused:
                notes.check(body)
            assert refused.value.message == f"{name}: {argument.says}"
            assert refused.value.param == name


def test_no_number_of_invented_names_fills_the_log(said: list[Any]) -> None:
    notes = FieldNotes(strict=False)
    for number in range(300):
        names = (f"{number}" * 1000, "a\nb")
        notes.check(CompletionRequest.model_construct(**dict.fromkeys(names, 1)))
    lines = [record.getMessage() for record in said]
    assert len(lines) == 101 and max(map(len, lines)) < 200
    assert lines[-1].startswith("more fields") and not any("\n" in line for line in lines)


def test_the_table_of_paths_has_the_routes() -> None:
    ours = {"/", "/live", "/abort_requests", "/v1/models/{name:path}"}
    routes = {path for path, *_ in (*POSTS, *GETS, *BARE_POSTS)} | {"/openapi.json"}
    assert {name for name, each in PATHS.items() if each.port is Port.SAME} == routes - ours
    assert not any(map(why_no_path, routes))
    assert why_no_path("/v1/responses/1") and not why_no_path("/v1/embeddingsx")
