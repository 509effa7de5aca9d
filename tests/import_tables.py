"""Which folder and which room may import which: what `test_layout.py` enforces."""

from __future__ import annotations

# Folder -> the folders it may import. The root __init__ loads its names lazily and may be imported
# by all.
MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "ops": {"config"},
    "passes": {"config", "ops"},
    "compiler": {"config", "ops", "passes"},
    "graph_capture": {"config"},
    "model_executor": {"config", "ops"},
    "engine": {"config", "ops", "passes", "compiler", "graph_capture", "model_executor"},
}
MAY_IMPORT["bench"] = {*MAY_IMPORT}
MAY_IMPORT["serve"] = {*MAY_IMPORT}
CHECKOUT_ONLY = ("benchmarks",)
"""Folders that may import the whole package and are in no wheel: nothing in it imports them."""

# Folder, or room that has rooms itself -> room in it -> the rooms of that folder it may import. ""
# are the modules beside the rooms, which call them in turn: `compile()` and `build()`.
ROOMS: dict[str, dict[str, set[str]]] = {
    "compiler": {  # in the order of its line
        "capture": set(),
        "lowering": {"capture"},
        "emit": {"capture", "lowering", "artifacts", "run"},
        "artifacts": set(),
        "run": {"artifacts"},
        "": {"capture", "lowering", "emit", "artifacts", "run"},
        # Imported by nothing above: its sources are in no artifact's key.
        "inspect": {"capture", "lowering", "emit", "artifacts", "run", ""},
    },
    "ops": {
        "core": set(),
        # Found by the names that launches give, so that no other room imports Triton.
        "triton_kernels": {"sampling"},
        "launches": {"core"},
        "collective": {"core"},
        "norm": {"core", "launches", "collective"},
        "linear": {"core", "launches", "collective", "norm"},
        "experts": {"core", "launches", "norm", "linear"},
        "chain": {"core", "launches", "collective", "norm", "linear", "experts"},
        "attention": {"core", "launches", "norm"},
        "sampling": {"core", "launches"},
        # The list of all ops, and what runs the cases of one.
        "": {"core", "collective", "norm", "linear", "experts", "chain", "attention", "sampling"},
        "oracles": {"core", "norm", "chain", ""},
    },
    "serve": {
        "console": set(),
        "http": set(),
        "measure": {"console"},
        "commands": {"console", "http"},
        "": {"console"},  # the command line: it imports a command when it is asked for
    },
    "serve/http": {  # in the order in which a request meets them
        "intake": set(),
        "tool_calls": set(),
        "reasoning": {"tool_calls"},
        "jobs": {"intake", "reasoning"},
        "endpoints": {"intake", "jobs", "tool_calls", "reasoning"},
        "": {"intake", "jobs", "tool_calls", "reasoning", "endpoints"},
    },
    "engine": {
        "messages": set(),
        "grammar": {"messages"},
        "core": {"messages", "grammar"},
        "frontend": {"messages", "grammar"},
        "worker": {"messages"},
        # Rank 0 beside the other ranks of a model.
        "ranks": {"messages", "worker"},
        "": {"messages", "grammar", "core", "frontend", "worker", "ranks"},
        # Imported by nothing above: it puts an engine into a process of its own.
        "process": {"messages", "grammar", "frontend", "ranks", ""},
    },
}
