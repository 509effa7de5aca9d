"""Try the small twin of every causal language model of ``transformers`` as the library runs it.

Each type is built from its default configuration, shrunk, given random weights and run: a forward
on five lengths, and ``generate``.  A line of JSON a type says what works, the first error of what
does not, and how the model is made: whether its attention and experts go through the library's
interfaces, which masks it asks for, whether it has recurrent layers.

    python tools/model_sweep.py --jobs 2 > sweep.jsonl
    python tools/model_sweep.py --types gemma3_text,gpt_oss
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import re
import sys
import time
import traceback
import warnings
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fusewright.model_executor.captured.default_configs import default_config
from fusewright.model_executor.captured.shrink import (
    depths_of,
    fields_of,
    randomize,
    shrunk,
)

LENGTHS = (1, 7, 16, 33, 40)
PROMPT_TOKENS, NEW_TOKENS = 9, 8
FIRST_TOKEN, LAST_TOKEN = 5, 100  # none of them special in a twin
PROBE = "model_sweep"
PLAIN_CACHES = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}
RECURRENT = re.compile("linear|recurrent|conv|mamba|hybrid")


@dataclass
class Finding:
    """What one type's twin does.  ``error`` is that of the first stage that failed, "" if none."""

    model_type: str
    architecture: str = ""
    works: bool = False
    stage: str = "default config"
    error: str = ""
    seconds: float = 0.0
    parameters: int = 0
    layers: int = 0
    logits_std: float = 0.0
    generates: bool = False
    generate_error: str = ""
    """Why ``generate`` fails, or that its tokens are not those of whole forwards."""
    attention: str = ""
    """"interface", "own", or "mixed": fewer calls of the interface than layers."""
    attention_calls: int = 0
    attention_arguments: list[str] = field(default_factory=list)
    masks: list[str] = field(default_factory=list)
    cache_layers: list[str] = field(default_factory=list)
    experts: str = ""
    """"interface", "own", or "" without experts."""
    position_ids: bool = False
    positions_from_zero: bool = False
    """Whether a forward without position_ids has those that ``generate`` hands it."""
    encoder_decoder: bool = False
    cross_attention: bool = False
    multimodal: bool = False
    recurrent: bool = False

    @property
    def group(self) -> str:
        if not self.works:
            return "not run"
        if self.encoder_decoder or self.cross_attention:
            return "decoder of an encoder-decoder"
        if self.recurrent:
            return "recurrent layers"
        if self.attention != "interface":
            return f"attention: {self.attention}"
        if set(self.cache_layers) - PLAIN_CACHES or "indices" in self.attention_arguments:
            return "attention to chosen or compressed keys"
        if self.experts == "own":
            return "experts not through the interface"
        if not self.position_ids:
            return "takes no position_ids"
        return "captured with its images left out" if self.multimodal else "plain decoder"


