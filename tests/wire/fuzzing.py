"""Messages that are almost right: honest ones with bytes changed, cut, doubled or inserted."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psutil
from hypothesis import strategies as st

from phalanx.errors import InvalidRequestError

LONG_S = 4.0
MAX_GROWTH_BYTES = 200 << 20
_TELLING = (0x00, 0x7F, 0x80, 0x90, 0xC1, 0xC6, 0xC9, 0xDD, 0xDF, 0xFF)


def spoilt(message: bytes, source: random.Random) -> bytes:
    """`message` with a few changes."""
    data = bytearray(message)
    for _ in range(source.randint(1, 6)):
        where = source.randrange(len(data) + 1)
        size = source.choice((1, 1, 2, 4, 16))
        change = source.randrange(5)
        if change == 0:
            data[where : where + size] = source.randbytes(size)
        elif change == 1:
            data[where : where + 1] = bytes([source.choice(_TELLING)])
        elif change == 2:
            del data[where : where + size]
        elif change == 3:
            data[where:where] = source.randbytes(size)
        else:
            data[where:where] = data[where : where + 64]
    return bytes(data[: source.randrange(len(data) + 1)] if source.random() < 0.1 else data)


def mutations(messages: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Bytes of any kind, and `messages` with changes that hypothesis can repeat."""
    return st.one_of(
        st.binary(max_size=64),
        st.builds(spoilt, st.sampled_from(messages), st.randoms(use_true_random=False)),
    )


def outcome(decode: Callable[[bytes], object], data: bytes) -> str:
    """How decoding ended. Anything but a value or one of our refusals is raised."""
    try:
        decode(data)
    except InvalidRequestError as error:
        assert str(error)
        return type(error).__name__
    return "decoded"


def fuzz_for(seconds: float, decode: Callable[[bytes], object], messages: Sequence[bytes]) -> None:
    """Decode spoilt messages for that long; memory must not grow."""
    source = random.Random(5)
    memory = psutil.Process().memory_info
    before = memory().rss
    endings = set()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        endings.add(outcome(decode, spoilt(source.choice(messages), source)))
    assert {"decoded", "MalformedRequestError", "InvalidRequestError"} <= endings
    assert memory().rss - before < MAX_GROWTH_BYTES


@contextmanager
def taking_at_most(num_bytes: int) -> Iterator[None]:
    """What runs inside must not take more memory than that at once."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        assert tracemalloc.get_traced_memory()[1] - before < num_bytes
    finally:
        tracemalloc.stop()
