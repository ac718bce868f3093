"""What a parent and its workers say to each other: one packet a message, msgpack tagged by type.

Requests and results ride along as a `PayloadRef`; `channel` puts them where it says.
"""

from __future__ import annotations

import enum

import msgspec

from phalanx.engine.refusals import Refusal
from phalanx.engine.workers.payload import buffer_spans
from phalanx.schema.control import ControlAnswer, ControlOp, Question
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import LoopStatistics


class Place(enum.IntEnum):
    """Where a payload's bytes are: in the packet itself, in the sender's shared arena, or in a
    shared-memory file of its own, whose descriptor comes with the packet.
    """

    PACKET = 0
    ARENA = 1
    FILE = 2


class PayloadRef(msgspec.Struct, frozen=True, array_like=True):
    """An encoded object: its pickle and its out-of-band buffers, one after another.

    `sizes` are the bytes of the pickle, then of each buffer. `position` is where it begins in the
    arena and `sequence` counts the payloads before it there. `data` is empty unless `place` is
    PACKET. `by_handle`: some tensor of the object is a handle to its sender's memory.
    """

    place: Place
    sizes: tuple[int, ...]
    position: int = 0
    sequence: int = 0
    data: bytes = b""
    by_handle: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the pickle and its buffers, and of what lies between them."""
        spans = buffer_spans(self.sizes)
        return spans[-1][1] if spans else self.sizes[0]


class Start(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Execute a request; `number` is unique within the engine and grows."""

    number: int
    rid: str
    payload: PayloadRef


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """End this request soon, unless it has ended."""

    number: int


class Apply(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Apply an operation between two steps; answered by an `Answer` with the same number.

    `tensors` are those of a `ReplaceWeights`, which has none itself then.
    """

    number: int
    op: ControlOp | Question
    tensors: PayloadRef | None = None


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Close and leave; the worker's last message is `Stopped`."""

    reason: str


Command = Start | Cancel | Apply | Shutdown


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A worker's first message: who it is, before anything heavy is loaded."""

    worker_id: int
    replica_id: int
    replica_rank: int
    pid: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The worker's runtime is built. `metadata`: plugin, ranks, group ranks, world, device.

    `statistics` are a batching plugin's first counters.
    """

    worker_id: int
    limits: Limits
    metadata: dict[str, str | int | dict[str, int]]
    statistics: LoopStatistics | None = None


class Events(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What happened since the last message: a pickled list of (request number, event).

    With `execution_s`, the time that a plain plugin computed, it is one request's number and its
    output. `statistics` are a batching plugin's newest counters.
    """

    payload: PayloadRef
    execution_s: float | None = None
    statistics: LoopStatistics | None = None


class Finished(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A rank that does not answer has finished its part of a plain plugin's request."""

    number: int


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The outcome of an `Apply`; `refusal` says why it has none."""

    number: int
    outcome: ControlAnswer
    refusal: Refusal | None = None


class Crashed(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The worker cannot go on: what raised, in which phase, during which request."""

    phase: str
    error: str
    traceback: str
    number: int | None = None


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The last message of an orderly end."""


Reply = Hello | Ready | Events | Finished | Answer | Crashed | Stopped
