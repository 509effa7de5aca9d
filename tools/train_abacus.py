"""Trains a bundled model, abacus or another of ``SHAPES``, and writes it as a Hugging Face folder.

    PYTHONPATH=build/pkgroot python tools/train_abacus.py --out DIR   # minutes on one H200
    ... --model abacus-moe --out DIR --steps 800 --batch 512 --pool 420000 --lr 6e-4 --warmup 40 \
        --average 0.99
    ... --model abacus-draft --out DIR --steps 4000 --batch 1024 --pool 1200000 --lr 4e-3 \
        --warmup 200 --average 0.998 --max-seconds 55

The second took 50 minutes of a CPU core that multiplies bfloat16, since it begins with abacus's
weights: see upcycle.py.  The third drafts for abacus; an H200 took a minute.

Problems are generated and encoded up front by all cores, then the pool stays on the device. The
model computes as it is served: every step rounds the float32 master weights to bfloat16 and
runs on those. What is saved is the running average of the weights. Same seed, machine and
versions: same bytes, unless --max-seconds cut the run short.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when torch starts CUDA

import make_abacus_tokenizer as tok
import numpy as np
import torch
import torch.nn.functional as F
from abacus_model import SEQ_LEN, SHAPES, Abacus, MoE, Shape
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from upcycle import upcycle

from fusewright.model_executor.abacus import FOLDER
from fusewright.model_executor.abacus.problems import TASKS, Problem, held_out, training

CHUNK = 20_000  # problems a worker generates at a time; part of what the seed determines
IGNORED = -100


BALANCE = 0.01  # weight of the loss that spreads tokens over experts


@dataclass(frozen=True)
class Options:
    """Every one is a command-line flag of the same name."""

    out: Path = FOLDER
    seed: int = 0
    steps: int = 8000
    batch: int = 2048
    pool: int = 8_000_000  # examples drawn; reshuffled once used up
    lr: float = 1.5e-3
    warmup: int = 400
    weight_decay: float = 0.05
    average: float = 0.999  # decay a step of the average of the weights
    max_seconds: float = math.inf  # after which training stops and the average is saved
    log_every: int = 200
    eval_every: int = 1000
    workers: int = len(os.sched_getaffinity(0))
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    compile: bool = False
    model: str = "abacus"
    compute: str = "bfloat16"  # float32 where the CPU has no fast bfloat16


Weights = dict[str, Tensor]


def encode(problems: Sequence[Problem]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, padded on the right where causal attention cannot see it, and prompt lengths."""
    ids = np.full((len(problems), SEQ_LEN), tok.PAD_ID, dtype=np.int16)
    prompt_lens = np.empty(len(problems), dtype=np.int16)
    for row, problem in enumerate(problems):
        text = (problem.prompt + problem.answer).encode()
        ids[row, : len(text) + 2] = [tok.BOS_ID, *text, tok.EOS_ID]
        prompt_lens[row] = len(problem.prompt) + 1
    return ids, prompt_lens


