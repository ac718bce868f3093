"""The arithmetic and the table of `phalanx top`."""

from __future__ import annotations

import pytest
from rich.console import Console

from phalanx.cli.replica_rates import load_between
from phalanx.cli.replica_table import COLUMNS, replica_table
from phalanx.schema.statistics import EngineStatistics, ReplicaStatistics

EARLIER = ReplicaStatistics(
    replica=0,
    num_completed=10,
    num_failed=1,
    num_in_flight=2,
    queue_time_s=1.0,
    execution_time_s=5.0,
    busy_s=8.0,
    uptime_s=20.0,
    request_bytes=1_000_000,
    response_bytes=500_000,
    max_request_bytes=400_000,
    queue_time_counts=(5, 8),
)
LATER = ReplicaStatistics(
    replica=0,
    num_completed=18,
    num_failed=2,
    num_cancelled=1,
    num_in_flight=3,
    queue_time_s=1.5,
    execution_time_s=10.0,
    busy_s=11.0,
    uptime_s=24.0,
    request_bytes=9_000_000,
    response_bytes=900_000,
    max_request_bytes=640_000,
    device_utilization=0.5,
    queue_time_counts=(10, 13),
)
IDLE = ReplicaStatistics(replica=1, uptime_s=20.0, queue_time_counts=(0, 0))
STILL_IDLE = ReplicaStatistics(
    replica=1, uptime_s=24.0, device_utilization=0.1, queue_time_counts=(0, 0)
)


def statistics(*replicas: ReplicaStatistics) -> EngineStatistics:
    return EngineStatistics(replicas=replicas)


def test_r114_rates_are_over_the_interval():
    load = load_between(statistics(EARLIER), statistics(LATER))
    (row,) = load.replicas
    assert load.interval_s == 4.0
    assert (row.name, row.completed_per_s, row.num_failed, row.num_in_flight) == ("0", 2.0, 2, 3)
    assert row.queue_s == pytest.approx(0.05)  # 0.5 s over 10 started
    assert row.execution_s == pytest.approx(0.5)  # 5 s over 8 completed, 1 failed, 1 cancelled
    assert (row.busy, row.utilization) == (0.75, 0.5)
    assert row.payload_bytes_per_s == pytest.approx(2.1e6)
    assert row.max_request_bytes == 640_000


def test_the_total_adds_rates_and_takes_means_over_all_requests():
    load = load_between(statistics(EARLIER, IDLE), statistics(LATER, STILL_IDLE))
    total = load.total
    assert (total.name, total.completed_per_s, total.num_in_flight) == ("all", 2.0, 3)
    assert total.queue_s == load.replicas[0].queue_s
    assert (load.replicas[1].queue_s, load.replicas[1].execution_s) == (None, None)
    assert total.busy == 0.375
    assert total.utilization == pytest.approx(0.3)
    assert total.max_request_bytes == 640_000


def test_without_an_earlier_look_it_is_since_the_start():
    load = load_between(None, statistics(LATER))
    assert load.interval_s is None
    (row,) = load.replicas
    assert row.completed_per_s == 0.75
    assert row.queue_s == pytest.approx(1.5 / 23)
    assert row.busy == pytest.approx(11 / 24)


@pytest.mark.parametrize(
    "now",
    [
        statistics(ReplicaStatistics(replica=0, num_completed=3, uptime_s=2.0, busy_s=1.0)),
        statistics(ReplicaStatistics(replica=0, num_completed=3, uptime_s=40.0, busy_s=20.0)),
        statistics(ReplicaStatistics(replica=0, num_completed=90, uptime_s=20.0, busy_s=9.0)),
        statistics(LATER, STILL_IDLE),
    ],
)
def test_a_server_that_was_started_anew_begins_at_zero(now):
    load = load_between(statistics(EARLIER), now)
    assert load.interval_s is None
    assert all(row.completed_per_s >= 0 and row.busy <= 1 for row in load.replicas)


def test_a_server_without_replicas_or_time_has_rates_of_zero():
    assert load_between(None, statistics()).total.completed_per_s == 0.0
    fresh = load_between(None, statistics(ReplicaStatistics(replica=0)))
    assert (fresh.total.completed_per_s, fresh.total.busy) == (0.0, 0.0)


def shown(load, absent: str | None = None, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(replica_table("tiny (echo) at http://h:1", load, absent))
    return captured.get()


def test_the_table_has_a_row_a_replica_and_a_total():
    load = load_between(statistics(EARLIER, IDLE), statistics(LATER, STILL_IDLE))
    title, head, first, second, *_, total = [
        line.split() for line in shown(load).splitlines() if line.strip()
    ]
    assert " ".join(title) == "tiny (echo) at http://h:1, over 4.0 s"
    assert head == " ".join(COLUMNS).split()
    assert first == "0 2.00 2 3 50.0 500.0 75.0 50.0 2.10 640.0 kB".split()
    assert second == "1 0.00 0 0 - - 0.0 10.0 0.00 -".split()
    assert total == "all 2.00 2 3 50.0 500.0 37.5 30.0 2.10 640.0 kB".split()


def test_old_numbers_are_marked_with_the_reason():
    text = shown(load_between(None, statistics(LATER)), absent="it does not answer")
    assert "since its start" in text
    assert text.rstrip().endswith("it does not answer")


def test_it_fits_eighty_columns():
    text = shown(load_between(statistics(EARLIER, IDLE), statistics(LATER, STILL_IDLE)), width=80)
    assert "640.0 kB" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("queue_time_s", "text"),
    [(0.0, "0.00"), (0.00123, "1.23"), (0.0123, "12.3"), (60.0, "60000.0")],
)
def test_short_times_have_more_digits(queue_time_s, text):
    one = ReplicaStatistics(
        replica=0, queue_time_s=queue_time_s, queue_time_counts=(1,), uptime_s=1.0
    )
    assert shown(load_between(None, statistics(one))).splitlines()[2].split()[4] == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "-"), (999, "999 B"), (1000, "1.0 kB"), (602_112, "602.1 kB"), (8_000_000, "8.0 MB"),
     (2_500_000_000, "2.5 GB")],
)  # fmt: skip
def test_sizes_are_readable(num_bytes, text):
    load = load_between(
        None, statistics(ReplicaStatistics(replica=0, max_request_bytes=num_bytes, uptime_s=1.0))
    )
    assert shown(load).splitlines()[2].rstrip().endswith(f" {text}")