class Probe:
    """Records what a model hands to the attention and mask interfaces."""

    def __init__(self) -> None:
        self.calls = 0
        self.arguments: set[str] = set()
        self.masks: set[str] = set()

    def attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        self.calls += 1
        for name, value in options.items():
            if isinstance(value, Tensor) or (
                value is not None and value is not False and value != 0
            ):
                self.arguments.add(name)
        known = {name: options[name] for name in ("scaling", "is_causal") if name in options}
        return sdpa_attention_forward(module, q, k, v, attention_mask, **known)

    def mask(self, *args: Any, **options: Any) -> Any:
        """The mask, after a look at which of the library's functions asks for it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not frame.f_code.co_name.startswith("create_"):
            frame = frame.f_back
        if frame is not None:
            name = frame.f_code.co_name.removeprefix("create_").removesuffix("_mask")
            extras = ("or_mask_function", "and_mask_function", "block_sequence_ids")
            added = [extra for extra in extras if frame.f_locals.get(extra) is not None]
            self.masks.add(" + ".join([name, *added]))
        options["allow_is_causal_skip"] = options["allow_is_bidirectional_skip"] = False
        return eager_mask(*args, **options)


PROBE_STATE = [Probe()]
"""What the registered functions write to: the probe of the model that runs."""


def tokens(length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TOKEN, LAST_TOKEN, (1, length), generator=generator)


def examine(model_type: str, seed: int = 0) -> Finding:
    """Build, run and describe the twin of a type. Errors are part of the finding."""
    finding, start = Finding(model_type), time.perf_counter()
    try:
        config = default_config(model_type)
        describe_config(finding, config)
        finding.stage = "twin"
        twin = shrunk(config)
        finding.stage = "build"
        model = AutoModelForCausalLM.from_config(
            twin, attn_implementation="eager", dtype=torch.float32
        ).eval()
        randomize(model, seed)
        describe_model(finding, model)
        finding.stage = "forward"
        for length in LENGTHS:
            out = forward(model, tokens(length, seed))
            if not bool(out.logits.isfinite().all()):
                raise ValueError(f"logits of {length} tokens are not finite")
        finding.logits_std = round(float(out.logits.std()), 4)
        describe_positions(finding, model, out.logits, seed)
        describe_cache(finding, model)
        finding.stage, finding.works = "", True
        try_generate(finding, model, seed)
        probe_interfaces(finding, model, seed)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename.rpartition('transformers/')[2]}:{place.lineno}"
        finding.error = f"{type(error).__name__}: {first_line(error)} ({where})"
    finding.seconds = round(time.perf_counter() - start, 2)
    return finding


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:240]


@torch.no_grad()
def forward(model: Any, input_ids: Tensor, use_cache: bool = False, **options: Any) -> Any:
    return model(input_ids=input_ids, use_cache=use_cache, **options)


def positions(finding: Finding, input_ids: Tensor) -> dict[str, Tensor]:
    """The positions that ``generate`` hands to a forward which takes them."""
    return {"position_ids": torch.arange(input_ids.shape[1])[None]} if finding.position_ids else {}


def describe_positions(finding: Finding, model: Any, logits: Tensor, seed: int) -> None:
    ids = tokens(LENGTHS[-1], seed)
    given = forward(model, ids, **positions(finding, ids)).logits
    finding.positions_from_zero = torch.allclose(given, logits, atol=1e-4)


def describe_config(finding: Finding, config: Any) -> None:
    finding.encoder_decoder = bool(config.is_encoder_decoder)
    finding.multimodal = config.get_text_config(decoder=True) is not config
    text = fields_of(config.get_text_config(decoder=True))
    lists = [value for value in text.values() if isinstance(value, (list, tuple))]
    kinds = {kind for entries in lists for kind in entries if isinstance(kind, str)}
    finding.recurrent = any(RECURRENT.search(kind) for kind in kinds)


def describe_model(finding: Finding, model: Any) -> None:
    finding.architecture = type(model).__name__
    finding.parameters = sum(param.numel() for param in model.parameters())
    finding.layers = max(depths_of(model.config.get_text_config(decoder=True)), default=0)
    finding.position_ids = "position_ids" in inspect.signature(model.forward).parameters
    names = [name for name, _ in model.named_modules()]
    finding.cross_attention = any("cross" in name or "encoder_attn" in name for name in names)
    experts = [m for n, m in model.named_modules() if n.rpartition(".")[2].endswith("experts")]
    experts = [m for m in experts if any(True for _ in m.parameters())]
    by_interface = [m for m in model.modules() if hasattr(m, "is_concatenated")]
    finding.experts = "interface" if by_interface else "own" if experts else ""


def describe_cache(finding: Finding, model: Any) -> None:
    """What the model keeps between two steps: the classes of its cache's layers."""
    try:
        out = forward(model, tokens(LENGTHS[1], 0), use_cache=True)
    except Exception as error:
        finding.cache_layers = [f"fails: {first_line(error)}"]
        return
    cache = out.get("past_key_values")
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", [] if cache is None else [cache])
    state = [key for key in ("cache_params", "state", "rnn_state") if out.get(key) is not None]
    finding.cache_layers = sorted({type(layer).__name__ for layer in layers} | {*state})
    finding.recurrent |= bool(state) or any("Linear" in name for name in finding.cache_layers)


