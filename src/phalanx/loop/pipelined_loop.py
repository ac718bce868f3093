"""A step loop that prepares and plans the next step while one is computed.

What a step gives is looked at, and handed out, while the next one runs already. Where a request
then turns out to have ended, its part in that step was computed for nothing and is discarded. At
most one step is in flight beside the one that is prepared; decisions depend on what the loop holds,
never on which thread was faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.loop.driving import create_driver
from phalanx.loop.driving.base import Pending, StepDriver
from phalanx.loop.eviction import EvictionPolicy, LeastRecentlyUsed
from phalanx.loop.lookahead import foresee, outlook, plan_ahead
from phalanx.loop.outlook import Outlook
from phalanx.loop.request import LoopRequest, RequestState, Status, Work
from phalanx.loop.scheduler import Budget, StepPlan
from phalanx.loop.step_loop import Rows, StepLoop, able
from phalanx.step.attempt import attempt_each
from phalanx.step.batch import ExecutingBatch
from phalanx.step.engine import StepEngine
from phalanx.step.outcomes import AllocationFailed

MAX_CONSECUTIVE_AHEAD = 1024
_LRU = LeastRecentlyUsed()


@dataclass
class _Flight:
    """A step that is computed. `works` is what it does for rows that were prepared ahead, `astray`
    those of them that turn out to want something else.
    """

    plan: StepPlan
    rows: Rows
    batch: ExecutingBatch
    done: Pending
    works: Mapping[str, Work] = field(default_factory=dict)
    astray: frozenset[str] = frozenset()

    def serves(self, request: LoopRequest) -> bool:
        """Whether the request still wants what this step does for it."""
        return request.status is Status.RUNNING and request.rid not in self.astray

    def compare(self) -> None:
        """Find who is astray, now that the step before is accounted for."""
        works = self.works
        alive = [one for one, _ in self.rows if one.status is Status.RUNNING]
        wrong = {one.rid for one in alive if works.get(one.rid, one.work) != one.work}
        self.astray = frozenset(wrong)

    @property
    def worthwhile(self) -> bool:
        """Whether it is computed for somebody, and for nobody who goes on elsewhere."""
        alive = any(one.status is Status.RUNNING for one, _ in self.rows)
        return alive and not self.astray


@dataclass(frozen=True)
class _Ahead:
    """A step that is prepared, and planned when `planned` is done, while another is in flight."""

    plan: StepPlan
    rows: Rows
    batch: ExecutingBatch
    planned: Pending | None
    works: Mapping[str, Work]


class PipelinedLoop(StepLoop):
    """See the module. One thread calls it; `close` ends the threads of its own, if it has any.

    `max_consecutive` steps are prepared ahead in a row, then one is chosen with all that is known.
    Steps are computed by the `driver`, by default the one that suits the device.
    """

    def __init__(
        self,
        engine: StepEngine,
        budget: Budget,
        eviction: EvictionPolicy = _LRU,
        max_consecutive: int = MAX_CONSECUTIVE_AHEAD,
        driver: StepDriver | None = None,
    ) -> None:
        super().__init__(engine, budget, eviction)
        self._driver = driver or create_driver(engine)
        self._reading = engine.backend.stream()
        self._max_consecutive = max_consecutive
        self._flight: _Flight | None = None
        self._departed: dict[str, None] = {}
        """Requests that have ended while a step with them is in flight, in that order: on every
        rank their memory must come back in the same one."""
        self._num_consecutive = 0

    @property
    def busy(self) -> bool:
        return self._flight is not None or super().busy

    def start(
        self,
        rid: str,
        state: RequestState,
        priority: int = 0,
        published: Mapping[str, object] | None = None,
    ) -> None:
        if rid in self._departed:
            self.land()
        super().start(rid, state, priority, published)

    def push_back_all(self) -> None:
        self.land()
        super().push_back_all()

    def land(self) -> None:
        flight = self._flight
        if flight is not None:
            self._await(flight)
            self._account(flight)

    def close(self) -> None:
        if self._flight is not None:
            self._withdraw(self._flight)
        self._driver.close()
        self._flight = None
        self._release_departed()

    def _step(self) -> None:
        flight = self._flight or self._launch()
        if flight is None:
            return
        ahead = self._look_ahead(flight)
        try:
            self._await(flight)
            if ahead is not None and ahead.planned is not None:
                ahead.planned.result()
        except BaseException:
            self._abandon(ahead)
            raise
        if ahead is None or flight.batch.admit_error or flight.batch.failed_requests:
            self._abandon(ahead)
            self._num_consecutive = 0
        else:
            self._take_off(ahead, flight)
        self._account(flight)
        if self._flight is not None:
            self._flight.compare()
            if not self._flight.worthwhile and not self._withdraw(self._flight):
                self.land()

    def _launch(self) -> _Flight | None:
        """Compute the next step by all that is known."""
        plan = self._choose()
        rows = () if plan is None else able(plan.rows)
        if plan is None or not rows:
            return None
        batch = self._prepared(plan, rows)
        self._flight = _Flight(plan, rows, batch, self._driver.compute(batch))
        return self._flight

    def _look_ahead(self, flight: _Flight) -> _Ahead | None:
        """Prepare the step after this one; None where that must wait for its outcome."""
        engine, yields = self._engine, self._num_consecutive >= self._max_consecutive
        if yields or engine.waker.woken or not engine.speculates(flight.plan.node):
            return None
        flying = {row.request_id: row.span for row in flight.batch.rows}
        found = self._plan_ahead(flight, [row for row in flight.rows if row[0].rid in flying])
        if found is None:
            return None
        plan, works = found
        rows = tuple((self._requests[one.rid], span) for one, span in plan.rows)
        ahead = {rid: span for rid, span in flying.items() if rid in works}
        step_rows = [engine.row(one.rid, span, ahead.get(one.rid, 0)) for one, span in rows]
        batch = ExecutingBatch(plan.node, plan.walk, step_rows)
        engine.prepare_inputs(batch)
        # Of those ahead the node knows too little to say more than that this step is not theirs.
        self._admission.leave_out(batch.skipped - ahead.keys())
        plans = engine.can_pre_plan(plan.node)
        planned = self._driver.plan(batch, flight.batch) if plans else None
        return _Ahead(plan, rows, batch, planned, works)

    def _plan_ahead(
        self, flight: _Flight, flying: Rows
    ) -> tuple[StepPlan, Mapping[str, Work]] | None:
        """The next step if these rows go on as they foresee, and what they then want.

        Who is new is let in for it, if that takes nothing but room that is free.
        """
        roster = self._roster
        outlooks = self._outlooks(flying)
        foreseen = foresee(outlooks, roster.running, roster.num_turns) if outlooks else None
        if foreseen is None:
            return None
        plan = plan_ahead(foreseen, roster.waiting, self._budget, self._engine)
        admitted = () if plan is None else plan.admitted
        if any(one.opened or one.published for one in admitted):
            return None
        self._admission.admit(admitted)
        if self._adopt_beside(flight) or admitted:
            foreseen = foresee(outlooks, roster.running, roster.num_turns)
            assert foreseen is not None
            plan = plan_ahead(foreseen, (), self._budget, self._engine)
        if plan is None or not self._engine.speculates(plan.node):
            return None
        return plan, foreseen.works

    def _outlooks(self, flying: Rows) -> list[tuple[LoopRequest, Work | Outlook]]:
        """What the rows of a step foresee; none at all where one has ended by what it raised, now or
        when it was asked before.
        """
        outlooks: list[tuple[LoopRequest, Work | Outlook]] = []
        asked = attempt_each(outlook, flying)
        for (request, _), wanted, error in asked:
            if error is not None:
                if request.status is not Status.ENDED:
                    self._roster.fail(request, error)
            elif wanted is not None:
                outlooks.append((request, wanted))
        return outlooks if len(outlooks) == len(asked) else []

    def _adopt_beside(self, flight: _Flight) -> bool:
        """As `_adopt`, for requests that are not in flight."""
        flying = {one.rid for one, _ in flight.rows}
        beside = [
            one
            for one in self._roster.running
            if one.rid not in flying and one.work.remaining > 1 and one.able
        ]
        if not any(self._engine.prefixes.adoptable(one.work.node) for one in beside):
            return False
        # What is known of their tokens must not depend on how far the step has come.
        self._driver.await_commit(flight.batch, flight.done)
        return self._adopt(beside)

    def _await(self, flight: _Flight) -> None:
        """Wait until a step has run; raises what escaped from it."""
        try:
            flight.done.result()
        finally:
            if flight.done.done():
                self._flight = None
                self._release_departed()

    def _withdraw(self, flight: _Flight) -> bool:
        """Take a step back that has not begun, with all that was reserved for it."""
        if not self._driver.withdraw(flight.done):
            return False
        self._engine.reset_pre_plan(flight.batch)
        self._flight = None
        self._release_departed()
        self.num_ahead -= 1
        return True

    def _take_off(self, ahead: _Ahead, before: _Flight) -> None:
        """Compute the prepared step on what the one before it gave."""
        done = self._driver.compute(ahead.batch, before.batch.outputs)
        self._flight = _Flight(ahead.plan, ahead.rows, ahead.batch, done, ahead.works)
        self._num_consecutive += 1
        self.num_ahead += 1
        # Until the device is at work, this thread would only be in the way of the other.
        self._driver.await_launch(ahead.batch)

    def _abandon(self, ahead: _Ahead | None) -> None:
        """Forget a prepared step, with all that was reserved for it."""
        if ahead is not None:
            if ahead.planned is not None:
                self._driver.withdraw(ahead.planned)
            self._engine.reset_pre_plan(ahead.batch)

    def _account(self, flight: _Flight) -> None:
        """Settle the rows of a step whose requests are where it took them to be."""
        gone = {one.rid for one, _ in flight.rows if not flight.serves(one)}
        rows = tuple(row for row in flight.rows if row[0].rid not in gone) if gone else flight.rows
        if flight.batch.admit_error is not None:
            # Room it was refused for may have been freed by those who ended since.
            if not isinstance(flight.batch.admit_error, AllocationFailed) and not gone:
                self._admission.resolve(flight.batch)
            self._drive(flight.plan, rows)
            return
        if flight.batch.completed is not None:
            flight.batch.completed.synchronize()
        gone.intersection_update(flight.batch.request_ids)
        useless = [one for one, _ in flight.rows if one.rid in gone]
        self.num_discarded += len(useless)
        flight.batch.discard(gone)
        if rows:
            # Not behind the next step, which is on the device's default stream already.
            with self._engine.backend.on_stream(self._reading):
                self._settle(flight.batch, rows)
        for request in useless:
            if request.status is Status.RUNNING:
                self._roster.push_back(request)

    def _execute(self, plan: StepPlan, rows: Rows) -> ExecutingBatch:
        batch = self._prepared(plan, rows)
        self._driver.compute(batch).result()
        return batch

    def _forget(self, rid: str) -> None:
        flight = self._flight
        if flight is not None and any(one.rid == rid for one, _ in flight.rows):
            self._departed[rid] = None
        else:
            self._engine.remove_request(rid)

    def _release_departed(self) -> None:
        departed, self._departed = self._departed, {}
        for rid in departed:
            self._engine.remove_request(rid)
