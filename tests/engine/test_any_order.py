"""Submits, streams, cancels, operations, failures and closes in any order: every accepted request
ends exactly once, with what it should."""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from phalanx import Engine, EngineArgs, EngineUnavailableError, RequestFailedError
from phalanx.engine.streams import ResponseStream
from phalanx.errors import EngineOverloadedError, InvalidRequestError, StreamStalledError
from phalanx.schema.control import Continue, Flush, Pause, PauseMode
from phalanx.testing import (
    CountDelta,
    Counting,
    CountingArgs,
    CountOutput,
    CountRequest,
    Fault,
    ManualClock,
)

from .conftest import Gate, cpu_config, executor_of

MAX_PENDING = 6
STALL_S = 5.0


@Engine.register
class Recording(Counting):
    """Notes what was started."""

    name = "recording"

    def setup(self, args):
        super().setup(args)
        self.started = []

    def start(self, rid, request):
        self.started.append(request)
        super().start(rid, request)


@dataclass
class Accepted:
    rid: str
    request: CountRequest
    end: concurrent.futures.Future | ResponseStream
    cancel_asked: bool = False
    future_cancelled: bool = False
    items: list = field(default_factory=list)
    error: Exception | None = None
    over: bool = False


class AnyOrder(RuleBasedStateMachine):
    """What is drawn never depends on how far the loop's thread has come."""

    def __init__(self):
        super().__init__()
        self.gate = Gate()
        self.clock = ManualClock()
        config = cpu_config(max_pending_requests=MAX_PENDING, stall_timeout_s=STALL_S)
        arguments = CountingArgs(before_tick=self.gate, max_batch_size=3)
        self.engine = Engine(EngineArgs("recording", arguments, config), clock=self.clock)
        self.requests: list[Accepted] = []
        self.num_refused = 0
        self.answers = []
        self.broken = False
        self.closed = False
        self.aborted = False
        self.clock_moved = False

    def accept(self, verb, count, fault):
        rid = f"r{len(self.requests)}"
        request = CountRequest(count=count, fault=fault)
        try:
            end = getattr(self.engine, verb)(request, rid=rid)
        except EngineOverloadedError:
            assert self.engine.statistics().num_in_flight <= MAX_PENDING
            self.num_refused += 1
            return
        except EngineUnavailableError:
            assert self.broken or self.closed
            return
        if self.closed:
            assert isinstance(end.exception(), EngineUnavailableError)
            return
        # A broken plugin is found out at some later moment: the future may have failed already.
        self.requests.append(Accepted(rid, request, end))

    @rule(
        verb=st.sampled_from(["submit", "stream"]),
        count=st.integers(0, 6),
        fault=st.sampled_from([None, None, None, Fault.FAIL]),
    )
    def start(self, verb, count, fault):
        self.accept(verb, count, fault)

    @rule(
        fault=st.sampled_from([Fault.RAISE_IN_START, Fault.RAISE_IN_TICK, Fault.RAISE_IN_CANCEL]),
        rare=st.integers(0, 4),
    )
    def break_the_plugin(self, fault, rare):
        if rare == 0 and not self.closed:
            self.broken = True
            self.accept("submit", 3, fault)

    @rule(index=st.integers(0, 99))
    def cancel(self, index):
        if not self.requests:
            return
        accepted = self.requests[index % len(self.requests)]
        accepted.cancel_asked = True
        self.engine.cancel(accepted.rid)

    @rule(index=st.integers(0, 99))
    def cancel_future_or_close_stream(self, index):
        if not self.requests:
            return
        accepted = self.requests[index % len(self.requests)]
        if isinstance(accepted.end, ResponseStream):
            accepted.cancel_asked = True
            accepted.over = True
            accepted.end.close()
            assert list(accepted.end) == []
        else:
            accepted.future_cancelled |= accepted.end.cancel()

    @rule(index=st.integers(0, 99))
    def use_a_live_id_again(self, index):
        if not self.requests:
            return
        accepted = self.requests[index % len(self.requests)]
        if self.engine._requests.find(accepted.rid) is not None and not self.closed:
            request = CountRequest(count=accepted.request.count)
            try:
                again = self.engine.submit(request, rid=accepted.rid)
            except InvalidRequestError:
                self.num_refused += 1
            except EngineOverloadedError:
                self.num_refused += 1
            else:  # it ended in between
                self.requests.append(Accepted(accepted.rid, request, again, cancel_asked=True))

    @rule(num_ticks=st.integers(1, 4))
    def let_pass(self, num_ticks):
        for _ in range(num_ticks):
            self.gate.let_pass()

    @rule(op=st.sampled_from([*(Pause(mode) for mode in PauseMode), Continue(), Flush()]))
    def control(self, op):
        self.aborted |= op == Pause(PauseMode.ABORT)
        self.answers.append((op, executor_of(self.engine)._loop.control(op)))

    @rule(seconds=st.sampled_from([1.0, STALL_S + 1]))
    def time_goes_by(self, seconds):
        self.clock_moved = True
        self.clock.advance(seconds)

    @rule(rare=st.integers(0, 9))
    def close(self, rare):
        if rare == 0:
            self.closed = True
            self.gate.open()
            self.engine.close()

    @invariant()
    def counts_add_up(self):
        counts = self.engine.statistics()
        ended = counts.num_completed + counts.num_failed + counts.num_cancelled
        assert counts.num_accepted == ended + counts.num_in_flight
        assert counts.num_refused == self.num_refused

    def teardown(self):
        self.gate.open()
        if not self.closed and not self.broken:
            self.engine.control(Continue())
        for accepted in self.requests:
            self.read(accepted)
        self.engine.close()
        self.engine.close()
        for accepted in self.requests:
            self.check(accepted)
        for op, answer in self.answers:
            if answer.exception() is None:
                assert answer.result() or isinstance(op, Flush)
            else:
                assert isinstance(answer.exception(), EngineUnavailableError)
                assert self.broken or self.closed
        assert self.engine.statistics().num_in_flight == 0
        assert self.engine.entry.num_closes == 1
        assert len(self.engine.entry.started) <= self.engine.statistics().num_accepted
        self.counts_add_up()

    def read(self, accepted):
        if self.broken and not self.closed:
            # Whether the fault was reached depends on what was cancelled before.
            self.engine.close()
        try:
            if isinstance(accepted.end, ResponseStream):
                for item in accepted.end:
                    accepted.items.append(item)
            else:
                accepted.items.append(accepted.end.result())
        except concurrent.futures.CancelledError as error:
            accepted.error = error
        except Exception as error:
            accepted.error = error
        if isinstance(accepted.end, ResponseStream):
            assert list(accepted.end) == []

    def check(self, accepted):
        if isinstance(accepted.end, ResponseStream):
            numbers = sum(
                (item.numbers for item in accepted.items if isinstance(item, CountDelta)), ()
            )
            assert numbers == tuple(range(len(numbers)))
        if accepted.over:
            assert not accepted.items
            return
        error = accepted.error
        if accepted.future_cancelled:
            assert isinstance(error, concurrent.futures.CancelledError)
            started = self.engine.entry.started
            assert all(request is not accepted.request for request in started)
        elif isinstance(error, StreamStalledError):
            assert self.clock_moved
        elif isinstance(error, RequestFailedError):
            assert accepted.request.fault is Fault.FAIL
        elif isinstance(error, (EngineUnavailableError, concurrent.futures.CancelledError)):
            assert self.broken or self.closed
        else:
            assert error is None
            *_, output = accepted.items
            assert isinstance(output, CountOutput)
            complete = len(output.numbers) == accepted.request.count
            assert output.numbers == tuple(range(len(output.numbers)))
            assert complete or accepted.cancel_asked or self.aborted
            if isinstance(accepted.end, ResponseStream):
                assert numbers == output.numbers


AnyOrder.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAnyOrder = AnyOrder.TestCase
