# ruff: noqa: E501  # rows of tables are one line
"""Renders ``docs/coming-from-vllm.md`` from the tables of ``config/vllm/``.

``make vllm-page`` runs it.  A test checks that the page is current.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from fusewright.config.vllm import (
    CALLS,
    ENGINE,
    METHODS,
    SAMPLING,
    SERVE,
    Argument,
    Port,
)
from fusewright.config.vllm.bench import BENCH
from fusewright.config.vllm.requests import (
    COMPLETIONS,
    GENERATION,
    MESSAGES,
    PATHS,
    RESPONSES,
    TOKENIZE,
)
from fusewright.config.vllm.speculative import SPECULATIVE

PAGE = Path(__file__).resolve().parents[1] / "docs/coming-from-vllm.md"

_INTRO = """\
# Coming from vLLM

`make vllm-page` renders this page from the tables by which arguments are read. The names are those of
vLLM 0.20, and of older versions where scripts still have them.

A script ports by changing its import:

```python
from fusewright import LLM, SamplingParams  # was: from vllm import LLM, SamplingParams
from fusewright import StructuredOutputsParams  # was: from vllm.sampling_params import ...
```

All names are in `fusewright` itself: `LLM`, `AsyncLLM` (also as `AsyncLLMEngine`), `EngineArgs`,
`AsyncEngineArgs`, `SamplingParams`, `StructuredOutputsParams` (also as `GuidedDecodingParams`),
`RequestOutputKind`, `BeamSearchParams`, `TextPrompt`, `TokensPrompt`, `RequestOutput`, `CompletionOutput`.

A command ports by writing `fusewright` for `vllm`: `serve`, `chat`, `run-batch` and `bench` are there.
Flags may have underscores, `-tp`, `-pp`, `-dp`, `-ep` and `-q` are understood, `8k` is 8000 and `8K` is
8192, and `--config FILE.yaml` has flags as keys.

## What differs without being asked

| | vLLM | here |
|---|---|---|
| `max_tokens` of `run` and `chat` | 16 or the context | 256; `SamplingParams()` has 16, as there |
| steps of prompts and decodes in a server | up to `max_num_batched_tokens` | 256 tokens (`--max-num-mixed-tokens 0` lifts it) |
| `max_num_seqs` | 1024 on GPUs of 70 GB or more, else 256 | 512 there, else 256 |
| `max_num_batched_tokens` | `LLM` 16384 and `serve` 8192 on GPUs of 70 GB or more | 8192 on every GPU, 2048 on a CPU |
| requests of `bench serve` and `bench throughput` | 1000 of `--dataset-name random` | 500 of `--dataset chat`, a mix of lengths |
| figures of `bench latency` | mean of 10 runs of a whole batch | time a token and to the first token, the best of 2 runs |
| address of the server | all interfaces | 127.0.0.1; `--host 0.0.0.0` opens it |
| sites whose pages may ask (CORS) | all | none; `--allowed-origins '*'` opens it |
| tool calls | `--enable-auto-tool-choice` and a parser | read as the chat template writes them |
| reasoning | `--reasoning-parser` | read as the chat template marks it; `--reasoning-parser` names what it does not show |
| code that comes with a model | runs with `trust_remote_code` | never runs |
| compiled code | built at the first start | kept as an artifact, listed by `fusewright cache ls` |
| batch invariance | an environment variable | `batch_invariant=True` |

## What is missing

| vLLM has | here | instead |
|---|---|---|
| LoRA adapters | no | merge the adapter into the weights |
| EAGLE 1 and 2, Medusa, MTP of Qwen3.5 | no | `speculative_config={"method": "eagle3", …}`, `"mtp"`, `"draft_model"`, `"suffix"` or `"ngram"`: [drafts](scheduling.md#drafts) |
| images, audio, video | no; a multimodal model is served as its text decoder | |
| embeddings, scores, rewards, classification | no | another server |
| bitsandbytes, Quark, HQQ, AQLM, weights of 2, 3 or 6 bits | no | `--quantization` of the 16-bit checkpoint: `fp8`, `int8`, `int4` and [others](quantization.md), or a [checkpoint that loads](quantization.md#checkpoints) (GPTQ, AWQ, compressed-tensors, ModelOpt, MXFP4, GGUF); a script can [admit a format](quantization.md#a-format-of-your-own) |
| recurrent and hybrid models (Mamba, Qwen3-Next, …) | no | [models](models.md) says which types run |
| logits processors in Python | no | `logit_bias`, `bad_words`, `allowed_token_ids`, `structured_outputs` |
| offloading of weights and KV cache to the CPU | no | FP8 weights and KV cache, or more GPUs |
| prefill and decode on different machines, KV connectors | no | |
| AMD, Intel, TPU, Apple | no | [which GPUs](gpus.md) |
| code of a model's repository (`trust_remote_code`) | never | an architecture of `transformers` |

`SamplingParams` may be changed after it was made. A request takes a copy, and the values are checked
then.

## What becomes of each argument

An argument that is *accepted without effect* is noted in the log (INFO). One that is *refused* ends the
start with the sentence below, unless its value asks for nothing: None, False, 0, what is empty, or
vLLM's default.

The log tells of a field of requests that is *accepted without effect* once (WARNING), and so it does
of a field that no table here has, unless `--strict-fields` refuses those. A field that is *refused* is
a 400 with the sentence below, unless its value asks for nothing.
"""
_ORDER = (Port.SAME, Port.OTHER, Port.IGNORED, Port.REFUSED)


def page() -> str:
    """The page as Markdown."""
    lines = [_INTRO]
    for title, table, form in (
        ("`LLM(…)`, `EngineArgs(…)`, and flags of `serve`", ENGINE, "{}"),
        ("Fields of `speculative_config`", SPECULATIVE, "{}"),
        ("Other flags of `serve`", SERVE, "--{}"),
        ("Flags of `bench`", BENCH, "--{}"),
        ("`SamplingParams(…)`", SAMPLING, "{}"),
        ("Methods of `LLM`", METHODS, "{}"),
        ("Arguments of `generate`, `chat` and `beam_search`", CALLS, "{}"),
        ("Paths of the server", PATHS, "{}"),
        ("Fields of every request that generates", GENERATION, "{}"),
        ("Fields of `/v1/completions` and `/v1/chat/completions`", COMPLETIONS, "{}"),
        ("Fields of `/v1/responses`", RESPONSES, "{}"),
        ("Fields of `/v1/messages` and `/v1/messages/count_tokens`", MESSAGES, "{}"),
        ("Fields of `/tokenize` and `/detokenize`", TOKENIZE, "{}"),
    ):
        lines += [f"### {title}", "", *_rows(table, form), ""]
    return "\n".join(lines).rstrip() + "\n"


def _rows(table: Mapping[str, Argument], form: str) -> Iterator[str]:
    yield "| vLLM's | here | |"
    yield "|---|---|---|"
    for port in _ORDER:
        by_reason: dict[str, list[str]] = {}
        for argument in table.values():
            if argument.port is port:
                name = form.format(argument.name)
                name = name.replace("_", "-") if form.startswith("--") else name
                by_reason.setdefault(argument.says, []).append(f"`{name}`")
        for says, names in by_reason.items():
            says = f"`{form.format(says)}`" if says.isidentifier() else says
            yield f"| {', '.join(names)} | {port.value} | {says.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    PAGE.write_text(page())
