"""Times of ranges on a clock that is moved by hand."""

from __future__ import annotations

import threading

import pytest

from phalanx.device import create_backend
from phalanx.device.stage_times import StageTimes


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_a_range_does_not_count_what_is_inside_it(clock):
    times = StageTimes(clock)
    for _ in range(2):
        with times.range("outer"):
            clock.now_s += 1
            with times.range("inner"):
                clock.now_s += 10
                with times.range("innermost"):
                    clock.now_s += 100
            clock.now_s += 2
    assert times.seconds() == {"outer": 6, "inner": 20, "innermost": 200}


def test_a_range_that_is_left_by_an_exception_counts(clock):
    times = StageTimes(clock)
    with pytest.raises(KeyError), times.range("outer"), times.range("inner"):
        clock.now_s += 5
        raise KeyError
    with times.range("later"):
        clock.now_s += 1
    assert times.seconds() == {"inner": 5, "outer": 0, "later": 1}


def test_ranges_of_another_thread_are_not_inside(clock):
    times = StageTimes(clock)

    def other():
        with times.range("other"):
            clock.now_s += 3

    with times.range("outer"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert times.seconds() == {"other": 3, "outer": 3}


def test_a_backend_counts_its_ranges_where_it_is_asked_to():
    times = StageTimes()
    backend = create_backend("cpu", times)
    with backend.range("step"):
        pass
    assert backend.stage_s().keys() == times.seconds().keys() == {"step"}
    assert create_backend("cpu").stage_s() == {}
