"""Pieces never split a character, and joined they are the text of all ids."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.processing.text import IncrementalDetokenizer, TextTokenizer

KINDS = ["byte_level", "byte_fallback", "word_piece"]
TEXTS = [
    "The sea is wide.",
    "Grüße 北京 😀😁 naïve",
    " two  spaces\n\nand lines ",
    "मानक हिन्दी ქართული",
    "",
]


def in_pieces(
    tokenizer: TextTokenizer, ids: Sequence[int], sizes: Sequence[int], skip: bool
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(detokenizer.feed(ids[at : at + size]))
        at += size
    pieces += [detokenizer.feed([token_id]) for token_id in ids[at:]]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_random_ids_join_to_the_whole(tokenizers, kind, data):
    tokenizer = tokenizers[kind]
    token_id = st.integers(0, tokenizer.vocab_size + 2)
    if tokenizer.byte_fallback_ids:
        token_id |= st.sampled_from(sorted(tokenizer.byte_fallback_ids))
    ids = data.draw(st.lists(token_id, max_size=40))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=8))
    skip = data.draw(st.booleans())
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(in_pieces(tokenizer, ids, sizes, skip)) == whole


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_of_a_text_holds_a_split_character(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    pieces = in_pieces(tokenizer, ids, (), True)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_survives_byte_level_pieces(byte_level, text):
    pieces = in_pieces(byte_level, byte_level.encode(text), (), False)
    assert "".join(pieces) == text


def test_text_comes_with_the_token_that_completes_it(byte_level):
    ids = byte_level.encode("a北b")
    pieces = in_pieces(byte_level, ids, (), True)
    assert pieces[0] == "a"
    assert "北" in pieces
    assert pieces[-1] == ""


def test_incomplete_character_comes_with_finish(byte_level):
    first_byte = byte_level.encode("ქ")[0]
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.feed([first_byte]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_window_does_not_grow_with_the_text(tokenizers):
    """Work per token is constant: the calls decode a bounded number of ids."""
    tokenizer = tokenizers["byte_fallback"]
    longest = 0
    decode = tokenizer.decode

    class Watched(TextTokenizer):
        def decode(self, ids, *, skip_special_tokens=True):
            nonlocal longest
            longest = max(longest, len(ids))
            return decode(ids, skip_special_tokens=skip_special_tokens)

    detokenizer = IncrementalDetokenizer(Watched(tokenizer.directory))
    ids = tokenizer.encode("the sea " * 200)
    text = "".join(detokenizer.feed([token_id]) for token_id in ids) + detokenizer.finish()
    assert text == "the sea " * 200
    assert longest <= 4


def test_special_tokens_show_when_asked_for(byte_level):
    ids = byte_level.encode("<|im_start|>a<|im_end|>")
    assert "".join(in_pieces(byte_level, ids, (), False)) == "<|im_start|>a<|im_end|>"
    assert "".join(in_pieces(byte_level, ids, (), True)) == "a"
