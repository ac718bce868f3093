"""Who gets memory, and who has to give it: requests taken in, held, moved away and dropped.

When a step finds no room, somebody's state is moved to the host, in the order of a policy; where
nothing can be moved, the state of one that waits with some is dropped, then that of the youngest
that runs. The oldest running request keeps its own while another has any, so the loop gets on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from phalanx.errors import RequestFailedError
from phalanx.loop.eviction import Candidate, EvictionPolicy
from phalanx.loop.request import LoopRequest, Status
from phalanx.loop.roster import Roster
from phalanx.step.batch import ExecutingBatch
from phalanx.step.engine import StepEngine
from phalanx.step.outcomes import (
    AdmitRuntimeError,
    AllocationFailed,
    NotReady,
    RefusalReason,
    RequestOffloading,
)


class Admission:
    """See the module. `num_changes` counts whatever may let another step run: moves and holds."""

    def __init__(self, engine: StepEngine, roster: Roster, policy: EvictionPolicy) -> None:
        self._engine = engine
        self._roster = roster
        self._policy = policy
        self.num_offloads = 0
        self.num_reloads = 0
        self._num_drops = 0
        self._num_holds = 0

    @property
    def num_changes(self) -> int:
        return self.num_offloads + self.num_reloads + self._num_drops + self._num_holds

    @property
    def waits(self) -> bool:
        """Whether none can run before something outside comes, which somebody is held for."""
        roster = self._roster
        able = any(request.able for request in roster.running)
        return not able and any(request.held for request in roster.requests.values())

    def admit(self, requests: Sequence[LoopRequest]) -> None:
        """Take waiting requests in, in this order; one without room holds those behind it."""
        for request in requests:
            away = request.opened
            self._roster.admit(request)
            if request.status is Status.RUNNING and (away or request.published):
                self._bring_in(request)
            if request.able:
                self._roster.announce(request)
            elif request.status is Status.WAITING:
                return

    def recheck(self) -> None:
        """Something outside has come, or room: whoever was held for it tries again."""
        for request in list(self._roster.requests.values()):
            if not request.held:
                continue
            request.held = False
            if request.status is Status.RUNNING and request.published:
                self._bring_in(request)
            if request.able:
                self._roster.announce(request)

    def make_way(self) -> bool:
        """Move somebody away for the first that waits, where those who run are all held."""
        running = self._roster.running
        waiting = [request for request in self._roster.waiting if not request.held]
        if not waiting or any(request.able for request in running):
            return False
        first = waiting[0]
        totals = {request.rid: request.work.total for request in (*running, first)}
        node = first.work.node
        return not self._engine.fits(node, totals) and self._relieve(node, None, first)

    def leave_out(self, rids: Collection[str]) -> None:
        """Hold these until they are woken: their node wants them in no step now."""
        for rid in rids:
            self._hold(self._roster.requests[rid])

    def resolve(self, batch: ExecutingBatch) -> None:
        """React to a refused step, so that its rows can be tried again without those it was for."""
        reason = batch.admit_error
        assert reason is not None
        if batch.failed_requests:
            # Their end may be room enough.
            for rid, error in batch.failed_requests.items():
                self._fail(rid, error)
            return
        match reason:
            case AllocationFailed():
                self._make_room(batch, reason)
            case RequestOffloading() | NotReady():
                for rid in _named(batch, reason):
                    self._set_aside(self._roster.requests[rid])
            case AdmitRuntimeError(message=message):
                for rid in _named(batch, reason):
                    self._fail(rid, RequestFailedError(f"the step was refused: {message}"))

    def _bring_in(self, request: LoopRequest) -> None:
        """Have its state here: what was moved away, and what another engine published."""
        away = self._engine.residency.is_offloaded(request.rid)
        while True:
            ask = partial(self._engine.check_ready, request.work.node, request.rid)
            outcome = self._roster.ask(request, partial(ask, request.published)).value
            if outcome is None:
                return
            if outcome.ok:
                self.num_reloads += away
                if outcome.ready:
                    request.published = {}
                else:
                    self._hold(request)
                return
            match outcome.reason:
                case AdmitRuntimeError(message=message):
                    error = RequestFailedError(f"its state could not be brought in: {message}")
                    self._roster.fail(request, error)
                    return
                case NotReady():
                    self._hold(request)
                    return
            if any(other.able for other in self._roster.running if other is not request):
                self._roster.park(request)
                return
            if not self._relieve(request.work.node, None, request):
                self._drop(request)
                return

    def _make_room(self, batch: ExecutingBatch, reason: AllocationFailed) -> None:
        running = self._roster.running
        oldest = next(request for request in running if request.able)
        affected = None if batch.failed_resource is None else (batch.failed_resource,)
        if self._relieve(batch.node, affected, oldest, batch.request_ids):
            return
        if len(running) > 1:
            self._roster.push_back(running[-1])
            return
        # Who waits with some state may hold what ran out, though it cannot be moved or counted.
        parked = [request for request in self._roster.waiting if request.opened]
        if parked:
            self._drop(parked[-1])
        else:
            error = RequestFailedError(f"no room can be made: {reason.message}")
            self._roster.fail(running[-1], error)

    def _relieve(
        self,
        node: str,
        affected: Collection[str] | None,
        spared: LoopRequest,
        in_batch: Collection[str] = (),
    ) -> bool:
        """Move the state of one request away, or drop that of one that waits; False if none has
        any. `affected` are the resources that ran out, None for all of the node.
        """
        residency, roster = self._engine.residency, self._roster
        holders = [
            request
            for request in (*roster.running, *roster.waiting)
            if request.opened
            and request is not spared
            and residency.reclaimable(node, request.rid, affected)
        ]
        for candidate in self._policy.order(self._candidates(holders, affected, in_batch)):
            if residency.offload(candidate.rid):
                self.num_offloads += 1
                request = roster.requests[candidate.rid]
                if request.status is Status.RUNNING:
                    roster.park(request)
                return True
        for request in reversed(roster.waiting):
            if request in holders:
                self._drop(request)
                return True
        return False

    def _candidates(
        self,
        holders: Sequence[LoopRequest],
        affected: Collection[str] | None,
        in_batch: Collection[str],
    ) -> list[Candidate]:
        measure = self._engine.residency.offload_priority
        return [
            Candidate(
                request.rid,
                request.rank,
                request.turn,
                request.rid in in_batch,
                sum(measure(request.rid, key) for key in affected or ()),
            )
            for request in holders
        ]

    def _set_aside(self, request: LoopRequest) -> None:
        """It cannot be computed now: it waits with its state on the host, or is held."""
        if self._engine.residency.is_offloaded(request.rid):
            self._roster.park(request)
        else:
            self._hold(request)

    def _hold(self, request: LoopRequest) -> None:
        self._num_holds += 1
        request.held = True

    def _drop(self, request: LoopRequest) -> None:
        self._num_drops += 1
        self._roster.push_back(request)

    def _fail(self, rid: str, error: Exception) -> None:
        request = self._roster.requests.get(rid)
        if request is not None:
            self._roster.fail(request, error)


def _named(batch: ExecutingBatch, reason: RefusalReason) -> Sequence[str]:
    """The rows that a refusal is about: the one that it names, else all."""
    named = [rid for rid in batch.request_ids if rid == reason.request_id]
    return named or batch.request_ids
