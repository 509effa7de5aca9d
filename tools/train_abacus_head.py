"""Trains the EAGLE-3 head of abacus, and writes it as a Hugging Face folder.

    PYTHONPATH=build/pkgroot python tools/train_abacus_head.py --out DIR --steps 1500 --batch 1024 \
        --pool 800000 --lr 3e-3 --warmup 60 --average 0.99 --max-seconds 38   # on an H200

The head learns the answers that abacus was trained on, which are what abacus writes.  As in the
paper (Li et al., 2025, section 3.1), it is trained on what it meets when it drafts: draft s + 1
follows the head's own hidden state of draft s.  Computed in float32.
"""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import make_abacus_tokenizer as tok
import torch
import torch.nn.functional as F
from abacus_model import MLP, SHAPES, Abacus, Attention, RMSNorm, Shape, rotate
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from train_abacus import (
    IGNORED,
    Options,
    encode,
    learning_rate,
    log,
    make_pool,
    parse_options,
    split_batch,
)

from fusewright.model_executor.abacus import FOLDER
from fusewright.model_executor.abacus.problems import held_out

SHAPE = Shape(intermediate=128, layers=1, heads=2, kv_heads=1)
KEPT = (1, 3, 5)
"""The layers of abacus ahead of which its hidden states are read; 5 is what the last one makes."""
DRAFTS = 4
"""The drafts that the head is trained to make one behind the other."""
TOKENS = sorted([*b"0123456789 -abcdefghijklmnopqrstuvwxyz", tok.EOS_ID])
"""The tokens of abacus that it may draft."""

# Shape suffixes: B batch, T positions, D hidden, H KV heads, G query heads a KV head, K head dim.


class WideAttention(Attention):
    """Reads rows twice as wide, and keys of drafts beside those of the text."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(self, name)
            setattr(self, name, nn.Linear(2 * shape.hidden, own.out_features, bias=False))

    def draft(
        self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, before: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attention of the draft that follows ``len(before)`` others, whose keys and values are in
        ``before`` and are joined by this one's: the first are those of the text, of which a draft
        sees what comes before the others."""
        B, T, _ = x_BTD.shape
        H, K = self.shape.kv_heads, self.shape.head_dim
        G, step = self.shape.heads // H, len(before)
        q_BHGTK = self.q_proj(x_BTD).view(B, T, H, G, K).permute(0, 2, 3, 1, 4)
        k_BHTK = self.k_proj(x_BTD).view(B, T, H, K).transpose(1, 2)
        v_BHTK = self.v_proj(x_BTD).view(B, T, H, K).transpose(1, 2)
        q_BHGTK, k_BHTK = rotate(q_BHGTK, cos_TK, sin_TK), rotate(k_BHTK, cos_TK, sin_TK)
        before.append((k_BHTK, v_BHTK))
        (k_text, v_text), drafts = before[0], before[1:]
        scores = q_BHGTK @ k_text[:, :, None].transpose(-1, -2)
        unseen_TT = torch.ones(T, T, dtype=torch.bool, device=scores.device).triu(1 - step)
        parts = [scores.masked_fill(unseen_TT, float("-inf"))]
        # Draft j of this chain lies step - j positions back.
        rolled = [
            (k.roll(step - j, 2)[:, :, None], v.roll(step - j, 2)[:, :, None])
            for j, (k, v) in enumerate(drafts, 1)
        ]
        parts += [(q_BHGTK * k).sum(-1, keepdim=True) for k, _ in rolled]
        weights = (torch.cat(parts, -1) * K**-0.5).softmax(-1)
        y = weights[..., :T] @ v_text[:, :, None]
        for number, (_, v) in enumerate(rolled):
            y = y + weights[..., T + number, None] * v
        return self.o_proj(y.permute(0, 3, 1, 2, 4).reshape(B, T, H * G * K))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = WideAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = MLP(shape)


class Head(nn.Module):
    """Names are those of published heads; the embedding is abacus's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(len(KEPT) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = Layer(shape)
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, len(TOKENS), bias=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02 if weight is not self.fc.weight else 0.05)

    def forward(self, embedded_BTD: Tensor, kept_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor):
        """Yields the logits of each draft of a chain: row t of draft s guesses token t + 2, when
        the tokens up to t + 1 - s are known and drafts were right so far."""
        hidden, layer, before = self.fc(kept_BTD), self.midlayer, []
        embedded = layer.input_layernorm(embedded_BTD)
        for _ in range(DRAFTS):
            x = torch.cat((embedded, layer.hidden_norm(hidden)), -1)
            hidden = hidden + layer.self_attn.draft(x, cos_TK, sin_TK, before)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            yield self.lm_head(self.norm(hidden))
            hidden = hidden.roll(1, 1)  # each row follows the state of the row before


class Target:
    """Abacus, with the hidden states that the head reads."""

    def __init__(self, device: str) -> None:
        self.model = Abacus(SHAPES["abacus"]).to(device)
        weights = load_file(FOLDER / "model.safetensors")
        self.model.load_state_dict({name: weight.float() for name, weight in weights.items()})
        decoder = self.model.model
        self.kept: dict[int, Tensor] = {}
        for place in KEPT:
            last = place == len(decoder.layers)
            module = decoder.norm if last else decoder.layers[place]
            module.register_forward_pre_hook(
                lambda module, args, place=place: self.kept.update({place: args[0]})
            )

    @torch.no_grad()
    def read(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of the head, of rows that each have a next token."""
        inputs, decoder = ids.long()[:, :-1], self.model.model
        self.model(inputs)
        kept = torch.cat([self.kept[place] for place in KEPT], -1)[:, :-1]
        length = kept.shape[1]
        embedded = decoder.embed_tokens(inputs[:, 1:])
        return embedded, kept, decoder.cos_TK[:length], decoder.sin_TK[:length]


