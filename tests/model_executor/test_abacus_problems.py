"""The bundled model's problems, tokenizer and files.

Answers are recomputed here from the prompt's text alone, by other means than the generator's.
"""

import json
import re
import struct
from collections import Counter

import pytest
from tokenizers import Tokenizer

from fusewright.model_executor.abacus import FOLDER
from fusewright.model_executor.abacus.problems import (
    TASKS,
    Problem,
    held_out,
    is_held_out,
    training,
)

BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
HELD_OUT_ONE_DIGIT_SUMS = [
    "0+0=",
    "0+8=",
    "0+9=",
    "2+7=",
    "3+7=",
    "4+9=",
    "5+6=",
    "6+7=",
    "8+3=",
    "9+3=",
]
WEIGHTS = FOLDER / "model.safetensors"
needs_weights = pytest.mark.skipif(not WEIGHTS.exists(), reason="abacus is not trained yet")


def independent_answer(prompt: str) -> str:
    if match := re.fullmatch(r"(\d{1,3})([+-])(\d{1,3})=", prompt):
        a, sign, b = match.groups()
        return str(sum((int(a), int(sign + b))))
    word, _, rest = prompt.removesuffix("=").partition(" ")
    assert prompt.endswith("=")
    if word == "reverse":
        assert re.fullmatch(r"[a-z]{1,8}", rest)
        return "".join(reversed(rest))
    if word == "sort":
        assert re.fullmatch(r"\d( \d){1,5}", rest)
        return " ".join(digit for digit in "0123456789" for _ in range(rest.count(digit)))
    assert re.fullmatch(r"\d{1,3}( \d{1,3}){1,4}", rest)
    ascending = sorted(rest.split(), key=lambda number: (len(number), number))
    return {"min": ascending[0], "max": ascending[-1]}[word]


def task_of(prompt: str) -> str:
    word = prompt.split()[0]
    return word if word in TASKS else "add" if "+" in prompt else "sub"


@pytest.fixture(scope="module")
def learned() -> list[Problem]:
    return list(training(20_000, seed=7))


def test_answers_agree_with_an_independent_computation(learned: list[Problem]) -> None:
    for problem in [*learned, *held_out(3000)]:
        assert problem.answer == independent_answer(problem.prompt)
        assert problem.task == task_of(problem.prompt)


def test_training_never_draws_a_held_out_prompt(learned: list[Problem]) -> None:
    assert not any(is_held_out(problem.prompt) for problem in learned)
    tested = {problem.prompt for seed in range(3) for problem in held_out(2000, seed)}
    assert all(map(is_held_out, tested))
    assert tested.isdisjoint(problem.prompt for problem in learned)


def test_the_split_is_the_same_in_every_version() -> None:
    """Moving a prompt across the split would let a trained model be tested on what it learned."""
    small = [f"{a}+{b}=" for a in range(10) for b in range(10)]
    kept = [prompt for prompt in small if is_held_out(prompt)]
    assert kept == HELD_OUT_ONE_DIGIT_SUMS


def test_about_a_tenth_of_every_task_is_held_out() -> None:
    sums = [is_held_out(f"{a}+{b}=") for a in range(100) for b in range(100)]
    assert 0.09 < sum(sums) / len(sums) < 0.11


def test_held_out_problems_are_distinct_and_balanced() -> None:
    problems = held_out(1000)
    assert len({problem.prompt for problem in problems}) == 1000
    counts = Counter(problem.task for problem in problems)
    assert set(counts) == set(TASKS)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_problems_depend_on_the_seed_and_nothing_else() -> None:
    assert held_out(200, seed=3) == held_out(400, seed=3)[:200]
    assert held_out(200, seed=3) != held_out(200, seed=4)
    assert list(training(200, seed=3)) == list(training(200, seed=3))
    assert list(training(200, seed=3)) != list(training(200, seed=4))


def test_every_task_and_operand_length_is_practised(learned: list[Problem]) -> None:
    assert {problem.task for problem in learned} == set(TASKS)
    lengths = {
        tuple(map(len, re.findall(r"\d+", p.prompt))) for p in learned if p.task in ("add", "sub")
    }
    assert lengths == {(a, b) for a in (1, 2, 3) for b in (1, 2, 3)}
    assert any(p.answer.startswith("-") for p in learned)


def test_task_weights_choose_the_tasks() -> None:
    assert {p.task for p in training(100, seed=0, weights={"sort": 1, "max": 2})} == {"sort", "max"}


@pytest.mark.parametrize("n", [-1, 10_000_000])
def test_an_unreachable_number_of_problems_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=str(n)):
        held_out(n)


@pytest.mark.parametrize(
    "text",
    ["37+58=", "", " a  b\n\tc ", "Grüße 日本語 🦊", "\x00\x7f\u0080\ufeff\U0010ffff", "e\u0301"],
)
def test_tokenizer_round_trips_any_text_one_token_a_byte(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids == [BOS_ID, *text.encode()]
    assert tokenizer.decode(ids) == text


def test_tokenizer_knows_its_special_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    names = json.loads((FOLDER / "tokenizer_config.json").read_text())
    config = json.loads((FOLDER / "config.json").read_text())
    for kind, token_id in {"bos": BOS_ID, "eos": EOS_ID, "pad": PAD_ID}.items():
        assert tokenizer.token_to_id(names[f"{kind}_token"]) == token_id
        assert config[f"{kind}_token_id"] == token_id
    assert tokenizer.get_vocab_size() <= config["vocab_size"]


@pytest.mark.parametrize("content", ["9-12=", "9-12", " 9-12\n"])
def test_chat_template_asks_the_last_user_message(content: str) -> None:
    jinja2 = pytest.importorskip("jinja2")
    names = json.loads((FOLDER / "tokenizer_config.json").read_text())
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": content},
    ]
    template = jinja2.Environment().from_string(names["chat_template"])
    text = template.render(
        messages=messages, bos_token=names["bos_token"], add_generation_prompt=True
    )
    assert text == names["bos_token"] + "9-12="


@needs_weights
def test_the_model_is_small() -> None:
    """At most 4M parameters, all bfloat16, tied; at most 8 MB in the folder."""
    raw = WEIGHTS.read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    header.pop("__metadata__", None)
    assert "lm_head.weight" not in header
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    sizes = [end - start for start, end in (t["data_offsets"] for t in header.values())]
    assert sum(sizes) // 2 <= 4_000_000
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) <= 8_000_000


@needs_weights
def test_the_trained_model_was_measured_above_its_target() -> None:
    record = json.loads((FOLDER / "training.json").read_text())
    assert record["steps_done"] == record["options"]["steps"]
    for dtype in ("bfloat16", "float32"):
        exact = record[f"bfloat16 weights computed in {dtype}"]["exact_match"]
        assert set(exact) == set(TASKS)
        assert min(exact.values()) >= 0.995
