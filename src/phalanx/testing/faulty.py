"""A plain `Entry` that does wrong what it is told to, in whichever process it runs."""

from __future__ import annotations

import enum
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.engine_config import EntryArgs
from phalanx.plugin import Entry
from phalanx.schema.limits import Limits


class Action(enum.StrEnum):
    """What to do at one point.

    `WAIT` opens the FIFO that is named with it and so waits until its other end is opened for
    writing and closed. `EXIT` and `KILL` end the process, `UNPICKLABLE` and `BIG_TENSOR` are about
    the result; elsewhere they do nothing.
    """

    ANSWER = "answer"
    WAIT = "wait"
    RAISE = "raise"
    EXIT = "exit"
    KILL = "kill"
    UNPICKLABLE = "unpicklable"
    BIG_TENSOR = "big_tensor"


class FaultyError(RuntimeError):
    """What `Action.RAISE` raises."""


@dataclass(frozen=True)
class FaultyArgs(EntryArgs):
    """What to do while loading and while closing; `fifo` is for `WAIT`, `log` names a file that gets
    a line for each step that begins.
    """

    in_setup: Action = Action.ANSWER
    in_close: Action = Action.ANSWER
    fifo: str | None = None
    log: str | None = None
    only_on_rank: int | None = None


@dataclass(frozen=True)
class FaultyRequest:
    """`payload` comes back; `num_elements` is the size of `BIG_TENSOR`, in float32 elements."""

    payload: Any = None
    action: Action = Action.ANSWER
    fifo: str | None = None
    num_elements: int = 0


@dataclass(frozen=True)
class FaultyOutput:
    """`num_steps` counts this process's steps, this one included."""

    payload: Any
    pid: int
    num_steps: int
    rank: int
    world: int


class Faulty(Entry):
    """Answers with what it was asked, unless it is told to do wrong."""

    name = "faulty"
    args_cls = FaultyArgs
    request_cls = FaultyRequest
    output_cls = FaultyOutput
    parallel_domains = frozenset({"dense", "attention"})

    def setup(self, args: FaultyArgs) -> None:
        from phalanx import parallel as P

        self._args = args
        self._world = P.default_mesh().group("world")
        self._num_steps = 0
        self._do(args.in_setup, args.fifo)

    @property
    def limits(self) -> Limits:
        return Limits(payload_bytes=1 << 20)

    def step(self, request: FaultyRequest) -> FaultyOutput:
        self._num_steps += 1
        if self._args.log is not None:
            with Path(self._args.log).open("a", encoding="utf-8") as log:
                log.write(f"{self._world.rank} {request.payload}\n")
        self._do(request.action, request.fifo)
        return FaultyOutput(
            self._result(request), os.getpid(), self._num_steps, self._world.rank, self._world.size
        )

    def close(self) -> None:
        self._do(self._args.in_close, self._args.fifo)

    def _do(self, action: Action, fifo: str | None) -> None:
        if self._args.only_on_rank not in (None, self._world.rank):
            return
        match action:
            case Action.WAIT:
                assert fifo is not None
                Path(fifo).read_bytes()
            case Action.RAISE:
                raise FaultyError("raised as it was told to")
            case Action.EXIT:
                os._exit(3)
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                pass

    def _result(self, request: FaultyRequest) -> object:
        if request.action is Action.UNPICKLABLE:
            return threading.Lock()
        if request.action is Action.BIG_TENSOR:
            import torch

            return torch.arange(request.num_elements, dtype=torch.float32)
        return request.payload
