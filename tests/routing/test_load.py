"""The choice of a server: fewest in flight, ties in turn, counted in the same step."""

from __future__ import annotations

from collections import Counter

import pytest

from phalanx.errors import NoServerError
from phalanx.routing.endpoint import Endpoint
from phalanx.routing.load import InFlight
from phalanx.routing.snapshot import Server, ServerState
from phalanx.testing.clock import ManualClock


def servers(*names: str) -> tuple[Server, ...]:
    return tuple(
        Server(name, "m", Endpoint.parse("127.0.0.1:1"), ServerState.READY) for name in names
    )


def load() -> InFlight:
    return InFlight(ManualClock(), on_idle=lambda _: None)


def test_r95_the_server_with_the_fewest_in_flight_is_chosen_in_turn_where_they_tie():
    pool, in_flight = servers("a", "b", "c"), load()
    tickets = [in_flight.acquire(pool) for _ in range(5)]
    assert [ticket.server.server_id for ticket in tickets] == ["a", "b", "c", "a", "b"]
    tickets[1].release()
    tickets[4].release()
    assert in_flight.acquire(pool).server.server_id == "b"
    assert (in_flight.count("a"), in_flight.count("b"), in_flight.total) == (2, 1, 4)


def test_ties_rotate_when_requests_follow_one_another():
    pool, in_flight = servers("a", "b", "c"), load()
    chosen = Counter()
    for _ in range(30):
        with in_flight.acquire(pool) as ticket:
            chosen[ticket.server.server_id] += 1
    assert chosen == {"a": 10, "b": 10, "c": 10}


def test_a_tie_goes_on_in_turn_when_servers_come_and_go():
    in_flight = load()
    for _ in range(4):
        in_flight.acquire(servers("a", "b")).release()
    assert in_flight.acquire(servers("a", "b", "new")).server.server_id == "new"


def test_an_excluded_server_is_not_chosen_however_idle_it_is():
    pool, in_flight = servers("a", "b"), load()
    in_flight.acquire(servers("b"))
    assert in_flight.acquire(pool, frozenset("a")).server.server_id == "b"
    with pytest.raises(NoServerError, match="has been tried"):
        in_flight.acquire(pool, frozenset("ab"))


def test_releasing_twice_counts_once_and_the_last_one_makes_idle():
    idle: list[str] = []
    in_flight = InFlight(ManualClock(), on_idle=idle.append)
    first, second = in_flight.acquire(servers("a")), in_flight.acquire(servers("a"))
    first.release()
    first.release()
    assert (in_flight.count("a"), idle) == (1, [])
    second.release()
    assert (in_flight.count("a"), idle) == (0, ["a"])


def test_who_listens_is_told_how_long_a_request_was_there_and_what_it_came_to():
    clock, told = ManualClock(), []
    in_flight = InFlight(clock, on_idle=lambda _: None)
    in_flight.listen(lambda ticket, seconds: told.append((ticket.code, seconds)))
    answered, left = in_flight.acquire(servers("a")), in_flight.acquire(servers("a"))
    clock.advance(2)
    answered.outcome("OK", served_s=1.5)
    answered.release()
    left.release()
    left.release()
    assert told == [("OK", 2), ("CANCELLED", 2)]


def test_r108_requests_are_counted_and_not_their_cost():
    """A server with one dear request is as busy as one with one cheap request."""
    pool, in_flight = servers("dear", "cheap"), load()
    in_flight.acquire(pool)
    in_flight.acquire(pool)
    third = [in_flight.acquire(pool).server.server_id for _ in range(2)]
    assert sorted(third) == ["cheap", "dear"]


def test_r95_a_slow_server_gets_few_of_the_requests_beside_a_fast_one():
    """0.5 s and 0.02 s a request, 8 in flight, 200 requests, on a clock of the test's own."""
    pool, in_flight = servers("slow", "fast"), load()
    takes_s = {"slow": 0.5, "fast": 0.02}
    free_s = dict.fromkeys(takes_s, 0.0)
    chosen: Counter[str] = Counter()
    running: list[tuple[float, object]] = []
    now_s = 0.0
    for _ in range(200):
        if len(running) == 8:
            running.sort(key=lambda end: end[0])
            now_s, ticket = running.pop(0)
            ticket.release()
        ticket = in_flight.acquire(pool)
        name = ticket.server.server_id
        chosen[name] += 1
        # One at a time, as a policy server without batching.
        free_s[name] = max(free_s[name], now_s) + takes_s[name]
        running.append((free_s[name], ticket))
    assert chosen["slow"] <= 15
    assert chosen.total() == 200
