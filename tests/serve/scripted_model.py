"""A model folder that writes a script: a token is followed by the one behind it there.

Its embeddings are one-hot, its layer adds nothing, and its head sends each token to its successor.
The vocabulary has single bytes and the script's texts, each as one token; a text may lead to one
text only, so that a script is a chain, which may join another or go round.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..engine.toy import TOKENIZER

EOS = "<|eos|>"
_SURE = 40.0
"""Logit of the successor; those of others are 0, so that sampling takes it too."""


def write_model(
    folder: Path, chains: Sequence[Sequence[str]], template: str, special: Sequence[str] = ()
) -> Path:
    """Write a model of some chains of texts to ``folder``.

    Args:
        template: its chat template, in Jinja.
        special: texts that are special tokens.
    """
    folder.mkdir(exist_ok=True)
    stored = json.loads((TOKENIZER.folder / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in stored["added_tokens"]}
    like, next_id = stored["added_tokens"][0], 1 + max(ids.values())
    for text in dict.fromkeys([*special, *itertools.chain(*chains)]):
        if text not in ids:
            token = {**like, "id": next_id, "content": text, "special": text in special}
            stored["added_tokens"].append(token)
            ids[text], next_id = next_id, next_id + 1
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    facts = {"eos_token": EOS, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    size = (next_id + 63) // 64 * 64
    config = LlamaConfig(
        vocab_size=next_id,
        hidden_size=size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=size // 64,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ids[EOS],
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        for token_id in range(next_id):
            model.get_input_embeddings().weight[token_id, token_id] = 1.0
        for chain in chains:
            for text, behind in itertools.pairwise(chain):
                # The norm makes of a one-hot row one of the length sqrt(size).
                model.lm_head.weight[ids[behind], ids[text]] = _SURE / size**0.5
    model.save_pretrained(folder)
    return folder
