"""How streams are cut into chunks: the policies, the order of items, and the one final chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigurationError
from phalanx.loop.walks import Fixed, LeftContext, Sliding, StreamBuffer

POLICIES = st.one_of(
    st.integers(1, 6).flatmap(lambda w: st.builds(Sliding, st.just(w), st.integers(1, w))),
    st.builds(LeftContext, st.integers(1, 5), st.integers(0, 7)),
    st.builds(Fixed, st.integers(1, 5)),
)


def fill(buffer: StreamBuffer, items) -> None:
    for item in items:
        buffer.register(item)
        buffer.put(item, item)


def drain(buffer: StreamBuffer, most: int = 100) -> list:
    chunks = []
    while buffer.ready and len(chunks) < most:
        chunks.append(buffer.take())
    return chunks


def chunks_of(policy, num_items: int) -> list[tuple[list[int], bool]]:
    buffer = StreamBuffer(policy)
    fill(buffer, range(num_items))
    buffer.finish()
    return [(list(chunk.items), chunk.final) for chunk in drain(buffer)]


def test_item_8_5_10_sliding_windows_overlap():
    assert chunks_of(Sliding(4, 2), 7) == [
        ([0, 1, 2, 3], False),
        ([2, 3, 4, 5], False),
        ([4, 5, 6], True),
    ]


def test_item_8_5_10_left_context_leads_all_but_the_first_chunk():
    assert chunks_of(LeftContext(3, 1), 8) == [
        ([0, 1, 2], False),
        ([2, 3, 4, 5], False),
        ([5, 6, 7], True),
    ]


def test_item_8_5_10_fixed_chunks_end_with_an_empty_final_one():
    assert chunks_of(Fixed(2), 4) == [([0, 1], False), ([2, 3], False), ([], True)]


@pytest.mark.parametrize("policy", [Sliding(4, 2), LeftContext(3, 1), Fixed(2)])
def test_item_8_5_10_an_empty_stream_is_one_empty_final_chunk(policy):
    assert chunks_of(policy, 0) == [([], True)]


def test_item_8_5_10_an_item_that_arrives_early_waits_for_its_predecessor():
    buffer = StreamBuffer(Fixed(2))
    for item in "abc":
        buffer.register(item)
    buffer.put("b", "b")
    buffer.put("c", "c")
    buffer.finish()
    assert not buffer.ready, "the first item is still on its way"
    buffer.put("a", "a")
    assert [chunk.items for chunk in drain(buffer)] == [("a", "b"), ("c",)]


def test_the_end_waits_for_what_is_registered():
    buffer = StreamBuffer(Fixed(2))
    buffer.register(0)
    buffer.finish()
    assert not buffer.ready
    buffer.put(0, 0)
    (chunk,) = drain(buffer)
    assert (chunk.items, chunk.final) == ((0,), True)
    assert buffer.closed


def test_item_8_5_10_a_policy_that_continues_gives_empty_chunks_for_ever():
    buffer = StreamBuffer(Fixed(2, continue_after_done=True))
    fill(buffer, range(3))
    buffer.finish()
    chunks = drain(buffer, 20)
    assert [chunk.items for chunk in chunks] == [(0, 1), (2,)] + [()] * 18
    assert not any(chunk.final for chunk in chunks)
    assert not buffer.closed


def test_what_must_not_happen_is_noticed():
    buffer = StreamBuffer(Fixed(2))
    with pytest.raises(AssertionError, match="was not registered"):
        buffer.put(0, 0)
    with pytest.raises(AssertionError, match="no chunk is ready"):
        buffer.take()
    buffer.finish()
    with pytest.raises(AssertionError, match="after the end of the stream"):
        buffer.register(0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sliding(0, 1), "window=0 must be at least 1"),
        (lambda: Sliding(2, 3), "stride=3 must be from 1 to 2"),
        (lambda: LeftContext(0, 0), "chunk=0 must be at least 1"),
        (lambda: LeftContext(1, -1), "context=-1 must be at least 0"),
        (lambda: Fixed(0), "size=0 must be at least 1"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


@given(policy=POLICIES, num_items=st.integers(0, 25), data=st.data())
def test_item_8_5_10_chunks_do_not_depend_on_when_they_are_taken(policy, num_items, data):
    """Whenever items arrive and chunks are taken, they are those of the whole stream; what is new in
    them makes up the stream, and exactly the last one is final."""
    buffer = StreamBuffer(policy)
    chunks = []
    arrivals = data.draw(st.permutations(range(num_items)))
    registered = 0
    for item in arrivals:
        while registered <= item:
            buffer.register(registered)
            registered += 1
        buffer.put(item, item)
        if data.draw(st.booleans()):
            chunks += drain(buffer)
    buffer.finish()
    chunks += drain(buffer)
    assert [(list(c.items), c.final) for c in chunks] == chunks_of(policy, num_items)
    new = [item for chunk in chunks for item in chunk.items[chunk.num_context :]]
    assert new == list(range(num_items))
    for index, chunk in enumerate(chunks):
        assert chunk.items == tuple(range(chunk.start, chunk.start + len(chunk.items)))
        assert chunk.final == (index == len(chunks) - 1)
        first, end = policy.bounds(index)
        assert chunk.final or (chunk.start, len(chunk.items)) == (first, end - first)
