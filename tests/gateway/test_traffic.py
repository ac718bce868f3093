"""Counts, quantiles and rates, on a clock that the test moves."""

from __future__ import annotations

import pytest

from phalanx.gateway.traffic import BOUNDS_S, Quantiles, Traffic, is_failure
from phalanx.routing.endpoint import Endpoint
from phalanx.routing.load import ServerAccount, Ticket
from phalanx.routing.snapshot import Server
from phalanx.testing.clock import ManualClock

SERVER = Server("s", "m", Endpoint.parse("127.0.0.1:1"))


def ended(
    traffic: Traffic,
    seconds: float,
    code: str = "OK",
    served_s: float | None = None,
    started_s: float = 0.0,
):
    ticket = Ticket(SERVER, ServerAccount(0), started_s, lambda _: None)
    ticket.outcome(code, served_s=served_s, message="why " * 200)
    traffic.ended(ticket, seconds)


def test_quantiles_are_of_the_latest_requests_and_by_the_nearest_rank():
    traffic = Traffic(ManualClock())
    assert traffic.of("s").latency == Quantiles(None, None, None)
    for milliseconds in range(1, 101):
        ended(traffic, milliseconds / 1000)
    assert traffic.of("s").latency == Quantiles(50.0, 95.0, 99.0)
    for _ in range(512):
        ended(traffic, 2.0)
    assert traffic.of("s").latency == Quantiles(2000.0, 2000.0, 2000.0)
    histogram = traffic.of("s").latency_histogram
    assert sum(histogram.counts) == 612
    assert histogram.counts[BOUNDS_S.index(2.0)] == 512


def test_the_queue_is_what_the_model_did_not_take():
    traffic = Traffic(ManualClock())
    ended(traffic, 0.5, served_s=0.1)
    ended(traffic, 0.5)
    ended(traffic, 0.1, served_s=0.2)
    assert traffic.of("s").queue == Quantiles(0.0, 400.0, 400.0)


def test_rates_are_those_of_the_last_minute_by_the_second():
    clock = ManualClock()
    traffic = Traffic(clock)
    for count in (3, 1, 2):
        for _ in range(count):
            ended(traffic, 0.1, started_s=clock.monotonic_s())
        clock.advance(1)
    assert traffic.of("s").per_second[-4:] == (0, 3, 1, 2)
    clock.advance(30)
    assert traffic.of("s").per_second[-33:-29] == (3, 1, 2, 0)
    clock.advance(27)
    ended(traffic, 0.1, started_s=clock.monotonic_s())
    assert traffic.of("s").per_second == (3, 1, 2, *[0] * 57)
    clock.advance(1)
    assert traffic.of("s").per_second == (1, 2, *[0] * 57, 1)
    clock.advance(10_000)
    assert traffic.of("s").per_second == (0,) * 60


def test_requests_that_ended_long_before_the_others_are_in_no_rate():
    clock = ManualClock()
    traffic = Traffic(clock)
    ended(traffic, 0.1, started_s=clock.monotonic_s())
    clock.advance(100)
    ended(traffic, 0.1, started_s=clock.monotonic_s())
    assert traffic.of("s").per_second == (0,) * 60
    clock.advance(1)
    assert traffic.of("s").per_second == (*[0] * 59, 1)
    assert traffic.of("s").num_requests == 2


def test_many_requests_are_all_counted_by_how_they_ended():
    traffic = Traffic(ManualClock())
    for number in range(1000):
        ended(traffic, BOUNDS_S[number % len(BOUNDS_S)], code=("200", "503")[number % 10 == 0])
    told = traffic.of("s")
    assert told.codes == {"200": 900, "503": 100}
    assert told.latency_histogram.counts == (*[77] * 12, 76, 0)


def test_failures_are_kept_with_their_words_and_are_bounded():
    traffic = Traffic(ManualClock())
    for number in range(80):
        ended(traffic, 0.1, code=f"5{number:02d}")
    assert len(traffic.failures) == 50
    assert traffic.failures[-1].code == "579"
    assert len(traffic.failures[-1].message) == 300
    assert traffic.of("s").num_failed == 80


@pytest.mark.parametrize(
    ("code", "failed"),
    [
        ("OK", False),
        ("200", False),
        ("404", False),
        ("CANCELLED", False),
        ("INVALID_ARGUMENT", False),
    ]
    + [("500", True), ("503", True), ("UNAVAILABLE", True), ("DATA_LOSS", True)],
)
def test_what_a_caller_did_is_no_failure(code, failed):
    assert is_failure(code) is failed


def test_accounts_of_servers_that_are_gone_are_dropped():
    traffic = Traffic(ManualClock())
    ended(traffic, 0.1)
    traffic.keep(frozenset({"other"}))
    assert traffic.of("s").num_requests == 0
