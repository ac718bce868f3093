"""The live requests of a loop in rank order, and every way that one begins, goes back and ends."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

from phalanx.errors import ConfigurationError
from phalanx.loop.request import LoopRequest, RequestState, Status, Work
from phalanx.schema.events import Delta, Event, Failed, Final, Scheduled
from phalanx.step.attempt import Attempt, attempt, attempt_each
from phalanx.step.engine import StepEngine

T = TypeVar("T")


def _rank(request: LoopRequest) -> tuple[int, int]:
    return request.rank


def _take_delta(request: LoopRequest) -> object | None:
    delta: object | None = request.state.take_delta()
    return delta


def _outcome(rid: str, state: RequestState, *, cancelled: bool) -> Final | Failed:
    """How a request ends that has computed all it wanted, or that is cancelled."""
    made = attempt(partial(state.output, cancelled=cancelled))
    if made.error is not None:
        return Failed(rid, made.error)
    return Final(rid, made.value, cancelled=cancelled)


class Roster:
    """See the module. What a request's own code raises ends that request alone.

    `num_parked` counts the waiting requests whose state the engine keeps.
    """

    def __init__(self, engine: StepEngine, forget: Callable[[str], None]) -> None:
        """`forget` frees what the engine has of a request."""
        self._engine = engine
        self._forget = forget
        self.requests: dict[str, LoopRequest] = {}
        self.running: list[LoopRequest] = []
        self.waiting: list[LoopRequest] = []
        self.events: list[Event] = []
        self.num_push_backs = 0
        self.num_parked = 0
        self.num_turns = 0
        self.num_left = 0
        """How often room may have come free: requests that ended, gave way or were pushed back."""

    def start(
        self,
        rid: str,
        state: RequestState,
        priority: int,
        published: Mapping[str, object] | None,
    ) -> None:
        """Queue a request behind those of its priority."""
        assert rid not in self.requests, f"{rid} is already live"
        made = attempt(partial(self._next_work, state))
        if made.error is not None:
            self.events.append(Failed(rid, made.error))
            return
        if made.value is None:
            self.events.append(_outcome(rid, state, cancelled=False))
            return
        # Its turn comes after that of all who are here, so endless arrivals starve nobody.
        request = LoopRequest(rid, state, priority, self.next_turn(), made.value, published)
        self.requests[rid] = request
        insort(self.waiting, request, key=_rank)

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def next_turn(self) -> int:
        self.num_turns += 1
        return self.num_turns

    def admit(self, request: LoopRequest) -> None:
        """From waiting to running; the engine opens it if it has no state of it."""
        request.move(Status.RUNNING)
        self.waiting.remove(request)
        insort(self.running, request, key=_rank)
        if request.opened:
            self.num_parked -= 1
        elif self.ask(request, partial(self._open, request)).error is None:
            request.opened = True

    def announce(self, request: LoopRequest) -> None:
        """Its first step comes next."""
        if not request.was_scheduled:
            request.was_scheduled = True
            self.events.append(Scheduled(request.rid))

    def park(self, request: LoopRequest) -> None:
        """From running to waiting; the engine keeps its state.

        Its turn is over: were it due again, with nobody beside it, no other would make the room
        that it waits for.
        """
        request.move(Status.WAITING)
        request.turn = self.next_turn()
        self.running.remove(request)
        insort(self.waiting, request, key=_rank)
        self.num_parked += 1
        self.num_left += 1

    def push_back(self, request: LoopRequest) -> None:
        """Drop an opened request's state; it waits and is computed again."""
        if request.status is Status.RUNNING:
            self.park(request)
        self._close(request)
        request.published = {}
        request.held = False
        self.num_push_backs += 1
        if self.ask(request, request.state.push_back).error is None:
            self.renew(request)

    def report(self, requests: Iterable[LoopRequest]) -> None:
        """Hand out what requests have produced, and ask what they want next."""
        wanting: list[LoopRequest] = []
        for request, delta, error in attempt_each(_take_delta, requests):
            if error is not None:
                self.fail(request, error)
                continue
            wanting.append(request)
            if delta is not None:
                self.events.append(Delta(request.rid, delta))
        for request, work, error in attempt_each(self._next_work_of, wanting):
            self._renewed(request, work, error)

    def cancel(self, request: LoopRequest) -> None:
        """End it now, with what it has produced."""
        self.end(request, _outcome(request.rid, request.state, cancelled=True))

    def fail(self, request: LoopRequest, error: Exception) -> None:
        """End it with an error of its own."""
        self.end(request, Failed(request.rid, error))

    def end(self, request: LoopRequest, event: Final | Failed) -> None:
        """Report a request's end and free everything it holds."""
        self.events.append(event)
        self.retire(request)

    def retire(self, request: LoopRequest) -> None:
        """The one way out for every request, however it ends."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            request.opened = False
        else:
            self.waiting.remove(request)
        request.move(Status.ENDED)
        del self.requests[request.rid]
        self._close(request)

    def ask(self, request: LoopRequest, call: Callable[[], T]) -> Attempt[T]:
        """Run a request's own code; what it raises ends the request."""
        made = attempt(call)
        if made.error is not None:
            self.fail(request, made.error)
        return made

    def _open(self, request: LoopRequest) -> None:
        configs = request.state.resource_configs()
        self._engine.add_request(request.rid, request.state, configs)

    def _close(self, request: LoopRequest) -> None:
        """Free what the engine has of a request that does not run."""
        if request.opened:
            request.opened = False
            self.num_parked -= 1
        self._forget(request.rid)
        self.num_left += 1

    def renew(self, request: LoopRequest) -> None:
        """Ask what it wants next; it ends with nothing."""
        made = attempt(partial(self._next_work, request.state))
        self._renewed(request, made.value, made.error)

    def _renewed(self, request: LoopRequest, work: Work | None, error: Exception | None) -> None:
        if error is not None:
            self.fail(request, error)
        elif work is not None:
            request.work = work
        else:
            self.end(request, _outcome(request.rid, request.state, cancelled=False))

    def _next_work_of(self, request: LoopRequest) -> Work | None:
        return self._next_work(request.state)

    def _next_work(self, state: RequestState) -> Work | None:
        work = state.next_work()
        if work is not None and work.node not in self._engine.nodes:
            raise ConfigurationError(
                f"the request asks for node {work.node!r}; there are {sorted(self._engine.nodes)}"
            )
        return work
