"""Claims about who is let in: pages of other origins and names that were rebound are refused, and
whoever asks without a browser notices nothing."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from fusewright.config import UserError
from fusewright.serve.http.guard import Doors, visitor_of
from fusewright.serve.http.intake.hosts import checked_hosts, is_loopback
from fusewright.serve.http.jobs.settings import Settings

from .server_process import ADMIN_KEY, KEY, LONG, OTHER_KEY, ServerProcess

LOOPBACK: tuple[str, ...] = ()
ANY = None
LISTED = ("llm.example.com", "*.corp.example")
OURS = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:8000", "[::1]:8000", "10.0.0.5"]
OURS += ["vllm", "vllm.default.svc.cluster.local:80", "host.docker.internal", "app.localhost"]
STRANGE = ["evil.com", "evil.com:8000", "localhost.evil.com", "127.0.0.1.evil.com", "evil.com."]
STRANGE += ["x@localhost", "local", "localhost:evil.com", "[::1].evil.com", "evil.com/localhost"]


def status(
    names: tuple[str, ...] | None,
    *headers: tuple[str, str],
    origins: tuple[str, ...] = (),
    version: str = "1.1",
) -> int:
    """The status of a request with these headers; 200 if it is let in."""
    doors = Doors(Settings(("m",), allowed_hosts=names, allowed_origins=origins))
    raw = [(name.encode(), value.encode()) for name, value in headers]
    refused = doors.refuse(visitor_of({"headers": raw}), version)
    return 200 if refused is None else refused.status


@pytest.mark.parametrize("host", OURS)
def test_names_that_no_public_dns_holds_are_served_everywhere(host: str) -> None:
    for names in (LOOPBACK, ANY, LISTED):
        assert status(names, ("host", host)) == 200
        assert status(names, ("host", host), ("origin", f"http://{host}")) == 200


@pytest.mark.parametrize("host", [name for name in STRANGE if name != "local"])
def test_public_names_are_served_where_others_reach_the_server(host: str) -> None:
    assert [status(names, ("host", host)) for names in (LOOPBACK, LISTED)] == [403, 403]
    assert status(ANY, ("host", host)) == 200
    # A page of that name may be a stranger's whose name was rebound to this machine.
    assert status(ANY, ("host", host), ("origin", f"http://{host}")) == 403


@pytest.mark.parametrize(
    "host, expected",
    [
        ("llm.example.com", 200),
        ("LLM.example.com:443", 200),
        ("a.corp.example", 200),
        ("a.b.corp.example", 200),
        ("corp.example", 403),
        ("acorp.example", 403),
        ("x.llm.example.com", 403),
    ],
)
def test_listed_names_are_served(host: str, expected: int) -> None:
    assert status(LISTED, ("host", host)) == expected
    assert status(LISTED, ("host", host), ("origin", f"https://{host}")) == expected


@pytest.mark.parametrize(
    "origin, expected",
    [
        ("http://localhost:8000", 200),
        ("https://localhost:8000", 200),
        ("HTTP://LOCALHOST:8000", 200),
        ("https://app.example", 200),
        ("http://localhost", 403),
        ("http://localhost:9000", 403),
        ("http://127.0.0.1:8000", 403),
        ("http://app.example", 403),
        ("https://app.example.evil.com", 403),
        ("http://evil.com", 403),
        ("ftp://localhost:8000", 403),
        ("null", 403),
        ("file://", 403),
        ("", 403),
    ],
)
def test_pages_of_other_origins_ask_only_if_they_are_allowed_to(origin: str, expected: int) -> None:
    headers = ("host", "localhost:8000"), ("origin", origin)
    assert status(LOOPBACK, *headers, origins=("https://app.example",)) == expected
    assert status(LOOPBACK, *headers, origins=("*",)) == 200
    both = (*headers, ("origin", "http://localhost:8000"))
    assert status(LOOPBACK, *both, origins=("https://app.example",)) == expected


def test_there_is_one_host() -> None:
    assert status(ANY) == status(ANY, ("host", "a"), ("host", "a")) == 400
    assert status(LOOPBACK, version="1.0") == 200


@pytest.mark.parametrize("name", ["http://a", "a/b", "a b", "a..b", "*a", "a.*", "", "a:x"])
def test_an_allowed_host_is_a_name(name: str) -> None:
    with pytest.raises(UserError, match="allowed_host="):
        checked_hosts([name])


def test_loopback_addresses_are_known() -> None:
    assert [is_loopback(each) for each in ("127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1")]
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "192.0.2.1", "localhost")))


@pytest.mark.parametrize("path", ["/abort_requests", "/v1/completions", "/tokenize"])
def test_what_a_page_may_send_unasked_does_nothing(http: httpx.Client, path: str) -> None:
    body = json.dumps({"prompt": "1+1=", "request_ids": "all"}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "text/json", None):
        headers = {} if kind is None else {"content-type": kind}
        assert http.post(path, content=body, headers=headers).status_code == 415
    for more in ({"origin": "http://evil.com"}, {"origin": "null"}, {"host": "evil.com"}):
        answer = http.post(path, content=body, headers={"content-type": "application/json", **more})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] in ("origin_not_allowed", "host_not_allowed")
    asked = {"origin": "http://evil.com", "access-control-request-method": "POST"}
    assert http.options(path, headers=asked).status_code == 403


def test_a_key_ends_its_own_requests_and_an_admin_key_those_of_all(
    server: ServerProcess, http: httpx.Client
) -> None:
    def aborted(key: str, wanted: Any) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        answer = http.post("/abort_requests", json={"request_ids": wanted}, headers=headers)
        return answer.json()["aborted"] if answer.status_code == 200 else answer.status_code

    body = {**LONG, "stream": True, "request_id": "guarded"}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        with server.engine_stopped():
            for wanted in (["cmpl-guarded"], ["all"], ["all", "cmpl-guarded"]):
                assert aborted(OTHER_KEY, wanted) == []
            assert aborted(KEY, ["all"]) == []
            assert [aborted(key, "all") for key in (OTHER_KEY, KEY)] == [403, 403]
            assert aborted(ADMIN_KEY, "all") == ["cmpl-guarded"]
        assert [line for line in lines if line][-1] == "data: [DONE]"