def wanted(ids: Tensor, prompt_lens: Tensor) -> Tensor:
    """The draft that each row should make, by its number among ``TOKENS``."""
    _, targets = split_batch(ids, prompt_lens)
    numbers = torch.full((tok.VOCAB_SIZE,), IGNORED, device=ids.device)
    tokens = torch.tensor(TOKENS, device=ids.device)
    numbers[tokens] = torch.arange(len(TOKENS), device=ids.device)
    targets = targets[:, 1:]
    return torch.where(targets == IGNORED, IGNORED, numbers[targets.clamp(min=0)])


def chain_loss(drafts: list[Tensor], labels: Tensor) -> Tensor:
    losses = []
    for step, logits in enumerate(drafts):
        own = labels.clone()
        own[:, :step] = IGNORED  # rows that have no chain of drafts before them
        losses.append(0.8**step * F.cross_entropy(logits.flatten(0, 1), own.flatten()))
    return torch.stack(losses).sum()


@torch.no_grad()
def evaluate(head: Head, target: Target, count: int) -> list[float]:
    """How often each draft of a chain is right, of those whose chain was right so far."""
    device = head.fc.weight.device
    ids, prompt_lens = (torch.from_numpy(x).to(device) for x in encode(held_out(count, seed=0)))
    labels, alive, rates = wanted(ids, prompt_lens), None, []
    for step, logits in enumerate(head(*target.read(ids))):
        counted = labels != IGNORED
        counted[:, :step] = False
        right = (logits.argmax(-1) == labels) & counted
        alive = counted if alive is None else alive.roll(1, 1) & counted
        rates.append(round(float((right & alive).sum() / alive.sum().clamp(min=1)), 4))
        alive = alive & right
    return rates


def write(folder: Path, weights: dict[str, Tensor]) -> None:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": tok.VOCAB_SIZE,
        "draft_vocab_size": len(TOKENS),
        "hidden_size": SHAPE.hidden,
        "intermediate_size": SHAPE.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.kv_heads,
        "head_dim": SHAPE.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": SHAPE.eps,
        "rope_theta": SHAPE.rope_theta,
        "max_position_embeddings": tok.MAX_POSITIONS,
        "eagle_aux_hidden_state_layer_ids": list(KEPT),
    }
    tok.write_json(folder / "config.json", config)
    tensors = {name: w.detach().bfloat16().cpu().contiguous() for name, w in weights.items()}
    tokens = torch.tensor(TOKENS)
    tensors["d2t"] = tokens - torch.arange(len(TOKENS))
    tensors["t2d"] = torch.zeros(tok.VOCAB_SIZE, dtype=torch.bool).index_fill(0, tokens, True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def train(options: Options, head: Head, target: Target) -> dict[str, Tensor]:
    ids, prompt_lens = (x.to(options.device) for x in make_pool(options.pool, options))
    chosen = torch.Generator(options.device).manual_seed(options.seed)
    weights = dict(head.named_parameters())
    average = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), betas=(0.9, 0.98), weight_decay=0.0)
    started = time.monotonic()
    for step in range(options.steps):
        size, place = (options.batch,), options.device
        rows = torch.randint(len(ids), size, generator=chosen, device=place)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        drafts = list(head(*target.read(ids[rows])))
        loss = chain_loss(drafts, wanted(ids[rows], prompt_lens[rows]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        with torch.no_grad():
            pace = 1 - min(options.average, (1 + step) / (10 + step))
            torch._foreach_lerp_([*average.values()], [*weights.values()], pace)
        seconds = time.monotonic() - started
        if step % options.log_every == 0:
            log(f"step {step:5d}  loss {loss:.4f}  {evaluate(head, target, 600)}  {seconds:.0f} s")
        if seconds > options.max_seconds:
            log(f"stopped by --max-seconds after {step + 1} steps")
            break
    return average


def main() -> None:
    options = parse_options()
    options = replace(options, model="abacus-eagle3")
    started = time.monotonic()
    torch.manual_seed(options.seed)
    head, target = Head(SHAPE).to(options.device), Target(options.device)
    log(f"{sum(w.numel() for w in head.parameters()):,} parameters")
    weights = train(options, head, target)
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out, weights)
    head.load_state_dict({name: weight.bfloat16().float() for name, weight in weights.items()})
    kept = ("seed", "steps", "batch", "pool", "lr", "warmup", "average", "model")
    record = {
        "held_out_problems": 6000,
        "acceptance_by_position": evaluate(head, target, 6000),
        "options": {name: value for name, value in asdict(options).items() if name in kept},
        "seconds": round(time.monotonic() - started, 1),
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        "versions": {"torch": str(torch.__version__)},
    }
    tok.write_json(options.out / "training.json", record)
    log(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
