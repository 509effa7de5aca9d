"""The page at ``/docs``: the paths of the OpenAPI schema, and the fields of the bodies that they
take, without scripts or files of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>fusewright: the API</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { text-align: left; padding: 0 1rem 0 0 }
td { vertical-align: top } code { font-size: 14px } summary { cursor: pointer }
</style>
<h1>The API of this server</h1>
<p><a href="openapi.json">openapi.json</a> has the same for programs. OpenAI's and Anthropic's API
references say what their fields mean, and vLLM's what its own do.</p>
"""


def page_of(schema: Mapping[str, Any]) -> str:
    """The page of an OpenAPI schema, as HTML."""
    parts = [_HEAD]
    for path, by_method in sorted(schema["paths"].items()):
        for method, described in by_method.items():
            parts += _path(method.upper(), path, described)
    return "".join(parts)


def _path(method: str, path: str, described: Mapping[str, Any]) -> Iterator[str]:
    text = " ".join(described.get("description", "").replace("``", "").split())
    yield f"<details><summary><code>{method} {escape(path)}</code></summary>"
    yield f"<p>{escape(text)}</p>" if text else ""
    content = described.get("requestBody", {}).get("content", {})
    body = content.get("application/json", {}).get("schema", {})
    if fields := body.get("properties"):
        needed = body.get("required", ())
        yield "<table><tr><th>field</th><th>value</th></tr>"
        for name, value in fields.items():
            shown = escape(_type(value)) + (", required" if name in needed else "")
            yield f"<tr><td><code>{escape(name)}</code></td><td>{shown}</td></tr>"
        yield "</table>"
    yield "</details>\n"


def _type(value: Mapping[str, Any]) -> str:
    """What a field may be, in words."""
    if "anyOf" in value:
        kinds = dict.fromkeys(map(_type, value["anyOf"]))
        return " or ".join(kind for kind in kinds if kind != "null")
    if "const" in value:
        return repr(value["const"])
    if value.get("type") == "array":
        return f"list of {_type(value.get('items', {}))}"
    return str(value.get("type", "anything"))
