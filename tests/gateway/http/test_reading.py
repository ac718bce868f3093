"""Requests read in any pieces are the same requests; what is read at a glance, a parser reads alike."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.gateway.http.event_tail import EventTail
from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.request_reader import RequestReader
from phalanx.gateway.http.whole_message import KnownHeads

LENGTH = b"POST /v1/x?q=1 HTTP/1.1\r\nHost: a\r\nX-Y:  b \r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"PUT /c HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    b"5;ext=1\r\nhello\r\n1\r\n!\r\n0\r\ntrailer: x\r\n\r\n"
)
BARE = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: keep-alive\r\n\r\n"
UPGRADE = (
    b"POST /u HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    b"content-length: 5\r\n\r\nGET /"
)
LARGE = b"POST /l HTTP/1.1\r\nhost: a\r\ncontent-length: 40000\r\n\r\n" + b"z" * 40000


class Blind(KnownHeads):
    """Leaves everything to the parser."""

    def request(self, data):
        return None


def read(*pieces: bytes, heads: KnownHeads | None = None) -> list[tuple]:
    reader = RequestReader(HttpLimits(), heads or KnownHeads())
    for piece in pieces:
        reader.feed(piece)
    return [
        (
            request.method,
            request.path,
            request.query,
            sorted(request.pairs),
            b"".join(request.take()),
            request.keep_alive,
            request.complete,
            None if request.refusal is None else request.refusal.status,
        )
        for request in reader.waiting
    ]


@given(
    messages=st.lists(
        st.sampled_from([LENGTH, CHUNKED, BARE, LARGE, UPGRADE]), min_size=1, max_size=4
    ),
    cuts=st.lists(st.integers(0, 120_000), max_size=6),
)
@settings(deadline=None)
def test_requests_cut_anywhere_are_the_same(messages, cuts):
    data = b"".join(messages)
    whole = read(data)
    assert len(whole) == len(messages) and all(one[-2] for one in whole)
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = [data[start:end] for start, end in zip(marks, marks[1:], strict=False)]
    assert read(*pieces) == whole


def test_a_cut_at_every_byte():
    for message in (LENGTH, CHUNKED, BARE, UPGRADE):
        whole = read(message)
        for cut in range(len(message)):
            assert read(message[:cut], message[cut:]) == whole, cut


NAMES = st.sampled_from(
    ["Host", "X-A", "content-type", "Connection", "authorization", "TE", "x-request-id", "Expect"]
)
VALUES = st.sampled_from(
    ["a", "keep-alive", " spaced ", "close", "", "x\ty", "\x80", "100-continue"]
)


@st.composite
def requests(draw) -> bytes:
    fields = draw(st.lists(st.tuples(NAMES, VALUES), max_size=5))
    body = draw(st.sampled_from([b"", b"x", b"hello", b"GET / HTTP/1.1\r\n\r\n"]))
    lines = [draw(st.sampled_from(["GET", "POST"])) + " /p?q HTTP/1.1", "host: h"]
    lines += [f"{name}: {value}" for name, value in fields]
    if draw(st.booleans()):
        length = len(body) + draw(st.sampled_from([0, 0, 0, 1, -1]))
        name = draw(st.sampled_from(["content-length", "Content-Length", "Content-length"]))
        lines.insert(draw(st.integers(1, len(lines))), f"{name}: {max(length, 0)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@given(data=requests(), at=st.integers(0, 200), byte=st.integers(0, 255), change=st.booleans())
@settings(max_examples=150, deadline=None)
@example(LENGTH, 0, 0, False)
@example(LENGTH.replace(b"X-Y:", b"X-Y :"), 0, 0, False)
@example(LENGTH.replace(b"X-Y:", b" X-Y:"), 0, 0, False)
@example(LENGTH.replace(b"X-Y: ", b"X-Y: \n"), 0, 0, False)
@example(LENGTH.replace(b"X-Y:", b"Content-Length: 5\r\nX-Y:"), 0, 0, False)
@example(LENGTH.replace(b"X-Y:", b"Transfer-Encoding: chunked\r\nX-Y:"), 0, 0, False)
def test_what_is_read_at_a_glance_the_parser_reads_alike(data, at, byte, change):
    if change and data:
        at %= len(data)
        data = data[:at] + bytes([byte]) + data[at + 1 :]
    if KnownHeads().request(data) is not None:
        heads = KnownHeads()
        assert read(data, heads=heads) == read(data, heads=heads) == read(data, heads=Blind())


@given(
    events=st.lists(
        st.sampled_from([b"data: a\n\n", b"data: [DONE]\n\n", b": hi\n\n", b"id: 1\n"])
    ),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_events_cut_anywhere_pass_byte_for_byte_and_whole(events, cuts):
    data = b"".join(events)
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    tail, out = EventTail(), b""
    for start, end in zip(marks, marks[1:], strict=False):
        out += tail.passed(data[start:end])
        assert tail.inside or not out or out.endswith(b"\n\n")
    assert out + tail.rest() == data
