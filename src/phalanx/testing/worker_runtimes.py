"""A stand-in for what runs in a worker process: it answers with what it was asked, and misbehaves
where it is told to.

It imports no torch and is ready in milliseconds. A `Misdeed` says what goes wrong and where: those
of a `StandInConfig` happen in a phase of the worker, one that is sent as a request in that request.
"""

from __future__ import annotations

import enum
import os
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, assert_never

import msgspec

from phalanx import settings
from phalanx.engine.workers.messages import (
    Answer,
    Apply,
    Cancel,
    Finished,
    Reply,
    Shutdown,
    Start,
)
from phalanx.engine.workers.runtime import WorkerChannel, WorkerFactorySpec
from phalanx.schema.events import Final
from phalanx.schema.limits import Limits
from phalanx.schema.placement import WorkerPlacement
from phalanx.schema.statistics import LoopStatistics

__all__ = [
    "Deed",
    "Held",
    "Misdeed",
    "MisdeedError",
    "Phase",
    "StandIn",
    "StandInConfig",
    "stand_in",
    "stand_in_factory",
]


class Phase(enum.Enum):
    """Where a worker is when it misbehaves.

    HELLO: it has said hello, and has loaded nothing. LOADING: in its factory. READY: about to say
    that it is ready. RECEIVING: about to take its first command. EXECUTING: inside a request.
    REPLYING: while its answer is being pickled. STOPPING: it was told to leave.
    """

    HELLO = "hello"
    LOADING = "loading"
    READY = "ready"
    RECEIVING = "receiving"
    EXECUTING = "executing"
    REPLYING = "replying"
    STOPPING = "stopping"


class Deed(enum.Enum):
    """What a worker does. ANNOUNCE is nothing more than that. WAIT goes on when its pipe has been opened for writing and closed; HANG
    never does, and SIGTERM does not end it. DISCONNECT closes the connection and hangs. ORPHAN is
    KILL with a child left behind, which holds the connection until the gate is opened and closed.
    FLOOD is SEND for ever.
    """

    ANNOUNCE = "announce"
    EXIT = "exit"
    KILL = "kill"
    RAISE = "raise"
    HANG = "hang"
    WAIT = "wait"
    DISCONNECT = "disconnect"
    SEND = "send"
    FLOOD = "flood"
    ORPHAN = "orphan"


class MisdeedError(Exception):
    """What RAISE raises."""


@dataclass(frozen=True)
class Misdeed:
    """Misbehave in `phase`; only in worker `worker_id`, where it is given.

    First the worker opens the named pipe `announce`, where there is one, writes a line with its pid
    to it and keeps it open until it ends. `gate` is the named pipe of WAIT and ORPHAN, `status` that
    of EXIT, `packet` what SEND sends, encoded if it is a message.
    """

    phase: Phase
    deed: Deed
    worker_id: int | None = None
    announce: str | None = None
    gate: str | None = None
    status: int = 3
    packet: Reply | bytes = b""

    def commit(self) -> None:
        """Do it."""
        if self.deed is Deed.HANG:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.announce is not None:
            os.write(os.open(self.announce, os.O_WRONLY), f"{os.getpid()}\n".encode())
        match self.deed:
            case Deed.ANNOUNCE:
                pass
            case Deed.EXIT | Deed.KILL | Deed.ORPHAN:
                self._end()
            case Deed.RAISE:
                raise MisdeedError(f"as asked, while {self.phase.value}")
            case Deed.HANG:
                _hang()
            case Deed.WAIT:
                self._wait()
            case Deed.DISCONNECT:
                os.close(_connection())
                _hang()
            case Deed.SEND | Deed.FLOOD:
                self._send()
            case _:
                assert_never(self.deed)

    def _send(self) -> None:
        packet, connection = self.packet, _connection()
        encoded = packet if isinstance(packet, bytes) else msgspec.msgpack.encode(packet)
        os.write(connection, encoded)
        while self.deed is Deed.FLOOD:
            os.write(connection, encoded)

    def _end(self) -> NoReturn:
        if self.deed is Deed.EXIT:
            os._exit(self.status)
        if self.deed is Deed.ORPHAN and os.fork() == 0:
            self._wait()
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("this process was killed")

    def _wait(self) -> None:
        assert self.gate is not None, f"{self.deed} needs a gate"
        with open(self.gate, "rb") as gate:
            gate.read()


@dataclass(frozen=True)
class Held:
    """A request that is answered only when it is cancelled."""


