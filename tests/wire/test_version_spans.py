"""Spans of versions, in pieces."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.wire.version_spans import after, extended

TOKENS = st.lists(st.sampled_from("ab"), max_size=12)


def spans_of(tokens: list[str]) -> list[tuple[str, int]]:
    spans: list[tuple[str, int]] = []
    extended(spans, [(one, 1) for one in tokens])
    return spans


@given(TOKENS, st.integers(0, 14))
def test_cut_anywhere_they_are_the_rest(tokens, num_seen):
    assert list(after(spans_of(tokens), num_seen)) == spans_of(tokens[num_seen:])


@given(TOKENS, TOKENS)
def test_pieces_join_to_the_whole(first, second):
    spans = spans_of(first)
    extended(spans, spans_of(second))
    assert spans == spans_of(first + second)
