"""Times that are over: of requests, and of a start; and a group that waits without looking."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from phalanx.engine.workers.lifecycle import LifecycleState
from phalanx.engine.workers.messages import Cancel, Finished
from phalanx.errors import EngineUnavailableError, InvalidRequestError
from phalanx.testing import ManualClock
from phalanx.testing.worker_runtimes import Deed, Held, Misdeed, Phase
from tests.engine.workers.supervised import Recorder

pytestmark = pytest.mark.long


def test_r63_an_expired_request_fails_the_group_without_anybody_asking(started, listener):
    supervisor = started(execution_timeout_s=0.05)
    supervisor.submit(0, 1, "slow", Held())
    error = listener.failures.get()
    assert "1 request did not end within execution_timeout_s=0.05 of submission" in str(error)
    assert "'slow' (0.0" in str(error)
    assert isinstance(error.__cause__, TimeoutError)


def test_the_time_of_a_request_that_was_refused_does_not_count(started, listener):
    clock = ManualClock()
    supervisor = started(clock=clock, execution_timeout_s=5.0)
    with pytest.raises(InvalidRequestError):
        supervisor.submit(0, 1, "refused", {"file": threading.Lock()})
    clock.advance(10.0)
    for number in (2, 3):
        supervisor.submit(0, number, "x", number)
        listener.answers(1)
        supervisor.completed(number)
    assert supervisor.state is LifecycleState.RUNNING and listener.failures.empty()


def test_the_time_of_a_request_that_has_ended_does_not_count(started, listener):
    supervisor = started(execution_timeout_s=0.05)
    supervisor.submit(0, 1, "quick", "x")
    assert listener.answers(1) == {1: "x"}
    supervisor.completed(1)
    supervisor.submit(0, 2, "slow", Held())
    text = str(listener.failures.get())
    assert "1 request did" in text and "'slow' (0.0" in text


def test_r67_every_expired_request_is_named_and_queueing_counts(started, listener):
    clock = ManualClock()
    supervisor = started(shape={"replicas": 2}, clock=clock, execution_timeout_s=5.0)
    supervisor.submit(0, 1, "first", Held())
    supervisor.submit(1, 2, "other replica", Held())
    clock.advance(1.0)
    supervisor.submit(0, 3, "queued behind it", Held())
    clock.advance(3.0)
    supervisor.submit(0, 4, "young", Held())
    clock.advance(2.0)
    supervisor.send(0, Cancel(99))  # whatever wakes the thread
    text = str(listener.failures.get())
    assert "3 requests did not end within execution_timeout_s=5" in text
    assert "'first' (6.000 s), 'other replica' (6.000 s), 'queued behind it' (5.000 s)" in text
    assert "young" not in text


def test_times_of_many_days_are_as_good_as_any(started, listener):
    days_s = 100 * 86_400.0
    supervisor = started(
        startup_timeout_s=days_s, execution_timeout_s=days_s, shutdown_timeout_s=days_s
    )
    supervisor.submit(0, 1, "a", "b")
    assert listener.answers(1) == {1: "b"}
    supervisor.submit(0, 2, "c", "d")
    assert listener.answers(1) == {2: "d"} and supervisor.failure is None


def times_woken(supervisor):
    """How often the group's thread has waited for something."""
    path = f"/proc/self/task/{supervisor._thread.native_id}/status"
    found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", Path(path).read_text(), re.MULTILINE)
    return int(found[1])


def test_a_group_that_waits_does_not_poll(started, listener):
    idle, busy = started(listener=Recorder()), started(listener=Recorder(), execution_timeout_s=99)
    busy.submit(0, 1, "a", Held())
    timed = started(execution_timeout_s=2.0)
    before = [times_woken(each) for each in (idle, busy)]
    timed.submit(0, 1, "a", Held())
    assert "'a' (2.0" in str(listener.failures.get())
    assert [times_woken(each) for each in (idle, busy)] == before


def test_a_start_that_takes_too_long_says_who_is_late(build, pipe, gate):
    late = pipe()
    supervisor = build(
        Misdeed(Phase.LOADING, Deed.WAIT, worker_id=1, announce=late.path, gate=gate.path),
        shape={"replicas": 2},
        startup_timeout_s=1.0,
    )
    with pytest.raises(EngineUnavailableError) as caught:
        supervisor.start()
    assert "within startup_timeout_s=1: worker " in str(caught.value)
    assert "worker 1 (replica 1, rank 0" in str(caught.value)
    assert isinstance(caught.value.__cause__, TimeoutError)
    supervisor.close()
    assert supervisor.pids == ()


class ForgetfulRecorder(Recorder):
    """Remembers events only."""

    def received(self, placement, reply, events):
        if events:
            super().received(placement, reply, events)


def test_a_worker_that_never_stops_talking_hides_neither_others_nor_the_time(started):
    listener = ForgetfulRecorder()
    supervisor = started(shape={"replicas": 2}, listener=listener, execution_timeout_s=1.0)
    supervisor.submit(0, 1, "talker", Misdeed(Phase.EXECUTING, Deed.FLOOD, packet=Finished(1)))
    supervisor.submit(1, 2, "sibling", "answered")
    assert listener.answers(1) == {2: "answered"}
    supervisor.completed(2)
    assert "1 request did not end within" in str(listener.failures.get())
