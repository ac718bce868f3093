"""The thread that owns a `BatchingEntry`: it alone loads, calls and closes the plugin.

Other threads leave messages in its inbox. It takes them between two ticks, in the turns that the
ranks of its replica agree on, and where the plugin has nothing to do it waits for the next one.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue

from phalanx.engine.boundary import Raised, attempt, run_every
from phalanx.engine.core import EngineCore
from phalanx.engine.lockstep.messages import Cancel, Close, Control, Message, Start, Wake
from phalanx.engine.lockstep.turns import Turns
from phalanx.engine.ranks import Rank
from phalanx.engine.refusals import REFUSALS
from phalanx.engine.replicas import idle
from phalanx.engine.requests import LiveRequest, RequestTable
from phalanx.errors import EngineUnavailableError, InvalidRequestError
from phalanx.plugin import BatchingEntry, Failed
from phalanx.schema.control import ControlAnswer, ControlOp, Pause, PauseMode, Question
from phalanx.schema.statistics import LoopStatistics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Aborting:
    """A pause that is answered when these requests have ended."""

    live: tuple[LiveRequest, ...]
    answer: Future[ControlAnswer]


class LoopThread:
    """Built when its plugin is loaded; lives until `close` or until the plugin fails."""

    def __init__(
        self,
        load: Callable[[], EngineCore[BatchingEntry]],
        rank: Rank,
        turns: Turns,
        requests: RequestTable,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`load` runs on the new thread. `on_failure` is told what broke the plugin or a turn."""
        self._rank = rank
        self._turns = turns
        self._requests = requests
        self._on_failure = on_failure
        self._inbox: SimpleQueue[Message | Wake] = SimpleQueue()
        self._taken: deque[Message] = deque()
        self._control_numbers = count()
        self._aborting: list[Aborting] = []
        self._stopped = False
        self._post_lock = threading.Lock()
        self._close_error: BaseException | None = None
        self.statistics = LoopStatistics()
        ready: Future[EngineCore[BatchingEntry]] = Future()
        self._thread = threading.Thread(
            target=self._main, args=(load, ready), name="phalanx-loop", daemon=True
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

    def control(self, op: ControlOp | Question) -> Future[ControlAnswer]:
        """Leave an operation; the future is answered in any case."""
        answer: Future[ControlAnswer] = Future()
        with self._post_lock:
            if self._stopped:
                answer.set_exception(self._requests.unavailable())
            else:
                self._inbox.put(Control(next(self._control_numbers), op, answer))
        return answer

    def close(self) -> None:
        """Stop the thread and wait for it, except on itself; raises what closing the plugin did."""
        self._inbox.put(Close())
        if self.is_current:
            return
        self._thread.join(self._turns.patience_s)
        if self._thread.is_alive():
            self._turns.interrupt()
            self._thread.join()
        error, self._close_error = self._close_error, None
        if error is not None:
            raise error

    def _main(
        self,
        load: Callable[[], EngineCore[BatchingEntry]],
        ready: Future[EngineCore[BatchingEntry]],
    ) -> None:
        outcome = attempt(partial(self._live, load, ready))
        if not isinstance(outcome, Raised):
            return
        if ready.done():
            raise outcome.error  # a defect of this class: the interpreter reports it
        ready.set_exception(outcome.error)

    def _live(
        self,
        load: Callable[[], EngineCore[BatchingEntry]],
        ready: Future[EngineCore[BatchingEntry]],
    ) -> None:
        with self._rank.activated():
            core = load()
            core.entry.wake_with(partial(self._inbox.put, Wake()))
            self.statistics = core.entry.statistics()
            ready.set_result(core)
            outcome = attempt(partial(self._serve, core.entry))
            if isinstance(outcome, Raised):
                self._fail(core.entry.name, outcome.error)
            end_all = partial(self._end_all, failed=isinstance(outcome, Raised))
            closed = attempt(
                partial(run_every, [end_all, self._turns.close, core.close, self._rank.close])
            )
            if isinstance(closed, Raised):
                self._close_error = closed.error

    def _serve(self, entry: BatchingEntry) -> None:
        while self._take_turn(entry):
            events = entry.tick() if entry.busy else ()
            # Published first: who sees a request ended also sees it counted.
            self.statistics = entry.statistics()
            self._turns.settle(events)
            for live in self._requests.deliver(events):
                if not live.cancelled:
                    live.cancelled = True
                    self.post(Cancel(live))
            self._turns.finish()
            if self._aborting:
                self._answer_aborts(entry)

    def _take_turn(self, entry: BatchingEntry) -> bool:
        """Handle the messages of the next turn; False when told to close."""
        self._turns.take(self._inbox, self._taken, wait=not entry.busy)
        if not self._taken:
            return True
        while self._taken:
            # Taken out once it is handled: what raises leaves the others to be answered.
            match self._taken[0]:
                case Start(live=live, request=request):
                    entry.start(live.rid, request)
                case Cancel(live=live):
                    live.cancelled = True
                    entry.cancel(live.rid)
                case Control(op=op, answer=answer):
                    self._apply(entry, op, answer)
                case Close():
                    return False
            self._taken.popleft()
        self.statistics = entry.statistics()
        return True

    def _apply(
        self, entry: BatchingEntry, op: ControlOp | Question, answer: Future[ControlAnswer]
    ) -> None:
        applied: ControlAnswer
        try:
            applied = entry.ask(op) if isinstance(op, Question) else entry.control(op)
        except NotImplementedError as error:
            answer.set_exception(InvalidRequestError(str(error), field="op"))
            return
        except REFUSALS as error:
            self.statistics = entry.statistics()
            answer.set_exception(error)
            return
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
        if self._on_failure is not None:
            self._on_failure(cause)

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
        self._taken.extend(self._turns.unused())
        while not self._inbox.empty():
            message = self._inbox.get()
            if not isinstance(message, Wake):
                self._taken.append(message)
        answers = [aborting.answer for aborting in self._aborting]
        answers += [message.answer for message in self._taken if isinstance(message, Control)]
        for answer in answers:
            answer.set_exception(self._requests.unavailable())
        self.statistics = idle(self.statistics)
