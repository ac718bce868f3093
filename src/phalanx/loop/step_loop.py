"""The step loop: continuous batching over one step engine.

Every started request ends in exactly one terminal event. When running requests outgrow the memory,
the youngest is pushed back: its state is dropped and computed again later. The oldest running
request is never pushed back while another is there, so the loop always gets on. What a request's
own state raises ends that request alone.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from phalanx.errors import ConfigurationError, RequestFailedError
from phalanx.loop.request import LoopRequest, RequestState, Status, Work
from phalanx.loop.scheduler import Budget, StepPlan, plan_step
from phalanx.schema.events import Delta, Event, Failed, Final, Scheduled
from phalanx.step.attempt import Attempt, attempt
from phalanx.step.batch import ExecutingBatch
from phalanx.step.engine import StepEngine
from phalanx.step.outcomes import AllocationFailed

T = TypeVar("T")
_Rows = Sequence[tuple[LoopRequest, int]]


def _rank(request: LoopRequest) -> tuple[int, int]:
    return request.rank


def _running(rows: _Rows) -> _Rows:
    return tuple(row for row in rows if row[0].status is Status.RUNNING)


def _outcome(rid: str, state: RequestState, *, cancelled: bool) -> Final | Failed:
    """How a request ends that has computed all it wanted, or that is cancelled."""
    made = attempt(partial(state.output, cancelled=cancelled))
    if made.error is not None:
        return Failed(rid, made.error)
    return Final(rid, made.value, cancelled=cancelled)


class StepLoop:
    """Requests of one rank. Plain synchronous code: one thread calls it."""

    def __init__(self, engine: StepEngine, budget: Budget) -> None:
        self._engine = engine
        self._budget = budget
        self._requests: dict[str, LoopRequest] = {}
        self._running: list[LoopRequest] = []
        self._waiting: list[LoopRequest] = []
        self._events: list[Event] = []
        self._num_turns = 0
        self.num_steps = 0
        self.num_push_backs = 0
        self.last_batch_size = 0
        self.paused = False

    @property
    def busy(self) -> bool:
        """Whether a tick would compute or report anything."""
        return bool(self._events or (self._requests and not self.paused))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether no request is live."""
        return not self._requests

    def start(self, rid: str, state: RequestState, priority: int = 0) -> None:
        """Queue a request behind those of its priority."""
        assert rid not in self._requests, f"{rid} is already live"
        made = attempt(partial(self._next_work, state))
        if made.error is not None:
            self._events.append(Failed(rid, made.error))
            return
        if made.value is None:
            self._events.append(_outcome(rid, state, cancelled=False))
            return
        # Its turn comes after that of all who are here, so endless arrivals starve nobody.
        request = LoopRequest(rid, state, priority, self._next_turn(), made.value)
        self._requests[rid] = request
        insort(self._waiting, request, key=_rank)

    def cancel(self, rid: str) -> None:
        """End a request now, with what it has produced; unknown ids are ignored."""
        request = self._requests.get(rid)
        if request is not None:
            self._end(request, _outcome(rid, request.state, cancelled=True))

    def fail(self, rid: str, error: Exception) -> None:
        """End a request with an error of its own."""
        request = self._requests.get(rid)
        if request is not None:
            self._end(request, Failed(rid, error))

    def drop(self, rid: str) -> None:
        """End a request without an event, for a caller that has reported its end."""
        request = self._requests.get(rid)
        if request is not None:
            self._retire(request)

    def cancel_all(self) -> None:
        """End every live request."""
        for rid in list(self._requests):
            self.cancel(rid)

    def push_back_all(self) -> None:
        """Drop the computed state of all running requests; they wait in their old order."""
        for request in list(self._running):
            self._push_back(request)

    def tick(self) -> list[Event]:
        """Run at most one step and return what happened since the last call, in order."""
        if not self.paused:
            with self._engine.backend.range("loop"):
                self._step()
        events, self._events = self._events, []
        return events

    def _step(self) -> None:
        plan = plan_step(self._running, self._waiting, self._budget, self._engine)
        if plan is None:
            return
        for request in plan.admitted:
            self._admit(request)
        if self._adopt():
            plan = plan_step(self._running, (), self._budget, self._engine)
            if plan is None:
                return
        rows = _running(plan.rows)
        while rows:
            batch = self._execute(plan, rows)
            if batch.admit_error is None:
                self._settle(batch, rows)
                return
            rows = self._make_room(batch, rows)

    def _admit(self, request: LoopRequest) -> None:
        request.move(Status.RUNNING)
        self._waiting.remove(request)
        insort(self._running, request, key=_rank)
        opened = self._ask(request, partial(self._open, request))
        if opened.error is None and not request.was_scheduled:
            request.was_scheduled = True
            self._events.append(Scheduled(request.rid))

    def _open(self, request: LoopRequest) -> None:
        configs = request.state.resource_configs()
        self._engine.add_request(request.rid, request.state, configs)

    def _adopt(self) -> bool:
        """Let requests skip what is known of their tokens; whether any did, and wants less now."""
        adopted = False
        for request in list(self._running):
            if request.work.remaining == 1:
                continue
            count = self._engine.prefixes.adopt(request.work.node, request.rid)
            if count:
                adopted = True
                if self._ask(request, partial(request.state.adopt, count)).error is None:
                    self._renew(request)
        return adopted

    def _execute(self, plan: StepPlan, rows: _Rows) -> ExecutingBatch:
        step_rows = [self._engine.row(request.rid, span) for request, span in rows]
        batch = ExecutingBatch(plan.node, plan.walk, step_rows)
        self._engine.prepare_inputs(batch)
        self._engine.exec(batch)
        if batch.admit_error is None:
            self._engine.postprocess(batch)
        self._engine.finalize(batch)
        return batch

    def _settle(self, batch: ExecutingBatch, rows: _Rows) -> None:
        """Account for a step that ran: advance its rows, hand out values, end who has ended."""
        computed = {row.request_id for row in batch.live_rows()}
        for request, span in sorted(rows, key=lambda row: row[0].turn):
            request.turn = self._next_turn()
            if request.rid in computed:
                made = attempt(partial(request.state.advance, span))
                if made.error is not None:
                    batch.register_failure(request.rid, made.error)
        self.num_steps += 1
        self.last_batch_size = len(computed)
        self._engine.check_stop(batch)
        for request, _ in rows:
            error = batch.failed_requests.get(request.rid)
            if error is not None:
                self._end(request, Failed(request.rid, error))
            else:
                self._report(request)

    def _next_turn(self) -> int:
        self._num_turns += 1
        return self._num_turns

    def _report(self, request: LoopRequest) -> None:
        """Hand out what a request has produced, and ask what it wants next."""
        taken = self._ask(request, request.state.take_delta)
        if taken.value is not None:
            self._events.append(Delta(request.rid, taken.value))
        if taken.error is None:
            self._renew(request)

    def _renew(self, request: LoopRequest) -> None:
        made = self._ask(request, partial(self._next_work, request.state))
        if made.value is not None:
            request.work = made.value
        elif made.error is None:
            self._end(request, _outcome(request.rid, request.state, cancelled=False))

    def _next_work(self, state: RequestState) -> Work | None:
        work = state.next_work()
        if work is not None and work.node not in self._engine.nodes:
            raise ConfigurationError(
                f"the request asks for node {work.node!r}; there are {sorted(self._engine.nodes)}"
            )
        return work

    def _ask(self, request: LoopRequest, call: Callable[[], T]) -> Attempt[T]:
        """Run a request's own code; what it raises ends the request."""
        made = attempt(call)
        if made.error is not None:
            self._end(request, Failed(request.rid, made.error))
        return made

    def _make_room(self, batch: ExecutingBatch, rows: _Rows) -> _Rows:
        """React to a refused step and return the rows to try again."""
        reason = batch.admit_error
        assert reason is not None
        if batch.failed_requests:
            # Their end may be room enough.
            for rid, error in batch.failed_requests.items():
                self.fail(rid, error)
        elif isinstance(reason, AllocationFailed):
            victim = self._running[-1]
            if len(self._running) == 1:
                self.fail(victim.rid, RequestFailedError(f"no room can be made: {reason.message}"))
            else:
                self._push_back(victim)
        else:
            named = [rid for rid in batch.request_ids if rid == reason.request_id]
            for rid in named or batch.request_ids:
                self.fail(rid, RequestFailedError(f"the step was refused: {reason.message}"))
        return _running(rows)

    def _push_back(self, request: LoopRequest) -> None:
        request.move(Status.WAITING)
        self._running.remove(request)
        self._engine.remove_request(request.rid)
        insort(self._waiting, request, key=_rank)
        self.num_push_backs += 1
        if self._ask(request, request.state.push_back).error is None:
            self._renew(request)

    def _end(self, request: LoopRequest, event: Final | Failed) -> None:
        """Report a request's end and free everything it holds."""
        self._retire(request)
        self._events.append(event)

    def _retire(self, request: LoopRequest) -> None:
        """The one way out for every request, however it ends."""
        queue = self._running if request.status is Status.RUNNING else self._waiting
        queue.remove(request)
        request.move(Status.ENDED)
        del self._requests[request.rid]
        self._engine.remove_request(request.rid)
