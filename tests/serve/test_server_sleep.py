"""A server whose engine sleeps and wakes up, by vLLM's endpoints."""

from __future__ import annotations

import json

import httpx
import pytest

from .server_process import ADMIN_KEY, LONG, ServerProcess

ASKED = {"prompt": "37+58=", "temperature": 0}


@pytest.mark.parametrize(("level", "mode"), [(1, "abort"), (2, "wait")])
def test_requests_are_refused_until_the_engine_is_awake(
    server: ServerProcess, http: httpx.Client, level: int, mode: str
) -> None:
    def is_asleep() -> bool:
        return bool(http.get("/is_sleeping").json()["is_sleeping"])

    with server.client(headers={"authorization": f"Bearer {ADMIN_KEY}"}) as admin:
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as streamed:
            lines = streamed.iter_lines()
            next(lines)
            assert admin.post(f"/sleep?level={level}&mode={mode}").status_code == 200
            *_, last, _, done, _ = lines
        ended = json.loads(last.removeprefix("data: "))
        if mode == "abort":
            assert ended["error"]["code"] == "aborted"
        else:
            assert ended["choices"][0]["finish_reason"] == "length"
        assert done == "data: [DONE]" and is_asleep()
        refused = http.post("/v1/completions", json=ASKED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
        again = admin.post("/sleep")
        assert (again.status_code, again.json()["error"]["message"]) == (
            400,
            "sleep: the engine sleeps already; call wake_up() first",
        )
        assert admin.post("/wake_up?tags=weights").status_code == 200 and is_asleep()
        assert admin.post("/wake_up?tags=kv_cache").status_code == 200 and not is_asleep()
        assert http.post("/v1/completions", json=ASKED).json()["choices"][0]["text"] == "95"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("/sleep?level=3", "level='3': expected 1 or 2"),
        ("/sleep?mode=keep", "mode='keep': expected abort"),
        ("/wake_up?tags=graphs", "tags=['graphs']: expected a list of weights, kv_cache"),
    ],
)
def test_what_cannot_sleep_is_refused(
    server: ServerProcess, http: httpx.Client, asked: str, told: str
) -> None:
    with server.client(headers={"authorization": f"Bearer {ADMIN_KEY}"}) as admin:
        answer = admin.post(asked)
    assert answer.status_code == 400 and told in answer.json()["error"]["message"]
    assert http.post(asked).status_code == 403
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
