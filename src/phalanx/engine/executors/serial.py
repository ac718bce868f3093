"""Runs a plain `Entry`: one request at a time, in order of arrival.

`step` runs in its caller's thread when its turn comes; the first `submit` starts one worker thread
that takes the turns of submitted requests. Both wait in the same queue.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from phalanx.clock import Clock
from phalanx.engine.boundary import Raised, attempt, run_every
from phalanx.engine.core import EngineCore
from phalanx.engine.ranks import Rank
from phalanx.engine.requests import LiveRequest, RequestTable
from phalanx.engine.sinks import CallerSink
from phalanx.engine_config import EntryArgs
from phalanx.errors import (
    InvalidRequestError,
    RequestFailedError,
)
from phalanx.plugin import Entry, Failed, Final
from phalanx.schema.control import ControlAnswer, ControlOp, Question
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import LoopStatistics

logger = logging.getLogger(__name__)
CANCELLED = "the request was cancelled before it started"


@dataclass(frozen=True, eq=False)
class Turn:
    """A place in the queue; `by_caller` where a waiting `step` takes it, else the worker does."""

    live: LiveRequest
    request: Any
    by_caller: bool


class SerialExecutor:
    """A rank of a plain `Entry` in this process."""

    loop_statistics: LoopStatistics | None = None

    def __init__(
        self,
        plugin: type[Entry],
        plugin_args: EntryArgs,
        rank: Rank,
        requests: RequestTable,
        clock: Clock,
    ) -> None:
        self._rank = rank
        self._requests = requests
        with rank.activated():
            self._core = EngineCore(plugin, plugin_args, rank.config, clock)
        self._changed = threading.Condition()
        self._queue: deque[Turn] = deque()
        self._active: threading.Thread | None = None
        self._worker: threading.Thread | None = None
        self._closing = False
        self._close_after_step = False
        self._close_lock = threading.RLock()
        self._core_closed = False

    @property
    def entry(self) -> Entry:
        return self._core.entry

    @property
    def limits(self) -> Limits:
        return self._core.limits

    @property
    def pids(self) -> tuple[int, ...]:
        return (os.getpid(),)

    def step(self, live: LiveRequest, sink: CallerSink, request: Any) -> Any:
        if threading.current_thread() in (self._active, self._worker):
            raise InvalidRequestError(
                "step() was called from inside a step of the same engine, or in a future's callback "
                "on the thread that would have to compute it; call it from another thread"
            )
        turn = Turn(live, request, by_caller=True)
        try:
            self._await_turn(turn, sink)
            outcome = self._run(turn)
        except BaseException as error:  # withdrawn, or interrupted
            self._leave(turn, error)
            raise
        if isinstance(outcome, Raised):
            raise outcome.error
        return outcome

    def submit(self, live: LiveRequest, request: Any) -> None:
        with self._changed:
            closing = self._closing
            if not closing:
                self._queue.append(Turn(live, request, by_caller=False))
                if self._worker is None:
                    self._worker = threading.Thread(
                        target=self._work, name="phalanx-worker", daemon=True
                    )
                    self._worker.start()
                self._changed.notify_all()
        if closing:
            self._requests.withdraw(live, self._requests.unavailable())

    def cancel(self, live: LiveRequest) -> bool:
        """Takes effect when the request's turn comes; one that runs cannot be stopped."""
        if live.claimed:
            return False
        live.cancelled = True
        return True

    def control(self, op: ControlOp | Question) -> Future[ControlAnswer]:
        raise InvalidRequestError(
            f"plugin {self.entry.name!r} answers one request at a time and takes no control "
            f"operations such as {type(op).__name__}",
            field="op",
        )

    def close(self) -> None:
        with self._changed:
            self._closing = True
            queued = list(self._queue)
            self._queue.clear()
            worker = self._worker
        error = self._requests.unavailable
        run_every([partial(self._requests.withdraw, turn.live, error()) for turn in queued])
        with self._changed:
            self._changed.notify_all()
            if self._active is threading.current_thread():
                self._close_after_step = True
                return
            self._changed.wait_for(lambda: self._active is None)
        if worker is not None and worker is not threading.current_thread():
            worker.join()
        self._close_core()

    def _await_turn(self, turn: Turn, sink: CallerSink) -> None:
        with self._changed:
            if self._closing:
                raise self._requests.unavailable()
            self._queue.append(turn)
            self._changed.notify_all()
            self._changed.wait_for(lambda: sink.future.done() or self._is_next(turn))
            if not sink.future.done():
                self._take()
                return
        sink.future.result()  # raises why it was withdrawn

    def _leave(self, turn: Turn, error: BaseException) -> None:
        """The caller stopped waiting, by an interrupt or because the engine was closed."""
        with self._changed:
            if turn in self._queue:
                self._queue.remove(turn)
            if self._active is threading.current_thread():
                self._active = None
            self._changed.notify_all()
        self._requests.withdraw(turn.live, RequestFailedError(f"its caller left: {error!r}"))

    def _is_next(self, turn: Turn) -> bool:
        return self._active is None and bool(self._queue) and self._queue[0] is turn

    def _take(self) -> Turn:
        self._active = threading.current_thread()
        return self._queue.popleft()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._closing
                        or (bool(self._queue) and not self._queue[0].by_caller and not self._active)
                    )
                )
                if self._closing:
                    return
                turn = self._take()
            self._run(turn)

    def _run(self, turn: Turn) -> Any | Raised:
        """Execute the turn that this thread has taken, pass the turn on, end the request."""
        live = turn.live
        if live.cancelled:
            self._release()
            error = RequestFailedError(CANCELLED)
            self._requests.withdraw(live, error)
            return Raised(error)
        if not self._requests.claim(live):
            self._release()
            return Raised(RequestFailedError(CANCELLED))
        self._requests.schedule(live)
        outcome = attempt(partial(self._step_core, turn.request))
        self._release()
        if isinstance(outcome, Raised):
            self._requests.end(live, Failed(live.rid, as_exception(outcome.error)))
        else:
            self._requests.end(live, Final(live.rid, outcome))
        if self._close_after_step:
            closed = attempt(self._close_core)
            if isinstance(closed, Raised):
                logger.error("closing plugin %r failed", self.entry.name, exc_info=closed.error)
        return outcome

    def _step_core(self, request: Any) -> Any:
        with self._rank.activated():
            return self._core.entry.step(request)

    def _release(self) -> None:
        with self._changed:
            self._active = None
            self._changed.notify_all()

    def _close_core(self) -> None:
        with self._close_lock:
            if self._core_closed:
                return
            self._core_closed = True
            run_every([self._leave_plugin, self._rank.close])

    def _leave_plugin(self) -> None:
        with self._rank.activated():
            self._core.close()


def as_exception(error: BaseException) -> Exception:
    """A `BaseException` of a plugin (such as SystemExit) must not end its reader's thread."""
    if isinstance(error, Exception):
        return error
    failure = RequestFailedError(f"the plugin raised {error!r}")
    failure.__cause__ = error
    return failure