def encode_chunk(seed: int, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    return encode(list(training(CHUNK, seed * 1_000_003 + chunk)))


def make_pool(examples: int, options: Options) -> tuple[Tensor, Tensor]:
    chunks = range(-(-examples // CHUNK))
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("fork")) as executor:
        parts = list(executor.map(partial(encode_chunk, options.seed), chunks))
    ids, prompt_lens = (np.concatenate(column) for column in zip(*parts, strict=True))
    return torch.from_numpy(ids), torch.from_numpy(prompt_lens)


def split_batch(ids: Tensor, prompt_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and next-token targets, of which only the answer and its eos count."""
    ids = ids.long()
    targets = ids[:, 1:]
    positions = torch.arange(1, SEQ_LEN, device=ids.device)
    counted = (positions >= prompt_lens[:, None]) & (targets != tok.PAD_ID)
    return ids[:, :-1], targets.masked_fill(~counted, IGNORED)


@torch.no_grad()
def evaluate(
    model: Abacus, weights: Weights, problems: list[Problem], dtype: torch.dtype
) -> tuple[dict[str, float], float]:
    """Exact match a task under greedy decoding, and the smallest logit margin of all tokens.

    Greedy decoding gives the answer exactly when, after every prefix of it, the next token has
    the largest logit: one pass over prompt and answer tells. Ties count as failures.
    """
    device = next(iter(weights.values())).device
    rounded = {name: weight.bfloat16().to(dtype) for name, weight in weights.items()}
    right, margin = [], math.inf
    for start in range(0, len(problems), 1024):
        ids, prompt_lens = encode(problems[start : start + 1024])
        inputs, targets = split_batch(
            torch.from_numpy(ids).to(device), torch.from_numpy(prompt_lens).to(device)
        )
        logits = torch.func.functional_call(model, rounded, (inputs,)).float()
        counted, index = targets != IGNORED, targets.clamp(min=0)[..., None]
        wanted = logits.gather(-1, index)[..., 0]
        rival = logits.scatter(-1, index, -math.inf).amax(-1)
        margins = (wanted - rival).masked_fill(~counted, math.inf).amin(-1)
        right += (margins > 0).tolist()
        margin = min(margin, margins.min().item())
    accuracy = {}
    for task in TASKS:
        outcomes = [ok for ok, p in zip(right, problems, strict=True) if p.task == task]
        accuracy[task] = round(sum(outcomes) / len(outcomes), 5)
    return accuracy, margin


def write_config(folder: Path, shape: Shape) -> None:
    family = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
    if shape.experts:
        family = {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": shape.experts,
            "num_experts_per_tok": shape.top_k,
        }
    config = family | {
        "torch_dtype": "bfloat16",
        "vocab_size": tok.VOCAB_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": tok.MAX_POSITIONS,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }
    tok.write_tokenizer(folder)
    tok.write_json(folder / "config.json", config | tok.TOKEN_IDS)


_MIXTRAL = {"gate_proj_FD": ("w1", 0), "up_proj_FD": ("w3", 0), "down_proj_DF": ("w2", 1)}
"""Name of an expert's part in Mixtral, and the dimension along which experts lie side by side."""


def by_expert(weights: Weights, experts: int) -> Weights:
    """The weights by Hugging Face's names, a linear layer for each expert."""
    found = {}
    for name, weight in weights.items():
        mlp, _, part = name.replace(".mlp.", ".block_sparse_moe.").rpartition(".")
        if part in _MIXTRAL:
            theirs, dim = _MIXTRAL[part]
            for e, one in enumerate(weight.chunk(experts, dim)):
                found[f"{mlp}.experts.{e}.{theirs}.weight"] = one
        else:
            found[f"{mlp}.{part}" if experts else name] = weight
    return found


def write_weights(folder: Path, weights: Weights, experts: int) -> None:
    held = by_expert(weights, experts)
    tensors = {name: w.detach().bfloat16().cpu().contiguous() for name, w in held.items()}
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors leaves it readable by its owner alone


def learning_rate(step: int, options: Options) -> float:
    """Linear warmup, then half a cosine down to zero."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * 0.5 * (1 + math.cos(math.pi * done))


class Trainer:
    def __init__(self, options: Options, shape: Shape) -> None:
        self.options = options
        self.model = Abacus(shape)
        if shape.experts:
            dense = Abacus(SHAPES["abacus"])
            dense.load_state_dict(load_file(FOLDER / "model.safetensors"))
            ids, _ = encode_chunk(options.seed, 0)
            upcycle(dense, self.model, torch.from_numpy(ids[:2000]).long(), options.seed)
        self.model.to(options.device)
        self.weights = dict(self.model.named_parameters())
        self.average = {name: w.detach().clone() for name, w in self.weights.items()}
        matrices = [w for w in self.weights.values() if w.dim() > 1]
        vectors = [w for w in self.weights.values() if w.dim() == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, betas=(0.9, 0.98), weight_decay=options.weight_decay, fused=True
        )
        self.loss = torch.compile(self.plain_loss) if options.compile else self.plain_loss

    def plain_loss(self, ids: Tensor, prompt_lens: Tensor) -> Tensor:
        inputs, targets = split_batch(ids, prompt_lens)
        dtype = getattr(torch, self.options.compute)
        served = {name: weight.bfloat16().to(dtype) for name, weight in self.weights.items()}
        logits = torch.func.functional_call(self.model, served, (inputs,))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        balances = [m.balance for m in self.model.modules() if isinstance(m, MoE)]
        return loss + BALANCE * sum(balances, torch.zeros_like(loss))

    def step(self, step: int, ids: Tensor, prompt_lens: Tensor) -> tuple[Tensor, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.options)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(ids, prompt_lens)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.weights.values(), 1.0, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            pace = 1 - min(self.options.average, (1 + step) / (10 + step))
            torch._foreach_lerp_([*self.average.values()], [*self.weights.values()], pace)
        return loss.detach(), norm


def train(trainer: Trainer, ids: Tensor, prompt_lens: Tensor, started: float) -> int:
    """Runs the steps and returns how many it took, fewer than asked when time ran out."""
    options = trainer.options
    watch = held_out(120 * len(TASKS), seed=1)
    shuffle = torch.Generator().manual_seed(options.seed)
    order = torch.empty(0, dtype=torch.long, device=ids.device)
    for step in range(options.steps):
        if len(order) < options.batch:
            order = torch.randperm(len(ids), generator=shuffle).to(ids.device)
        rows, order = order[: options.batch], order[options.batch :]
        loss, norm = trainer.step(step, ids[rows], prompt_lens[rows])
        elapsed_s = time.monotonic() - started
        if step % options.log_every == 0:
            log(f"step {step:5d}  loss {loss:.6f}  gradient {norm:.3f}  {elapsed_s:.0f} s")
        if (step + 1) % options.eval_every == 0:
            dtype = getattr(torch, options.compute)
            accuracy, margin = evaluate(trainer.model, trainer.average, watch, dtype)
            log(f"  after {step + 1}: {accuracy}  smallest margin {margin:.2f}")
        if elapsed_s > options.max_seconds:
            log(f"stopped by --max-seconds after {step + 1} steps")
            return step + 1
    return options.steps


def log(line: str) -> None:
    print(line, flush=True)


def parse_options() -> Options:
    parser = argparse.ArgumentParser(description="Trains a bundled model.")
    for field in fields(Options):
        flag = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=field.type, default=field.default)
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = parse_options()
    shape = SHAPES[options.model]
    started = time.monotonic()
    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    # Before CUDA starts: workers are forks.
    pool = make_pool(min(options.pool, options.steps * options.batch), options)
    log(f"{len(pool[0]):,} examples after {time.monotonic() - started:.1f} s")
    trainer = Trainer(options, shape)
    log(f"{sum(w.numel() for w in trainer.weights.values()):,} parameters on {options.device}")
    steps_done = train(trainer, *(x.to(options.device) for x in pool), started)

    write_config(options.out, shape)
    write_weights(options.out, trainer.average, shape.experts)
    problems = held_out(1000 * len(TASKS), seed=0)
    record: dict[str, object] = {"held_out_problems": len(problems)}
    for dtype in (torch.bfloat16, torch.float32):
        accuracy, margin = evaluate(trainer.model, trainer.average, problems, dtype)
        key = f"bfloat16 weights computed in {str(dtype).removeprefix('torch.')}"
        record[key] = {"exact_match": accuracy, "smallest_margin": round(margin, 3)}
    unrecorded = {"out", "workers", "log_every", "eval_every", "max_seconds", "device"}
    defaults = Options()
    unrecorded |= {
        name for name in ("model", "compute") if getattr(options, name) == getattr(defaults, name)
    }
    record |= {
        "steps_done": steps_done,
        "options": {k: v for k, v in asdict(options).items() if k not in unrecorded},
        "seconds": round(time.monotonic() - started, 1),
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }
    tok.write_json(options.out / "training.json", record)
    log(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
