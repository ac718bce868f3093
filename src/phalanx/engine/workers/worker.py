"""A parent's view of one worker: its process, its connection, and how far it has come."""

from __future__ import annotations

import enum
import signal

from phalanx.engine.workers.channel import ParentChannel
from phalanx.engine.workers.launch import WorkerProcess
from phalanx.engine.workers.messages import Hello, Ready, Reply
from phalanx.schema.placement import WorkerPlacement


class Stage(enum.Enum):
    """How far a worker has come; the value says what it is doing."""

    NEW = "beginning"
    HELLO = "loading"
    READY = "serving"
    STOPPED = "leaving"


class UnexpectedReplyError(Exception):
    """A worker sent a message that has no place where it stands, or that names another worker."""


class Handshake:
    """One worker's start: it says who it is, then that it is ready, and nothing else."""

    def __init__(self, placement: WorkerPlacement, pid: int) -> None:
        self._placement = placement
        self._pid = pid
        self.stage = Stage.NEW
        self.ready: Ready | None = None

    def take(self, reply: Reply) -> None:
        """Go on by one message, or raise `UnexpectedReplyError`."""
        match self.stage, reply:
            case Stage.NEW, Hello():
                self._identify(reply)
                self.stage = Stage.HELLO
            case Stage.HELLO, Ready():
                if reply.worker_id != self._placement.worker_id:
                    raise UnexpectedReplyError(
                        f"its Ready says worker_id={reply.worker_id} instead of "
                        f"{self._placement.worker_id}"
                    )
                self.ready = reply
                self.stage = Stage.READY
            case _:
                expected = {Stage.NEW: "Hello", Stage.HELLO: "Ready"}.get(self.stage, "nothing")
                raise UnexpectedReplyError(
                    f"it sent {type(reply).__name__} while {self.stage.value}, where {expected} "
                    "was expected"
                )

    def _identify(self, hello: Hello) -> None:
        placement = self._placement
        for name, said, meant in (
            ("worker_id", hello.worker_id, placement.worker_id),
            ("replica_id", hello.replica_id, placement.replica_id),
            ("replica_rank", hello.replica_rank, placement.replica_rank),
            ("pid", hello.pid, self._pid),
        ):
            if said != meant:
                raise UnexpectedReplyError(f"its Hello says {name}={said} instead of {meant}")


class Worker:
    """One running worker; for the thread that started it."""

    def __init__(
        self, placement: WorkerPlacement, process: WorkerProcess, channel: ParentChannel
    ) -> None:
        self.placement = placement
        self.process = process
        self.channel = channel
        self.handshake = Handshake(placement, process.pid)
        self.ended = False

    @property
    def stage(self) -> Stage:
        return self.handshake.stage

    @property
    def name(self) -> str:
        """As errors call it."""
        placement = self.placement
        return (
            f"worker {placement.worker_id} (replica {placement.replica_id}, rank "
            f"{placement.replica_rank}, pid {self.process.pid})"
        )


def describe_status(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = "" if -status != signal.SIGKILL else " (a machine out of memory does that too)"
    return f"was killed by {name}{hint}"
