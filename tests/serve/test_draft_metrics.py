"""What an operator sees of drafts: vLLM's series, the line of load, and the report."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from .server_process import ServerProcess, wait_for

CONFIG = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "acceptance": [0.9, 0.5, 0.5],
    "adaptive": False,
}


def test_metrics_log_and_report_count_drafts() -> None:
    server = ServerProcess(
        *("--speculative-config", json.dumps(CONFIG)),
        *("--log-format", "json", "--log-stats-interval", "0.2"),
    )

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in list(server.lines)]

    wait_for(lambda: any("url" in line for line in lines()))
    server.url = next(line["url"] for line in lines() if "url" in line)
    with server.client() as client:
        body = {"prompt": "1+1=", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).json()
        report = client.get("/server_info").json()["engines"][0]["drafts"]
    assert answer["usage"]["completion_tokens"] == 100
    drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    drafts = server.metric("vllm:spec_decode_num_drafts_total")
    assert 0 < drafts < accepted < drafted <= 3 * drafts
    assert accepted == server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert server.metric("fusewright:spec_decode_off") == 0
    assert (report["drafted"], report["accepted"]) == (drafted, accepted)
    assert report["replayed"] and report["method"] == "ngram"
    wait_for(lambda: any("draft_acceptance_percent" in line for line in lines()))
    told = next(line for line in lines() if "draft_acceptance_percent" in line)
    assert 0 <= told["draft_acceptance_percent"] <= 100
    assert told["accepted_length"] >= 1
    assert "drafts accepted" in told["message"]
    assert server.stop() == 0


def test_the_shared_server_drafts_if_this_run_shall(
    http: httpx.Client, pytestconfig: pytest.Config
) -> None:
    body = {"prompt": "12+12=24\n12+12=", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    series = r"^vllm:spec_decode_num_draft_tokens_total(?:{.*})? (\S+)$"
    drafted = [float(each) for each in re.findall(series, http.get("/metrics").text, re.M)]
    assert (sum(drafted) > 0) == bool(pytestconfig.option.fw_drafts), drafted
