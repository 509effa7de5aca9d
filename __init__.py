"""fusewright: a kernel-centric compiler stack for LLM inference.

Public names load on first use so that ``import fusewright`` costs no torch import.
"""

from importlib import import_module

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": ".engine.llm",
    "AsyncLLM": ".engine.async_llm",
    "SamplingParams": ".engine.messages.sampling_params",
    "RequestOutput": ".engine.frontend.outputs",
    "EngineOptions": ".config",
}
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