@dataclass(frozen=True)
class StandInConfig:
    """What a stand-in is built from. `report` are variables that its metadata has."""

    placement: WorkerPlacement
    misdeeds: tuple[Misdeed, ...] = ()
    report: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _say_hello, (self.placement, self.misdeeds, self.report)

    def enter(self, phase: Phase) -> None:
        """Do what is due in this phase."""
        for misdeed in self.misdeeds:
            if misdeed.phase is phase and misdeed.worker_id in (None, self.placement.worker_id):
                misdeed.commit()


def stand_in_factory(
    *misdeeds: Misdeed, report: tuple[str, ...] = ()
) -> partial[WorkerFactorySpec]:
    """What a supervisor takes, to run stand-ins that do these misdeeds."""
    return partial(_spec, misdeeds=misdeeds, report=report)


def stand_in(config: StandInConfig) -> StandIn:
    """A stand-in, in its worker."""
    config.enter(Phase.LOADING)
    return StandIn(config)


class StandIn:
    """Answers one request at a time with what it was asked."""

    def __init__(self, config: StandInConfig) -> None:
        self._config = config

    @property
    def statistics(self) -> LoopStatistics | None:
        return None

    @property
    def limits(self) -> Limits:
        return Limits()

    def metadata(self) -> Mapping[str, str | int | dict[str, int]]:
        self._config.enter(Phase.READY)
        placement = self._config.placement
        environment = settings.child_environment({})
        return {
            "plugin": "stand-in",
            "worker_id": placement.worker_id,
            "replica_id": placement.replica_id,
            "replica_rank": placement.replica_rank,
            "pid": os.getpid(),
            **{name: environment.get(name, "") for name in self._config.report},
        }

    def serve(self, channel: WorkerChannel) -> None:
        self._config.enter(Phase.RECEIVING)
        held: dict[int, str] = {}
        while (received := channel.receive()) is not None:
            command, request = received
            match command:
                case Start(number=number, rid=rid):
                    if isinstance(request, Held):
                        held[number] = rid
                    else:
                        self._execute(channel, number, rid, request)
                case Cancel(number=number):
                    if number in held:
                        final = Final(held.pop(number), None, cancelled=True)
                        channel.send_events([(number, final)], None, None)
                case Apply(number=number):
                    channel.send(Answer(number, True))
                case Shutdown():
                    return

    def close(self) -> None:
        self._config.enter(Phase.STOPPING)

    def _execute(self, channel: WorkerChannel, number: int, rid: str, request: object) -> None:
        mine = (None, self._config.placement.worker_id)
        misdeed = request if isinstance(request, Misdeed) and request.worker_id in mine else None
        if misdeed is not None and misdeed.phase is Phase.EXECUTING:
            misdeed.commit()
        if not self._config.placement.is_output_rank:
            channel.send(Finished(number))
            return
        answer: object = request
        if misdeed is not None and misdeed.phase is Phase.REPLYING:
            answer = _Unpickled(misdeed)
        channel.send_events([(number, Final(rid, answer))], 0.0, None)


class _Unpickled:
    """An answer in whose pickling a misdeed happens."""

    def __init__(self, misdeed: Misdeed) -> None:
        self._misdeed = misdeed

    def __reduce__(self) -> tuple[Any, ...]:
        self._misdeed.commit()
        return str, ("answered",)


def _spec(
    placement: WorkerPlacement, *, misdeeds: tuple[Misdeed, ...], report: tuple[str, ...]
) -> WorkerFactorySpec:
    return WorkerFactorySpec(
        f"{stand_in.__module__}:{stand_in.__qualname__}",
        StandInConfig(placement, misdeeds, report),
    )


def _say_hello(
    placement: WorkerPlacement, misdeeds: tuple[Misdeed, ...], report: tuple[str, ...]
) -> StandInConfig:
    """Unpickle a configuration, which a worker does when it has said hello."""
    config = StandInConfig(placement, misdeeds, report)
    config.enter(Phase.HELLO)
    return config


def _connection() -> int:
    """The worker's end of its connection, which its runtime is not given in every phase."""
    for name in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd", name)
        if not (path.exists() and path.is_socket()):
            continue
        with socket.socket(fileno=os.dup(int(name))) as copy:
            if (copy.family, copy.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
                return int(name)
    raise AssertionError("this process has no connection to a parent")


def _hang() -> NoReturn:
    while True:
        threading.Event().wait()
