"""The step loop: continuous batching over one step engine.

Every started request ends in exactly one terminal event. When running requests outgrow the memory,
the youngest is pushed back: its state is dropped and computed again later. The oldest running
request is never pushed back while another is there, so the loop always gets on.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from phalanx.errors import RequestFailedError
from phalanx.loop.request import LoopRequest, RequestState, Status
from phalanx.loop.scheduler import Budget, StepPlan, plan_step
from phalanx.schema.events import Delta, Event, Failed, Final, Scheduled
from phalanx.step.batch import ExecutingBatch
from phalanx.step.engine import StepEngine
from phalanx.step.outcomes import AllocationFailed


def _rank(request: LoopRequest) -> tuple[int, int]:
    return request.rank


class StepLoop:
    """Requests of one rank. Plain synchronous code: one thread calls it."""

    def __init__(self, engine: StepEngine, budget: Budget) -> None:
        self._engine = engine
        self._budget = budget
        self._requests: dict[str, LoopRequest] = {}
        self._running: list[LoopRequest] = []
        self._waiting: list[LoopRequest] = []
        self._events: list[Event] = []
        self._num_arrived = 0
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
        request = LoopRequest(rid, state, priority, self._num_arrived)
        self._num_arrived += 1
        self._requests[rid] = request
        insort(self._waiting, request, key=_rank)

    def cancel(self, rid: str) -> None:
        """End a request now, with what it has produced; unknown ids are ignored."""
        request = self._requests.get(rid)
        if request is not None:
            output = request.state.output(cancelled=True)
            self._end(request, Final(rid, output, cancelled=True))

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
            self._step()
        events, self._events = self._events, []
        return events

    def _step(self) -> None:
        plan = plan_step(self._running, self._waiting, self._budget, self._engine.fits)
        if plan is None:
            return
        for request in plan.admitted:
            self._admit(request)
        rows = plan.rows
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
        self._engine.add_request(request.rid, request.state, request.state.resource_configs())
        if not request.was_scheduled:
            request.was_scheduled = True
            self._events.append(Scheduled(request.rid))

    def _execute(self, plan: StepPlan, rows: Sequence[tuple[LoopRequest, int]]) -> ExecutingBatch:
        step_rows = [self._engine.row(request.rid, span) for request, span in rows]
        batch = ExecutingBatch(plan.node, plan.walk, step_rows)
        self._engine.prepare_inputs(batch)
        self._engine.exec(batch)
        if batch.admit_error is None:
            self._engine.postprocess(batch)
        return batch

    def _settle(self, batch: ExecutingBatch, rows: Sequence[tuple[LoopRequest, int]]) -> None:
        """Account for a step that ran: advance its rows, hand out values, end who has ended."""
        computed = {row.request_id for row in batch.live_rows()}
        for request, span in rows:
            if request.rid in computed:
                request.state.advance(span)
                request.last_step = self.num_steps
        self.num_steps += 1
        self.last_batch_size = len(computed)
        self._engine.check_stop(batch)
        self._engine.finalize(batch)
        for request, _ in rows:
            error = batch.failed_requests.get(request.rid)
            if error is not None:
                self._end(request, Failed(request.rid, error))
            elif request.rid in computed:
                self._report(request)

    def _report(self, request: LoopRequest) -> None:
        delta = request.state.take_delta()
        if delta is not None:
            self._events.append(Delta(request.rid, delta))
        if request.state.next_work() is None:
            self._end(request, Final(request.rid, request.state.output(cancelled=False)))

    def _make_room(
        self, batch: ExecutingBatch, rows: Sequence[tuple[LoopRequest, int]]
    ) -> tuple[tuple[LoopRequest, int], ...]:
        """React to a refused step and return the rows to try again."""
        reason = batch.admit_error
        for rid, error in batch.failed_requests.items():
            self.fail(rid, error)
        if isinstance(reason, AllocationFailed):
            victim = self._running[-1] if self._running else None
            if victim is None or len(self._running) == 1:
                self.fail(reason.request_id, self._refused(reason.message))
            else:
                self._push_back(victim)
        else:
            assert reason is not None
            named = [reason.request_id] if reason.request_id else list(batch.request_ids)
            for rid in named:
                self.fail(rid, self._refused(reason.message))
        return tuple(row for row in rows if row[0].status is Status.RUNNING)

    @staticmethod
    def _refused(message: str) -> RequestFailedError:
        return RequestFailedError(f"the step was refused and no room can be made: {message}")

    def _push_back(self, request: LoopRequest) -> None:
        request.move(Status.WAITING)
        self._running.remove(request)
        self._engine.remove_request(request.rid)
        request.state.push_back()
        insort(self._waiting, request, key=_rank)
        self.num_push_backs += 1

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
