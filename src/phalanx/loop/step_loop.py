"""The step loop: continuous batching over one step engine.

Every started request ends in exactly one terminal event. When running requests outgrow the memory,
one is moved to the host, or pushed back: its state is dropped and computed again later. The oldest
running request is never, while another is there, so the loop always gets on. What a request's own
state raises ends that request alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from phalanx.loop.admission import Admission
from phalanx.loop.eviction import EvictionPolicy, LeastRecentlyUsed
from phalanx.loop.request import LoopRequest, RequestState
from phalanx.loop.roster import Roster
from phalanx.loop.scheduler import Budget, StepPlan, plan_step
from phalanx.schema.events import Event
from phalanx.step.attempt import attempt_each
from phalanx.step.batch import ExecutingBatch
from phalanx.step.engine import StepEngine

Rows = Sequence[tuple[LoopRequest, int]]
"""Requests in a step, with their spans."""

_LRU = LeastRecentlyUsed()


def able(rows: Rows) -> Rows:
    """Those that can be computed now."""
    return tuple(row for row in rows if row[0].able)


def _advanced(row: tuple[LoopRequest, int]) -> None:
    request, span = row
    request.state.advance(span)


class StepLoop:
    """Requests of one rank. Plain synchronous code: one thread calls it."""

    def __init__(self, engine: StepEngine, budget: Budget, eviction: EvictionPolicy = _LRU) -> None:
        self._engine = engine
        self._budget = budget
        self._roster = Roster(engine, self._forget)
        self._admission = Admission(engine, self._roster, eviction)
        self._requests = self._roster.requests
        self._stalled = False
        self._num_left = 0
        """`num_left` of the roster when those who are held last tried again."""
        self.num_steps = 0
        self.num_ahead = 0
        """Steps that were prepared while another was computed; none where no loop looks ahead."""
        self.num_discarded = 0
        """Rows of such steps that were computed for nothing."""
        self.last_batch_size = 0
        self._paused = False

    @property
    def paused(self) -> bool:
        """While set, no step is computed."""
        return self._paused

    @paused.setter
    def paused(self, value: bool) -> None:
        if value:
            self.land()
        self._paused = value

    @property
    def busy(self) -> bool:
        """Whether a tick would compute or report anything.

        False too where everything waits for something outside; the engine's `waker` ends that.
        """
        if self._roster.events:
            return True
        waits = self._stalled and not self._engine.waker.woken
        return bool(self._requests) and not (self.paused or waits)

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        return len(self._roster.waiting)

    @property
    def num_push_backs(self) -> int:
        return self._roster.num_push_backs

    @property
    def num_offloaded(self) -> int:
        """Requests that wait with their state on the host, or some of it."""
        return self._roster.num_parked

    @property
    def num_offloads(self) -> int:
        return self._admission.num_offloads

    @property
    def num_reloads(self) -> int:
        return self._admission.num_reloads

    @property
    def idle(self) -> bool:
        """Whether no request is live."""
        return not self._requests

    def start(
        self,
        rid: str,
        state: RequestState,
        priority: int = 0,
        published: Mapping[str, object] | None = None,
    ) -> None:
        """Queue a request behind those of its priority.

        `published` is what another engine published of it, by resource; it is imported before the
        first step.
        """
        self._stalled = False
        self._roster.start(rid, state, priority, published)

    def cancel(self, rid: str) -> None:
        """End a request now, with what it has produced; unknown ids are ignored."""
        request = self._touch(rid)
        if request is not None:
            self._roster.cancel(request)

    def fail(self, rid: str, error: Exception) -> None:
        """End a request with an error of its own."""
        request = self._touch(rid)
        if request is not None:
            self._roster.fail(request, error)

    def drop(self, rid: str) -> None:
        """End a request without an event, for a caller that has reported its end."""
        request = self._touch(rid)
        if request is not None:
            self._roster.retire(request)

    def cancel_all(self) -> None:
        """End every live request."""
        for rid in list(self._requests):
            self.cancel(rid)

    def push_back_all(self) -> None:
        """Drop all computed state, on the device and on the host; requests wait in their old order."""
        self._stalled = False
        for request in list(self._requests.values()):
            if request.opened:
                self._roster.push_back(request)

    def _touch(self, rid: str) -> LoopRequest | None:
        self._stalled = False
        return self._requests.get(rid)

    def land(self) -> None:
        """Account for all that is being computed, so that nothing is."""

    def close(self) -> None:
        """Give back what the loop holds beside its requests; may be repeated."""

    def _forget(self, rid: str) -> None:
        """Free what the engine has of a request."""
        self._engine.remove_request(rid)

    def tick(self) -> list[Event]:
        """Run at most one step and return what happened since the last call, in order."""
        if not self.paused:
            with self._engine.backend.range("loop"):
                self._advance()
        return self._roster.take_events()

    def _advance(self) -> None:
        before = (self.num_steps, len(self._roster.events), self._admission.num_changes)
        self._step()
        after = (self.num_steps, len(self._roster.events), self._admission.num_changes)
        self._stalled = before == after and self._admission.waits

    def _step(self) -> None:
        plan = self._choose()
        if plan is not None:
            self._drive(plan, plan.rows)

    def _choose(self) -> StepPlan | None:
        """The next step, with everybody in who is to be in it."""
        roster, admission = self._roster, self._admission
        left, self._num_left = self._num_left, roster.num_left
        if self._engine.waker.take() or self._stalled or left != roster.num_left:
            admission.recheck()
        plan = self._plan()
        while plan is None and admission.make_way():
            plan = self._plan()
        if plan is None:
            return None
        admission.admit(plan.admitted)
        kept_out = not all(request.able for request in plan.admitted)
        if self._adopt(roster.running) or kept_out:
            return plan_step(roster.running, (), self._budget, self._engine)
        return plan

    def _drive(self, plan: StepPlan, rows: Rows) -> None:
        """Compute those of the rows that can be, and account for it."""
        rows = able(rows)
        while rows:
            batch = self._execute(plan, rows)
            if batch.admit_error is None:
                self._settle(batch, rows)
                return
            self._admission.resolve(batch)
            rows = able(rows)

    def _plan(self) -> StepPlan | None:
        roster = self._roster
        return plan_step(roster.running, roster.waiting, self._budget, self._engine)

    def _adopt(self, requests: Sequence[LoopRequest]) -> bool:
        """Let requests skip what is known of their tokens; whether any did, and wants less now."""
        adopted = False
        for request in list(requests):
            if request.work.remaining == 1 or request.held:
                continue
            count = self._engine.prefixes.adopt(request.work.node, request.rid)
            if count:
                adopted = True
                if self._roster.ask(request, partial(request.state.adopt, count)).error is None:
                    self._roster.renew(request)
        return adopted

    def _execute(self, plan: StepPlan, rows: Rows) -> ExecutingBatch:
        """One whole step, to the point where its outputs are there."""
        batch = self._prepared(plan, rows)
        self._engine.exec(batch)
        if batch.admit_error is None:
            self._engine.postprocess(batch)
        self._engine.finalize(batch)
        return batch

    def _prepared(self, plan: StepPlan, rows: Rows) -> ExecutingBatch:
        step_rows = [self._engine.row(request.rid, span) for request, span in rows]
        batch = ExecutingBatch(plan.node, plan.walk, step_rows)
        self._engine.prepare_inputs(batch)
        self._admission.leave_out(batch.skipped)
        return batch

    def _settle(self, batch: ExecutingBatch, rows: Rows) -> None:
        """Account for a step that ran: advance its rows, hand out values, end who has ended."""
        roster = self._roster
        computed = {row.request_id for row in batch.live_rows()}
        in_turn = sorted(rows, key=lambda row: row[0].turn)
        for request, _ in in_turn:
            request.turn = roster.next_turn()
        came_through = [row for row in in_turn if row[0].rid in computed]
        for (request, _), _, error in attempt_each(_advanced, came_through):
            if error is not None:
                batch.register_failure(request.rid, error)
        self.num_steps += bool(batch.rows)
        self.last_batch_size = len(computed)
        self._engine.check_stop(batch)
        failed = batch.failed_requests
        for request, _ in rows:
            if request.rid in failed:
                roster.fail(request, failed[request.rid])
        roster.report([request for request, _ in rows if request.rid not in failed])
