"""Work of a known length."""

from __future__ import annotations

from phalanx.bench.busy_loop import burn, iterations_for


def test_the_same_iterations_are_the_same_work():
    assert burn(10) == burn(10) != burn(11)
    assert burn(0) == 1


def test_a_longer_time_takes_more_iterations():
    assert 0 < iterations_for(0.0002) < iterations_for(0.02)
