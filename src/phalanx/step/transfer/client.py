"""The reading side: short blocking calls, each on a connection of its own."""

from __future__ import annotations

import msgspec

from phalanx.clock import Clock, SystemClock
from phalanx.errors import RequestFailedError
from phalanx.schema.handoff import Handle, Source
from phalanx.step.transfer.base import TAKEN, Ending, PageRead, Sink
from phalanx.step.transfer.channels import channel_of
from phalanx.step.transfer.deadline import Deadline
from phalanx.step.transfer.frames import (
    Call,
    Ended,
    FrameError,
    Header,
    Read,
    Refused,
    Release,
    encoded,
    receive_answer,
)

READ_TIMEOUT_S = 120.0
SILENCE_TIMEOUT_S = 60.0
"""How long a holder may send nothing."""
RELEASE_TIMEOUT_S = 5.0
MAX_MESSAGE_CHARS = 2000
"""Of why a hold ends; more would not fit a call."""


def read(handle: Handle, wanted: PageRead, sink: Sink, clock: Clock | None = None) -> None:
    """Read into `sink`; raises `RequestFailedError` saying what kept it from that."""
    source = handle.source
    deadline = Deadline(clock or SystemClock(), READ_TIMEOUT_S, SILENCE_TIMEOUT_S)
    try:
        channel = channel_of(source)
        with channel.connect(source) as connection:
            deadline.limit(connection)
            connection.sendall(encoded(Read(source.token, handle.hold, wanted)))
            _check(receive_answer(connection, deadline), sink)
            channel.receive(connection, sink, deadline)
        sink.finish()
    except (OSError, FrameError) as error:
        raise RequestFailedError(
            f"the computed prompt cannot be read at {place(source)}: {error}"
        ) from error


def release(handle: Handle, ending: Ending = TAKEN) -> None:
    """End a hold; raises `RequestFailedError` where its engine does not answer."""
    source = handle.source
    told = msgspec.structs.replace(ending, message=ending.message[:MAX_MESSAGE_CHARS])
    _ask(source, Release(source.token, handle.hold, told), RELEASE_TIMEOUT_S)


def _ask(source: Source, call: Call, timeout_s: float) -> Ended:
    deadline = Deadline(SystemClock(), timeout_s, timeout_s)
    try:
        with channel_of(source).connect(source) as connection:
            deadline.limit(connection)
            connection.sendall(encoded(call))
            answer = receive_answer(connection, deadline)
    except (OSError, FrameError) as error:
        raise RequestFailedError(f"{place(source)} does not answer: {error}") from error
    if not isinstance(answer, Ended):
        raise RequestFailedError(f"{place(source)} refused a call: {answer}")
    return answer


def _check(answer: object, sink: Sink) -> None:
    if isinstance(answer, Refused):
        raise ConnectionError(answer.message)
    if answer != Header(sink.num_chunks, sink.chunk_bytes):
        raise ConnectionError(
            f"it sends {answer}; wanted are {sink.num_chunks} chunks of {sink.chunk_bytes} bytes"
        )


def place(source: Source) -> str:
    """Where that is, for errors."""
    if source.scheme == "tcp":
        return f"{source.host}:{source.port}"
    return f"the socket {source.host!r} of this machine"
