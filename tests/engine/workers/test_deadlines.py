"""When requests expire, and what is left of those that have ended."""

from __future__ import annotations

from phalanx.engine.workers.deadlines import Deadlines, Expired
from phalanx.testing import ManualClock


def test_r67_time_counts_from_the_submit_and_every_late_request_is_named():
    clock = ManualClock()
    deadlines = Deadlines(5.0, clock)
    assert deadlines.add(1, "a") == clock.monotonic_s() + 5.0
    deadlines.add(2, "b")
    clock.advance(2.0)
    deadlines.add(3, "c")
    clock.advance(2.999)
    assert deadlines.expired() == []
    clock.advance(0.001)
    assert deadlines.expired() == [Expired(1, "a", 5.0), Expired(2, "b", 5.0)]
    clock.advance(2.0)
    assert [each.rid for each in deadlines.expired()] == ["a", "b", "c"]


def test_the_next_to_expire_is_the_oldest_that_has_not_ended():
    clock = ManualClock()
    deadlines = Deadlines(5.0, clock)
    assert deadlines.next_s() is None
    first = deadlines.add(1, "a")
    clock.advance(1.0)
    second = deadlines.add(2, "b")
    assert deadlines.next_s() == first
    deadlines.remove(1)
    assert deadlines.next_s() == second
    deadlines.remove(2)
    deadlines.remove(2)
    assert deadlines.next_s() is None


def test_without_a_time_out_nothing_expires_and_requests_are_still_known():
    clock = ManualClock()
    deadlines = Deadlines(None, clock)
    assert deadlines.add(1, "a") is None
    clock.advance(1e9)
    assert deadlines.next_s() is None and deadlines.expired() == []
    assert deadlines.rid(1) == "a"
    deadlines.remove(1)
    assert deadlines.rid(1) is None
