"""Starts the workers of a deployment, sends them requests, and fails them as one group.

Either every worker serves or none does: whatever ends one of them ends all, and everybody who waits
is told at once. Nothing is retried and nothing restarted.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Protocol

from phalanx.clock import Clock, SystemClock
from phalanx.engine.deployment_plan import DeploymentPlan
from phalanx.engine.workers.group import Close, Collapse, GroupListener, Send, Tuning, WorkerGroup
from phalanx.engine.workers.launch import plan_launches
from phalanx.engine.workers.lifecycle import Lifecycle, LifecycleState
from phalanx.engine.workers.messages import Apply, Cancel, Ready
from phalanx.engine.workers.node_links import Applied, Message, Submitted
from phalanx.engine.workers.packets import Descriptor
from phalanx.engine.workers.replica import Replica
from phalanx.engine.workers.runtime import WorkerFactorySpec
from phalanx.errors import EngineOverloadedError, EngineUnavailableError
from phalanx.schema.control import ControlOp, Question
from phalanx.schema.deployment import WorkerSupervisorConfig
from phalanx.schema.placement import WorkerPlacement

__all__ = ["GroupListener", "Tuning", "WorkerSupervisor"]


class OtherNodes(Protocol):
    """The machines of a replica that spans several, but for this one."""

    def send(self, message: Message) -> None:
        """Have their ranks do the same; never waits."""
        ...


class WorkerSupervisor:
    """The local workers of all replicas of an engine; safe to use from any thread.

    They are started once. `target` is the engine's device target, of which each worker gets the
    device that it was placed on.
    """

    def __init__(
        self,
        plan: DeploymentPlan,
        factory: Callable[[WorkerPlacement], WorkerFactorySpec],
        config: WorkerSupervisorConfig,
        listener: GroupListener,
        *,
        target: str,
        clock: Clock | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        self._others: OtherNodes | None = None
        # Ranks of other machines get everything in the order of those here.
        self._ordered: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._plan = plan
        self._factory = factory
        self._config = config
        self._listener = listener
        self._target = target
        self._clock: Clock = SystemClock() if clock is None else clock
        self._tuning = Tuning() if tuning is None else tuning
        self._lifecycle = Lifecycle()
        self._owner_pid = os.getpid()
        self._applying = threading.Lock()
        # Held while the workers' connections are opened, so that a close comes before or after.
        self._lock = threading.Lock()
        self._group: WorkerGroup | None = None
        self._thread: threading.Thread | None = None

    def pass_on(self, others: OtherNodes) -> None:
        """Before the start: the replica spans machines, and these get what its ranks here get."""
        self._others, self._ordered = others, threading.Lock()

    @property
    def state(self) -> LifecycleState:
        return self._lifecycle.state

    @property
    def failure(self) -> EngineUnavailableError | None:
        """Why the state is FAILED."""
        return self._lifecycle.failure

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the thread that hears the workers."""
        return threading.current_thread() is self._thread

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' processes, by `worker_id`; none before the start and after the end."""
        group = self._group
        return () if group is None else group.pids

    def start(self, opened: Callable[[], None] | None = None) -> tuple[Ready, ...]:
        """Start every worker; returns when all are ready: what they said, by `worker_id`. `opened` is
        called as soon as `fail` is heard, which is before that.

        Otherwise all are killed, and EngineUnavailableError says what went wrong, with the traceback
        of the worker that failed. ConfigurationError where the workers' configuration cannot be
        sent, or this process may not start any; then none was started.
        """
        with self._lock:
            if not self._lifecycle.move(LifecycleState.STARTING, since=LifecycleState.CREATED):
                raise EngineUnavailableError(
                    f"workers are started once only, and these are {self.state}; create a new "
                    "engine"
                )
            group = self._open()
            self._run_in_thread(group)
        try:
            if opened is not None:
                opened()
            return group.started.result()
        except EngineUnavailableError:
            error = self._lifecycle.unavailable()
            raise error from error.__cause__
        except BaseException:  # interrupted
            self.close()
            raise

    def submit(self, replica_id: int, number: int, rid: str, request: Any) -> int:
        """Send a request to every rank of a replica; returns the bytes of its payload.

        Its time begins now. The request may change when this returns, which never waits for a
        worker. InvalidRequestError where it cannot be pickled, EngineOverloadedError where memory
        or descriptors are exhausted, EngineUnavailableError where the workers do not run: in all
        three cases nothing was sent.
        """
        group = self._running()
        expires_s = group.deadlines.add(number, rid)
        replica = group.replicas[replica_id]
        sent = False
        try:
            with self._ordered:
                num_bytes = replica.submit(number, rid, request)
                if self._others is not None:
                    self._others.send(Submitted(number, rid, request))
            sent = True
        except EngineOverloadedError:
            raise
        except EngineUnavailableError:  # closed in this moment
            error = self._lifecycle.unavailable()
            raise error from error.__cause__
        finally:
            if not sent:
                group.deadlines.remove(number)
        group.submitted(replica, expires_s)
        return num_bytes

    def send(
        self,
        replica_id: int,
        command: Cancel | Apply,
        descriptors: Sequence[Descriptor] = (),
        whole: ControlOp | Question | None = None,
    ) -> None:
        """Send a command to a replica, after what was submitted to it before: a cancel to the rank
        that answers, an operation to every rank. `whole` is the operation with what `descriptors`
        hold of it.

        Takes no lock that a submit holds, so that a garbage collector's callback may call it.
        """
        group = self._running()
        if self._others is None or not isinstance(command, Apply):
            group.post(Send(replica_id, command, descriptors))
            return
        with self._applying:
            group.post(Send(replica_id, command, descriptors))
            self._others.send(Applied(command.number, command.op if whole is None else whole))

    def completed(self, number: int) -> None:
        """A request has ended: its time is no longer counted."""
        group = self._group
        if group is not None:
            group.deadlines.remove(number)

    def fail(self, error: EngineUnavailableError) -> None:
        """Fail the starting or running group, for a reason that its owner found."""
        group = self._group
        if group is None:
            return
        for since in (LifecycleState.STARTING, LifecycleState.RUNNING):
            if self._lifecycle.fail(error, since=since):
                group.post(Collapse(since, error))
                return

    def close(self) -> None:
        """Stop the workers and wait for their end; any number of times, from any thread.

        On the thread that calls the listener it does not wait. A worker that has to be killed, or
        ends badly, makes the state FAILED and is told in `failure`, not raised.
        """
        if os.getpid() != self._owner_pid:
            return  # a forked copy, whose workers they are not
        with self._lock:
            if self._lifecycle.move(LifecycleState.STOPPED, since=LifecycleState.CREATED):
                return
            group, thread = self._group, self._thread
            if group is not None and self._lifecycle.move(LifecycleState.STOPPING):
                group.post(Close())
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join()

    def _running(self) -> WorkerGroup:
        group = self._group
        if group is None or self._lifecycle.state is not LifecycleState.RUNNING:
            raise self._lifecycle.unavailable()
        return group

    def _open(self) -> WorkerGroup:
        """Connect to the workers that are to come."""
        try:
            launches = plan_launches(self._plan, self._factory, self._config, self._target)
            with contextlib.ExitStack() as undo:
                replicas = []
                for _, of_replica in groupby(launches, lambda each: each.placement.replica_id):
                    replicas.append(Replica(tuple(of_replica), self._tuning.arena_bytes))
                    undo.callback(replicas[-1].close)
                group = WorkerGroup(
                    replicas,
                    self._config,
                    self._lifecycle,
                    self._listener,
                    self._clock,
                    self._tuning,
                )
                undo.pop_all()
        except BaseException as error:
            failure = self._fail_to_start(error)
            if isinstance(error, OSError):
                raise failure from error
            raise
        return group

    def _run_in_thread(self, group: WorkerGroup) -> None:
        # A daemon, since an engine that is not closed must not keep the interpreter from leaving.
        thread = threading.Thread(
            target=self._run, args=(group,), name="phalanx-workers", daemon=True
        )
        self._group, self._thread = group, thread
        atexit.register(self.close)
        try:
            thread.start()
        except RuntimeError as error:  # there are too many threads
            group.release()
            atexit.unregister(self.close)
            self._group = None
            raise self._fail_to_start(error) from error
        except BaseException:  # interrupted, perhaps when the thread had begun
            self._lifecycle.move(LifecycleState.STOPPING)
            group.post(Close())
            raise

    def _run(self, group: WorkerGroup) -> None:
        group.run()
        atexit.unregister(self.close)
        self._group = None

    def _fail_to_start(self, error: BaseException) -> EngineUnavailableError:
        failure = EngineUnavailableError(f"the engine could not start its workers: {error}")
        failure.__cause__ = error
        self._lifecycle.fail(failure)
        return failure
