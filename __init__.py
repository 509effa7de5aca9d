"""fusewright: a kernel-centric compiler stack for LLM inference.

Public names load on first use so that ``import fusewright`` costs no torch import.
"""

from importlib import import_module

__version__ = "0.2.0"

_MODULES = {
    ".engine.llm": "LLM",
    ".engine.async_llm": "AsyncLLM",
    ".engine.engine_args": "EngineArgs AsyncEngineArgs",
    ".engine.beam_search": "BeamSearchParams BeamSearchOutput BeamSearchSequence",
    ".engine.messages.sampling_params": "SamplingParams StructuredOutputsParams RequestOutputKind",
    ".engine.messages.token_ids": "ThinkingTokens",
    ".engine.frontend.inputs": "TextPrompt TokensPrompt",
    ".engine.frontend.outputs": "RequestOutput CompletionOutput Logprob",
    ".config": "EngineOptions",
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}
_OTHER_NAMES = {"AsyncLLMEngine": "AsyncLLM", "GuidedDecodingParams": "StructuredOutputsParams"}
"""Names under which vLLM also has some of these."""
__all__ = [*_PUBLIC, *_OTHER_NAMES, "__version__"]


def __getattr__(name: str) -> object:
    ours = _OTHER_NAMES.get(name, name)
    if ours in _PUBLIC:
        return getattr(import_module(_PUBLIC[ours], __name__), ours)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
