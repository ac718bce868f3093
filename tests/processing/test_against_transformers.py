"""The packaged model's tokenizer and chat template agree with transformers'."""

from pathlib import Path

import pytest

from phalanx import checkpoints
from phalanx.processing.text import IncrementalDetokenizer, TextTokenizer

TEXTS = [
    "a  12",
    "The capital of France is Paris.",
    "def f(x):\n\treturn x  # 3.14\n",
    "Grüße 北京 😀 naïve",
    "",
    " leading and trailing ",
]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello there"},
    ],
]


@pytest.fixture(scope="module")
def directory() -> Path:
    return checkpoints.checkpoint_dir("smollm2-135m")


@pytest.fixture(scope="module")
def ours(directory: Path) -> TextTokenizer:
    return TextTokenizer(directory)


@pytest.fixture(scope="module")
def theirs(directory: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def test_digits_are_split_before_white_space(ours):
    assert ours.encode("a  12") == [81, 256, 33, 34]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text(ours, theirs, text):
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    detokenizer = IncrementalDetokenizer(ours)
    assert "".join(detokenizer.feed([one]) for one in ids) + detokenizer.finish() == text


@pytest.mark.parametrize("messages", CHATS)
def test_chat_prompts(ours, theirs, messages):
    for generation in (True, False):
        assert ours.render_chat(messages, add_generation_prompt=generation) == (
            theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        )


def test_continued_message(ours, theirs):
    assert ours.render_chat(CHATS[1], continue_final_message=True) == (
        theirs.apply_chat_template(CHATS[1], tokenize=False, continue_final_message=True)
    )


def test_special_ids(ours, theirs):
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.special_ids >= {0, 1, 2}
