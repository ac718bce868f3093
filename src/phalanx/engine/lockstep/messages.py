"""What other threads leave for the thread that owns a batching plugin."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from phalanx.engine.requests import LiveRequest
from phalanx.schema.control import ControlAnswer, ControlOp, Question


@dataclass(frozen=True, slots=True)
class Start:
    """Give an accepted request to the plugin."""

    live: LiveRequest
    request: Any


@dataclass(frozen=True, slots=True)
class Cancel:
    """End this request soon, unless it has ended."""

    live: LiveRequest


@dataclass(frozen=True, slots=True)
class Control:
    """Apply an operation, or answer a question. `number` counts both."""

    number: int
    op: ControlOp | Question
    answer: Future[ControlAnswer]


@dataclass(frozen=True, slots=True)
class Close:
    """Leave the loop."""


@dataclass(frozen=True, slots=True)
class Wake:
    """The plugin has something to do, for a reason that is no message of ours."""


Message = Start | Cancel | Control | Close
