"""The thread that starts the workers of an engine, hears them, watches them end and stops them.

It alone forks: the kernel kills a worker when the thread that forked it ends. It waits for
messages, deaths, its inbox and the next deadline at once, and never polls.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any, Protocol

from phalanx.clock import Clock
from phalanx.engine.boundary import Raised, attempt, run_every
from phalanx.engine.workers import faults
from phalanx.engine.workers.channel import UndecodablePacketError
from phalanx.engine.workers.deadlines import Deadlines
from phalanx.engine.workers.lifecycle import Lifecycle, LifecycleState
from phalanx.engine.workers.messages import (
    Answer,
    Apply,
    Cancel,
    Crashed,
    Events,
    Finished,
    Ready,
    Reply,
    Stopped,
)
from phalanx.engine.workers.packets import Descriptor
from phalanx.engine.workers.readiness import READ, WRITE, Readiness
from phalanx.engine.workers.replica import Replica
from phalanx.engine.workers.stopping import Stopping
from phalanx.engine.workers.waker import Waker
from phalanx.engine.workers.worker import Stage, UnexpectedReplyError, Worker
from phalanx.errors import EngineUnavailableError
from phalanx.schema.deployment import WorkerSupervisorConfig
from phalanx.schema.placement import WorkerPlacement

logger = logging.getLogger(__name__)

_MAX_MESSAGES = 64
"""How many messages of one worker are taken in a row, so that a busy one does not hide the rest."""


@dataclass(frozen=True)
class Tuning:
    """What rarely needs another value.

    `arena_bytes` is the shared memory for the requests, and for the answers, of a replica (None:
    the transport's default). A worker whose connection has ended is given `status_timeout_s` to
    end, so that everybody who waits can be told its status; it delays them by no more.
    """

    arena_bytes: int | None = None
    status_timeout_s: float = 0.04


class GroupListener(Protocol):
    """What the owner of a group is told, on the group's thread."""

    def received(
        self,
        placement: WorkerPlacement,
        reply: Events | Finished | Answer,
        events: list[tuple[int, Any]],
    ) -> None:
        """A worker answered; `events` are empty unless the reply is `Events`."""
        ...

    def failed(self, error: EngineUnavailableError) -> None:
        """The running group has failed; called once."""
        ...


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command to this replica, and the files that it mentions."""

    replica_id: int
    command: Cancel | Apply
    descriptors: Sequence[Descriptor] = ()


@dataclass(frozen=True, slots=True)
class Collapse:
    """The group was failed from outside, in the state `before`."""

    before: LifecycleState
    error: EngineUnavailableError


@dataclass(frozen=True, slots=True)
class Close:
    """Stop the workers."""


_DEATHS = 1
"""Their rank among what is ready at once: messages go first, as they tell more."""
_CLOSED = "the engine was closed"


class WorkerGroup:
    """The workers of one node, from their start to their end; `run` is the thread's."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        config: WorkerSupervisorConfig,
        lifecycle: Lifecycle,
        listener: GroupListener,
        clock: Clock,
        tuning: Tuning,
    ) -> None:
        self.started: Future[tuple[Ready, ...]] = Future()
        self.deadlines = Deadlines(config.execution_timeout_s, clock)
        self.replicas = {replica.replica_id: replica for replica in replicas}
        self._config = config
        self._lifecycle = lifecycle
        self._listener = listener
        self._clock = clock
        self._tuning = tuning
        self._inbox: SimpleQueue[Send | Collapse | Close] = SimpleQueue()
        self._readiness = Readiness()
        self._waker = Waker()
        self._readiness.watch(self._waker, self._woken)
        self._workers: list[Worker] = []
        self._alive: set[Worker] = set()
        self._startup_due_s = clock.monotonic_s() + config.startup_timeout_s
        self._stopping: Stopping | None = None
        self._over = False
        # When the thread will wake by itself; None: when somebody wakes it.
        self._alarm_s: float | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes started so far, by `worker_id`."""
        return tuple(worker.process.pid for worker in self._workers)

    def submitted(self, replica: Replica, expires_s: float | None) -> None:
        """Wake the thread where it has something to do about a request that was just sent."""
        alarm_s = self._alarm_s
        unseen = expires_s is not None and (alarm_s is None or expires_s < alarm_s)
        if unseen or replica.wants_write:
            self._waker.wake()

    def post(self, message: Send | Collapse | Close) -> None:
        """Leave a message; takes no lock of this class, so that a garbage collector may call it."""
        self._inbox.put(message)
        self._waker.wake()

    def run(self) -> None:
        """Live; returns when every worker has ended and nothing is held any more."""
        for step in (self._live, self.release):
            outcome = attempt(step)
            if isinstance(outcome, Raised):
                logger.error("a defect of the supervision of workers", exc_info=outcome.error)
                self._fail(faults.defect(outcome.error))
        fault = None if self._stopping is None else self._stopping.fault
        if fault is None:
            self._lifecycle.move(LifecycleState.STOPPED)
        else:
            self._lifecycle.fail(fault)

    def _live(self) -> None:
        self._launch()
        while self._alive:
            self._readiness.wait(self._timeout_s())
            self._check_time()

    def _launch(self) -> None:
        for replica in self.replicas.values():
            try:
                for worker in replica.launch():
                    self._workers.append(worker)
                    self._alive.add(worker)
                    watch = self._readiness.watch
                    watch(worker.channel, partial(self._connection_ready, worker))
                    watch(worker.process.sentinel, partial(self._ended, worker), rank=_DEATHS)
            except OSError as error:
                self._fail(faults.not_launched(len(self._workers), error))
                return

    def _timeout_s(self) -> float | None:
        # Cleared first: a request submitted from here on is either seen below or wakes this thread.
        self._alarm_s = None
        due_s = self._due_s()
        self._alarm_s = due_s
        return None if due_s is None else max(0.0, due_s - self._clock.monotonic_s())

    def _due_s(self) -> float | None:
        if self._over:
            return None
        if self._stopping is not None:
            return self._stopping.due_s
        if not self.started.done():
            return self._startup_due_s
        return self.deadlines.next_s()

    def _check_time(self) -> None:
        alarm_s = self._alarm_s
        if self._over or alarm_s is None or self._clock.monotonic_s() < alarm_s:
            return
        if self._stopping is not None:
            self._stopping.check_time(self._alive)
        elif self.started.done():
            late = self.deadlines.expired()
            if late:
                self._fail(faults.expired(late, self._config.execution_timeout_s or 0.0))
        elif self._clock.monotonic_s() >= self._startup_due_s:
            self._fail(faults.not_ready(self._workers, self._config.startup_timeout_s))

    def _woken(self, mask: int) -> None:
        self._waker.clear()
        while not self._inbox.empty():
            match self._inbox.get():
                case Send(replica_id=replica_id, command=command, descriptors=descriptors):
                    self.replicas[replica_id].send(command, descriptors)
                case Collapse(before=before, error=error):
                    self._collapse(before, error)
                case Close():
                    self._stop()
        for worker in self._alive:
            self._readiness.want_write(worker.channel, worker.channel.wants_write)

    def _connection_ready(self, worker: Worker, mask: int) -> None:
        if mask & WRITE and not self._over:
            worker.channel.flush()
            self._readiness.want_write(worker.channel, worker.channel.wants_write)
        if mask & READ:
            self._read(worker)

    def _read(self, worker: Worker, at_most: int | None = _MAX_MESSAGES) -> None:
        """Take what a worker has said, `at_most` so many messages where its words have no end."""
        if self._over or worker.channel.ended:
            return
        try:
            for reply, events in islice(worker.channel.receive_all(), at_most):
                self._take(worker, reply, events)
                # Nothing more is to come, most likely: the system need not be asked.
                if self._over or (at_most is not None and not self.deadlines.num_pending):
                    return
        except UndecodablePacketError as error:
            self._blame(faults.malformed(worker, error))
        if worker.channel.ended and not self._over:
            self._readiness.forget(worker.channel)
            self._disconnected(worker)

    def _take(self, worker: Worker, reply: Reply, events: list[tuple[int, Any]]) -> None:
        if self._over:
            return
        if isinstance(reply, Crashed):
            rid = None if reply.number is None else self.deadlines.rid(reply.number)
            self._blame(faults.crashed(worker, reply, rid))
        elif self._stopping is not None:
            if isinstance(reply, Stopped):
                worker.handshake.stage = Stage.STOPPED
        elif isinstance(reply, Events | Finished | Answer) and self.started.done():
            outcome = attempt(partial(self._listener.received, worker.placement, reply, events))
            if isinstance(outcome, Raised):
                self._fail(faults.unhandled(worker, outcome.error))
        else:
            self._greet(worker, reply)

    def _greet(self, worker: Worker, reply: Reply) -> None:
        try:
            worker.handshake.take(reply)
        except UnexpectedReplyError as error:
            self._fail(faults.malformed(worker, error))
            return
        ready = [each.handshake.ready for each in self._workers if each.handshake.ready is not None]
        if len(ready) == len(self._workers) and self._lifecycle.move(LifecycleState.RUNNING):
            self.started.set_result(tuple(ready))

    def _disconnected(self, worker: Worker) -> None:
        if self._stopping is not None:
            return  # as it should be; its status tells the rest
        if worker.process.ends_within(self._tuning.status_timeout_s):
            self._ended(worker, READ)
        else:
            self._fail(faults.disconnected(worker))

    def _ended(self, worker: Worker, mask: int) -> None:
        if worker not in self._alive:
            return
        self._alive.discard(worker)
        self._readiness.forget(worker.process.sentinel)
        status = worker.process.wait()
        self._read(worker, None)  # its last words tell more
        if self._over:
            return
        if self._stopping is not None:
            self._stopping.ended(worker, status)
        else:
            self._fail(faults.ended(worker, status))

    def _stop(self) -> None:
        if self._over or self._stopping is not None:
            return
        if not self.started.done():
            # A worker that is loading would not read a command for minutes.
            self._end_at_once()
            self.started.set_exception(EngineUnavailableError(_CLOSED))
            return
        self._stopping = Stopping(self._config.shutdown_timeout_s, self._clock)
        for replica in self.replicas.values():
            replica.shut_down(_CLOSED)

    def _blame(self, fault: EngineUnavailableError) -> None:
        if self._stopping is not None:
            self._stopping.blame(fault)
        else:
            self._fail(fault)

    def _fail(self, error: EngineUnavailableError) -> None:
        before = self._lifecycle.fail(error)
        if before is not None:
            self._collapse(before, error)

    def _collapse(self, before: LifecycleState, error: EngineUnavailableError) -> None:
        if self._over:
            return
        self._end_at_once()
        if before is LifecycleState.RUNNING:
            outcome = attempt(partial(self._listener.failed, error))
            if isinstance(outcome, Raised):
                logger.error("the owner of the workers raised", exc_info=outcome.error)
        elif not self.started.done():
            self.started.set_exception(error)
        logger.error("%s", error)

    def _end_at_once(self) -> None:
        """Kill every worker and hear nothing more of them but their deaths."""
        self._over = True
        for worker in self._alive:
            worker.process.kill()
        for worker in self._workers:
            self._readiness.forget(worker.channel)

    def release(self) -> None:
        """End what is left and let go of everything; only where `run` does not run."""
        self._end_at_once()
        run_every(
            [
                *(worker.process.close for worker in self._workers),
                *(replica.close for replica in self.replicas.values()),
                self._readiness.close,
                self._waker.close,
            ]
        )
