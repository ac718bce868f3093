"""A plain `Entry` that answers with what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.engine_config import EntryArgs
from phalanx.errors import InvalidRequestError
from phalanx.plugin import Entry
from phalanx.schema.limits import Limits


@dataclass(frozen=True)
class EchoArgs(EntryArgs):
    """`max_length`: longest text that is accepted."""

    max_length: int = 1000


@dataclass(frozen=True)
class EchoRequest:
    """`before` runs inside the step, where a test can wait, observe or raise."""

    text: str
    before: Callable[[], None] | None = None


@dataclass(frozen=True)
class EchoOutput:
    """The text, and the thread that computed it."""

    text: str
    thread: threading.Thread


class Echo(Entry):
    """Answers one request at a time."""

    name = "echo"
    args_cls = EchoArgs
    request_cls = EchoRequest
    output_cls = EchoOutput

    @staticmethod
    def validate(request: EchoRequest, limits: Limits) -> None:
        if limits.payload_bytes is not None and len(request.text) > limits.payload_bytes:
            raise InvalidRequestError(
                f"text has {len(request.text)} characters; at most {limits.payload_bytes} are "
                "allowed",
                field="text",
            )

    def setup(self, args: EchoArgs) -> None:
        self._limits = Limits(payload_bytes=args.max_length)
        self.num_closes = 0

    @property
    def limits(self) -> Limits:
        return self._limits

    def step(self, request: EchoRequest) -> EchoOutput:
        if request.before is not None:
            request.before()
        return EchoOutput(request.text, threading.current_thread())

    def close(self) -> None:
        self.num_closes += 1
