"""``--dump DIR`` writes what each phase of a build made, as files to read in order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from ...config import MachineError
from ...passes import fake_value
from ..capture.trace import Traced
from ..emit.piece_code import describe, op_name
from ..record import Record

_SHOWN = (".py", ".json", ".cpp")


class Dump(Record):
    """Writes graphs as they are, one file each, then the generated code and ``index.md``.

    Args:
        folder: made when missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._graphs: list[tuple[str, str, int]] = []

    def graph(self, title: str, traced: Traced) -> None:
        """Write the graph in its present state."""
        name = f"{len(self._graphs):02d}-{re.sub(r'[^a-z0-9_]+', '-', title)}.txt"
        lines = graph_lines(traced)
        self._write(name, "\n".join(lines) + "\n")
        self._graphs.append((title, name, len(lines)))

    def write(self, files: Mapping[str, bytes], label: str) -> None:
        """Write an artifact's readable files and the index of everything."""
        index = [f"# {label}", "", "## Graphs", ""]
        index += [f"- [{title}]({name}): {count} lines" for title, name, count in self._graphs]
        index += ["", "## What was generated from them", ""]
        for name, content in sorted(files.items()):
            if name.endswith(_SHOWN):
                self._write(f"artifact/{name}", content.decode())
                index.append(f"- [{name}](artifact/{name})")
        kernels = sorted(name for name in files if not name.endswith(_SHOWN))
        index += ["", f"{len(kernels)} compiled kernels are in the artifact itself.", ""]
        index += [f"- {name}, {len(files[name])} bytes" for name in kernels]
        self._write("index.md", "\n".join(index) + "\n")

    def _write(self, name: str, text: str) -> None:
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            raise MachineError(
                f"dump={self._folder}: {name} cannot be written: {error.strerror}; give a folder "
                "with space"
            ) from error


def graph_lines(traced: Traced) -> list[str]:
    """One line a node: name, type and shape in named dimensions, target and arguments."""
    lines = []
    for node in traced.gm.graph.nodes:
        value = describe(fake_value(node), traced.dims)
        result = f"{node.name}: {value}" if value else node.name
        if node.op == "placeholder":
            lines.append(f"input {result}")
        elif node.op == "output":
            lines.append(f"return {node.args[0]}")
        else:
            lines.append(f"{result} = {op_name(node)}{_arguments(node)}")
    return lines


def _arguments(node: torch.fx.Node) -> str:
    args = [str(arg) for arg in node.args]
    args += [f"{name}={value}" for name, value in node.kwargs.items()]
    return f"({', '.join(args)})"