def try_generate(finding: Finding, model: Any, seed: int) -> None:
    """Greedy tokens, which must be those of one forward over all of them."""
    prompt = tokens(PROMPT_TOKENS, seed + 1)
    limits = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    try:
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), **limits)
        finding.generates = True
        greedy = allowed(
            model, forward(model, ids, **positions(finding, ids)).logits[:, PROMPT_TOKENS - 1 : -1]
        ).argmax(-1)
        differ = int((greedy != ids[:, PROMPT_TOKENS:]).sum())
        if differ:
            finding.generate_error = f"{differ} of {NEW_TOKENS} tokens differ from a whole forward"
    except Exception as error:
        finding.generate_error = f"{type(error).__name__}: {first_line(error)}"


def allowed(model: Any, logits: Tensor) -> Tensor:
    """Logits without the ends of text, which ``min_new_tokens`` forbids."""
    ends = model.generation_config.eos_token_id
    for end in [] if ends is None else [ends] if isinstance(ends, int) else ends:
        logits[..., end] = -torch.inf
    return logits


def probe_interfaces(finding: Finding, model: Any, seed: int) -> None:
    PROBE_STATE[0] = probe = Probe()
    AttentionInterface.register(PROBE, lambda *a, **k: PROBE_STATE[0].attention(*a, **k))
    AttentionMaskInterface.register(PROBE, lambda *a, **k: PROBE_STATE[0].mask(*a, **k))
    finding.attention = "own"
    try:
        model.set_attn_implementation(PROBE)
        forward(model, tokens(LENGTHS[1], seed))
    except Exception as error:
        finding.error = f"through the interface: {type(error).__name__}: {first_line(error)}"
    finding.attention_calls = probe.calls
    if probe.calls:
        finding.attention = "interface" if probe.calls >= finding.layers else "mixed"
    finding.attention_arguments, finding.masks = sorted(probe.arguments), sorted(probe.masks)


def quiet_worker() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)


def sweep(types: list[str], jobs: int, seed: int, out: TextIO) -> list[Finding]:
    """Examine all types and write a line for each as soon as it is known."""
    findings = []
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console,
    )  # fmt: skip
    workers = ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=quiet_worker
    )
    with workers, bar:
        task = bar.add_task("twins", total=len(types))
        for future in as_completed([workers.submit(examine, name, seed) for name in types]):
            finding = future.result()
            findings.append(finding)
            out.write(json.dumps(asdict(finding) | {"group": finding.group}) + "\n")
            out.flush()
            bar.update(task, advance=1, description=finding.model_type)
    return findings


def summary(findings: list[Finding]) -> str:
    """The counts of every group with the names in it, and the errors of what does not work."""
    groups = defaultdict[str, list[str]](list)
    for finding in sorted(findings, key=lambda f: f.model_type):
        groups[finding.group].append(finding.model_type)
    lines = [
        f"{len(names):4} {group}: {', '.join(names)}"
        for group, names in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    errors = [f"{f.model_type}: {f.stage}: {f.error}" for f in findings if f.error]
    errors += [
        f"{f.model_type}: generate: {f.generate_error}" for f in findings if f.generate_error
    ]
    return "\n".join([*lines, "", *sorted(errors)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", help="model types, separated by commas; all if left out")
    parser.add_argument("--jobs", type=int, default=1, help="processes that examine types")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and tokens")
    parser.add_argument("--out", help="file of JSON lines; standard output if left out")
    options = parser.parse_args()
    types = options.types.split(",") if options.types else [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    if unknown := [name for name in types if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]:
        parser.error(f"no causal language models of transformers: {', '.join(unknown)}")
    with Path(options.out).open("w") if options.out else nullcontext(sys.stdout) as out:
        findings = sweep(types, options.jobs, options.seed, out)
    print(summary(findings), file=sys.stderr)


if __name__ == "__main__":
    main()
