"""What is held for others ends once, and is freed when nobody reads it any more."""

from __future__ import annotations

import pytest

from phalanx.errors import RequestFailedError
from phalanx.step.transfer.base import TAKEN, Ending, Reason
from phalanx.step.transfer.holds import UNKNOWN, Holds
from phalanx.testing.clock import ManualClock
from tests.step.transfer.contents import READ, Held

DROPPED = Ending(Reason.DROPPED, "nobody wants it")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def holds(clock: ManualClock) -> Holds:
    return Holds(clock, 10.0)


def test_the_first_end_counts_and_frees_once(holds: Holds):
    state, endings = Held(), []
    key = holds.add(state)
    holds.watch(key, endings.append)
    for ending in (DROPPED, TAKEN):
        holds.end(key, ending)
    assert (state.num_freed, endings, len(holds)) == (1, [DROPPED], 0)


def test_item_8_5_11_a_hold_that_nobody_takes_expires(holds: Holds, clock: ManualClock):
    state, endings = Held(), []
    key = holds.add(state)
    holds.watch(key, endings.append)
    clock.advance(9.0)
    assert holds.expire() == pytest.approx(1.0)
    assert state.num_freed == 0
    clock.advance(1.0)
    assert holds.expire() is None
    assert state.num_freed == 1
    [ending] = endings
    assert ending.reason is Reason.EXPIRED
    assert "within 10 s" in ending.message


def test_a_hold_is_not_freed_while_it_is_read(holds: Holds, clock: ManualClock):
    state = Held()
    key = holds.add(state)
    with holds.reading(key, READ) as content:
        clock.advance(60.0)
        holds.expire()
        assert state.num_freed == 0
        assert bytes(content.chunk(1)) == b"vals"
        with pytest.raises(RequestFailedError, match="nothing is held"), holds.reading(key, READ):
            pass
    assert state.num_freed == 1


def test_who_asks_late_hears_how_it_ended(holds: Holds):
    key, endings = holds.add(Held()), []
    holds.end(key, DROPPED)
    holds.watch(key, endings.append)
    holds.watch("never", endings.append)
    assert endings == [DROPPED, UNKNOWN]


def test_what_is_not_there_cannot_be_read(holds: Holds):
    with pytest.raises(RequestFailedError, match="nothing is held"), holds.reading("x", READ):
        pass
    key = holds.add(Held())
    wrong = type(READ)("other", 1, 0, 4)
    with pytest.raises(RequestFailedError, match="'other'"), holds.reading(key, wrong):
        pass
    holds.end(key, TAKEN)
    assert len(holds) == 0


def test_a_close_ends_everything(holds: Holds):
    states, endings = [Held(), Held()], []
    for state in states:
        holds.watch(holds.add(state), endings.append)
    holds.close()
    assert [state.num_freed for state in states] == [1, 1]
    assert {ending.reason for ending in endings} == {Reason.CLOSED}
