"""The thread that owns a `BatchingEntry`: it alone loads, calls and closes the plugin.

Other threads leave messages in its inbox. It takes them between two ticks and, where the plugin
has nothing to do, waits for the next one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from phalanx.engine.boundary import Raised, attempt, run_every
from phalanx.engine.core import EngineCore, activated
from phalanx.engine.requests import LiveRequest, RequestTable
from phalanx.engine_config import EngineConfig
from phalanx.errors import EngineUnavailableError, InvalidRequestError
from phalanx.plugin import BatchingEntry, Failed
from phalanx.schema.control import ControlOp, Pause, PauseMode
from phalanx.schema.statistics import LoopStatistics

logger = logging.getLogger(__name__)


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
    """Apply an operation and answer whether it was applied."""

    op: ControlOp
    answer: Future[bool]


@dataclass(frozen=True, slots=True)
class Close:
    """Leave the loop."""


Message = Start | Cancel | Control | Close


@dataclass(frozen=True, slots=True)
class Aborting:
    """A pause that is answered when these requests have ended."""

    live: tuple[LiveRequest, ...]
    answer: Future[bool]


class LoopThread:
    """Built when its plugin is loaded; lives until `close` or until the plugin fails."""

    def __init__(
        self,
        load: Callable[[], EngineCore[BatchingEntry]],
        config: EngineConfig,
        requests: RequestTable,
    ) -> None:
        self._requests = requests
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._applying: Future[bool] | None = None
        self._aborting: list[Aborting] = []
        self._stopped = False
        self._post_lock = threading.Lock()
        self._close_error: BaseException | None = None
        self.statistics = LoopStatistics()
        ready: Future[EngineCore[BatchingEntry]] = Future()
        self._thread = threading.Thread(
            target=self._main, args=(load, config, ready), name="phalanx-loop", daemon=True
        )
        self._thread.start()
        try:
            self.core = ready.result()
        except BaseException:
            self._inbox.put(Close())  # interrupted while loading: the thread ends once loaded
            raise

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread (inside the plugin or a future's callback)."""
        return threading.current_thread() is self._thread

    def post(self, message: Start | Cancel) -> None:
        """Leave a message; takes no lock, so that a garbage collector's callback may."""
        self._inbox.put(message)

    def control(self, op: ControlOp) -> Future[bool]:
        """Leave an operation; the future is answered in any case."""
        answer: Future[bool] = Future()
        with self._post_lock:
            if self._stopped:
                answer.set_exception(self._requests.unavailable())
            else:
                self._inbox.put(Control(op, answer))
        return answer

    def close(self) -> None:
        """Stop the thread and wait for it, except on itself; raises what closing the plugin did."""
        self._inbox.put(Close())
        if self.is_current:
            return
        self._thread.join()
        error, self._close_error = self._close_error, None
        if error is not None:
            raise error

    def _main(
        self,
        load: Callable[[], EngineCore[BatchingEntry]],
        config: EngineConfig,
        ready: Future[EngineCore[BatchingEntry]],
    ) -> None:
        outcome = attempt(partial(self._live, load, config, ready))
        if not isinstance(outcome, Raised):
            return
        if ready.done():
            raise outcome.error  # a defect of this class: the interpreter reports it
        ready.set_exception(outcome.error)

    def _live(
        self,
        load: Callable[[], EngineCore[BatchingEntry]],
        config: EngineConfig,
        ready: Future[EngineCore[BatchingEntry]],
    ) -> None:
        with activated(config):
            core = load()
            self.statistics = core.entry.statistics()
            ready.set_result(core)
            outcome = attempt(partial(self._serve, core.entry))
            if isinstance(outcome, Raised):
                self._fail(core.entry.name, outcome.error)
            end_all = partial(self._end_all, failed=isinstance(outcome, Raised))
            closed = attempt(partial(run_every, [end_all, core.close]))
            if isinstance(closed, Raised):
                self._close_error = closed.error

    def _serve(self, entry: BatchingEntry) -> None:
        while self._drain(entry):
            if not entry.busy:
                self._answer_aborts(entry)
                continue
            events = entry.tick()
            # Published first: who sees a request ended also sees it counted.
            self.statistics = entry.statistics()
            for live in self._requests.deliver(events):
                if not live.cancelled:
                    self._cancel(entry, live)
            if self._aborting:
                self._answer_aborts(entry)

    def _drain(self, entry: BatchingEntry) -> bool:
        """Handle all messages, waiting for one if the plugin is idle; False when told to close."""
        if entry.busy and self._inbox.empty():
            return True
        while True:
            message = self._inbox.get()
            match message:
                case Start(live=live, request=request):
                    if self._requests.claim(live):
                        entry.start(live.rid, request)
                        if live.cancelled:  # before it came here
                            entry.cancel(live.rid)
                case Cancel(live=live):
                    self._cancel(entry, live)
                case Control(op=op, answer=answer):
                    self._apply(entry, op, answer)
                case Close():
                    return False
            if self._inbox.empty():
                self.statistics = entry.statistics()
                return True

    def _cancel(self, entry: BatchingEntry, live: LiveRequest) -> None:
        # Its id may belong to a later request by now.
        if self._requests.find(live.rid) is live and live.claimed:
            live.cancelled = True
            entry.cancel(live.rid)

    def _apply(self, entry: BatchingEntry, op: ControlOp, answer: Future[bool]) -> None:
        self._applying = answer
        try:
            applied = entry.control(op)
        except NotImplementedError as error:
            self._applying = None
            answer.set_exception(InvalidRequestError(str(error), field="op"))
            return
        self._applying = None
        if applied and isinstance(op, Pause) and op.mode is PauseMode.ABORT:
            running = tuple(live for live in self._requests.live_requests() if live.claimed)
            self._aborting.append(Aborting(running, answer))
        else:
            self.statistics = entry.statistics()
            answer.set_result(applied)

    def _answer_aborts(self, entry: BatchingEntry) -> None:
        busy = entry.busy
        waiting = []
        for aborting in self._aborting:
            if busy and any(self._requests.find(live.rid) is live for live in aborting.live):
                waiting.append(aborting)
            else:
                aborting.answer.set_result(True)
        self._aborting = waiting

    def _fail(self, name: str, cause: BaseException) -> None:
        logger.error("plugin %r failed; the engine can no longer serve", name, exc_info=cause)
        error = EngineUnavailableError(
            f"plugin {name!r} failed and the engine can no longer serve "
            f"({type(cause).__name__}: {cause}); create a new engine"
        )
        error.__cause__ = cause
        self._requests.refuse(error)

    def _end_all(self, *, failed: bool) -> None:
        """Nothing is served any more: end every request and answer every operation."""
        with self._post_lock:
            self._stopped = True
        self._requests.refuse(EngineUnavailableError("the engine is closed"))
        for live in self._requests.live_requests():
            if live.claimed or failed:
                self._requests.end(live, Failed(live.rid, self._requests.unavailable()))
            else:
                self._requests.withdraw(live, self._requests.unavailable())
        answers = [aborting.answer for aborting in self._aborting]
        if self._applying is not None:
            answers.append(self._applying)
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, Control):
                answers.append(message.answer)
        for answer in answers:
            answer.set_exception(self._requests.unavailable())
