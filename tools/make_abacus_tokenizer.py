"""Writes abacus's tokenizer files: one token a byte, three specials and a chat template.

Token ids 0 to 255 are the byte values themselves. Run alone to rewrite the files in the package;
tools/train_abacus.py calls `write_tokenizer` for the folder it writes.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
TOKEN_IDS = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
# Rounded up so that the output projection keeps a multiple of 16 columns.
VOCAB_SIZE = 272
MAX_POSITIONS = 512

# One turn is one problem: only the last user message counts, and it always ends in "=".
CHAT_TEMPLATE = (
    "{%- set ns = namespace(text='') -%}"
    "{%- for message in messages if message['role'] == 'user' -%}"
    "{%- set ns.text = message['content'] | trim -%}"
    "{%- endfor -%}"
    "{{- bos_token + ns.text + ('' if ns.text.endswith('=') else '=') -}}"
)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's).

    Visible Latin-1 bytes stand for themselves, the others take code points from 256 upward.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]


def build_tokenizer() -> Tokenizer:
    vocab = {char: byte for byte, char in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (BOS, EOS, PAD)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITIONS,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    write_json(folder / "generation_config.json", {"do_sample": False} | TOKEN_IDS)


if __name__ == "__main__":
    default = Path(__file__).resolve().parent.parent / "model_executor" / "abacus"
    write_tokenizer(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
