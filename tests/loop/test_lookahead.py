"""The step after the one that is computed, chosen before anybody knows what that one gives."""

from __future__ import annotations

from phalanx.loop.lookahead import foresee, outlook, plan_ahead
from phalanx.loop.outlook import Outlook
from phalanx.loop.request import LoopRequest, Status, Work
from phalanx.loop.scheduler import Budget
from phalanx.testing.token_request import TokenRequest


class Room:
    """A capacity of so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.asked: list[dict[str, int]] = []

    def fits(self, node, totals):
        self.asked.append(dict(totals))
        return sum(totals.values()) <= self.tokens

    def get_max_batch_size(self, node, walk):
        return None


class Unsure(TokenRequest):
    def work_after(self, span):
        return Outlook.UNKNOWN


def request(rid: str, turn: int, length: int, count: int = 9, kind=TokenRequest, **options):
    state = kind(tuple(range(length)), count, **options)
    made = LoopRequest(rid, state, 0, turn, state.next_work(), None)
    made.move(Status.RUNNING)
    return made


def foreseen_after(flying, running, turn):
    return foresee([(row[0], outlook(row)) for row in flying], running, turn)


def test_rows_go_on_as_they_foresee_and_take_the_next_turns():
    short, long = request("short", 2, 4), request("long", 1, 40)
    foreseen = foreseen_after([(short, 4), (long, 10)], [short, long], turn=7)
    assert foreseen.works == {
        "short": Work("toy", "generate", 1, 5),
        "long": Work("toy", "generate", 30, 40),
    }
    assert {one.rid: one.turn for one in foreseen.running} == {"long": 8, "short": 9}
    assert (short.turn, short.work.remaining) == (2, 4), "the requests are as they were"


def test_who_is_not_in_the_step_stands_where_it_was():
    flying, other = request("flying", 1, 4), request("other", 2, 4)
    foreseen = foreseen_after([(flying, 4)], [flying, other], turn=2)
    assert foreseen.running[1] is other
    plan = plan_ahead(foreseen, [], Budget(3, 8), Room(100))
    assert [(one.rid, span) for one, span in plan.rows] == [("flying", 1), ("other", 2)]


def test_one_that_cannot_say_stops_it_and_one_that_ends_does_not():
    ends, unsure = request("ends", 1, 4, count=1), request("unsure", 2, 4, kind=Unsure)
    assert foreseen_after([(ends, 4), (unsure, 4)], [ends, unsure], turn=2) is None
    foreseen = foreseen_after([(ends, 4)], [ends, unsure], turn=2)
    assert [one.rid for one in foreseen.running] == ["unsure"]
    assert foreseen.ending == {"ends": 4}


def test_a_request_that_is_about_to_end_still_holds_its_memory():
    ends = request("ends", 1, 6, count=1)
    state = TokenRequest((1, 2, 3, 4), 3)
    waiting = LoopRequest("waiting", state, 0, 2, state.next_work(), None)
    running = request("running", 3, 2)
    foreseen = foreseen_after([(ends, 6), (running, 2)], [ends, running], turn=3)
    room = Room(12)
    plan = plan_ahead(foreseen, [waiting], Budget(64, 8), room)
    assert room.asked == [{"ends": 6, "running": 3, "waiting": 4}]
    assert plan.admitted == ()
    assert plan_ahead(foreseen, [waiting], Budget(64, 8), Room(13)).admitted == (waiting,)


def test_a_request_that_is_about_to_end_still_has_its_place():
    ends, running = request("ends", 1, 6, count=1), request("running", 2, 2)
    state = TokenRequest((1, 2, 3, 4), 3)
    waiting = LoopRequest("waiting", state, 0, 3, state.next_work(), None)
    foreseen = foreseen_after([(ends, 6), (running, 2)], [ends, running], turn=3)
    assert plan_ahead(foreseen, [waiting], Budget(64, 2), Room(99)).admitted == ()
    assert plan_ahead(foreseen, [waiting], Budget(64, 3), Room(99)).admitted == (waiting,)
    alone = foreseen_after([(ends, 6)], [ends], turn=3)
    assert plan_ahead(alone, [waiting], Budget(64, 1), Room(99)) is None
