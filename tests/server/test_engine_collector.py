"""The engine's counters as Prometheus metrics, one series a replica."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from phalanx.schema.statistics import (
    QUEUE_TIME_BUCKETS_S,
    EngineStatistics,
    LoopStatistics,
    ReplicaStatistics,
)
from phalanx.server.engine_collector import EngineCollector

COUNTS = tuple(range(len(QUEUE_TIME_BUCKETS_S) + 1))
FIRST = ReplicaStatistics(
    replica=0,
    num_completed=7,
    num_failed=1,
    num_cancelled=2,
    num_in_flight=3,
    queue_time_s=1.5,
    execution_time_s=4.0,
    busy_s=6.0,
    uptime_s=10.0,
    request_bytes=1000,
    response_bytes=200,
    max_request_bytes=400,
    device_utilization=0.25,
    queue_time_counts=COUNTS,
)
SECOND = ReplicaStatistics(replica=1, num_completed=5, uptime_s=10.0)


def samples(statistics: EngineStatistics) -> dict[str, float]:
    """Every exposed sample by its name and sorted labels."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: statistics))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("requests_total{outcome=completed,replica=0}", 7),
        ("requests_total{outcome=failed,replica=0}", 1),
        ("requests_total{outcome=aborted,replica=0}", 2),
        ("requests_total{outcome=completed,replica=1}", 5),
        ("in_flight_requests{replica=0}", 3),
        ("in_flight_requests{replica=1}", 0),
        ("queue_time_seconds_total{replica=0}", 1.5),
        ("execution_time_seconds_total{replica=0}", 4),
        ("busy_seconds_total{replica=0}", 6),
        ("uptime_seconds_total{replica=1}", 10),
        ("request_bytes_total{replica=0}", 1000),
        ("response_bytes_total{replica=0}", 200),
        ("max_request_bytes{replica=0}", 400),
        ("device_utilization{replica=0}", 0.25),
    ],
)
def test_r114_each_replica_has_its_series(name, value):
    found = samples(EngineStatistics(replicas=(FIRST, SECOND)))
    assert found[f"phalanx_replica_{name}"] == value


def test_a_device_that_is_not_measured_has_no_series():
    found = samples(EngineStatistics(replicas=(FIRST, SECOND)))
    assert "phalanx_replica_device_utilization{replica=1}" not in found


def test_steps_ahead_and_what_was_computed_for_nothing_are_counted():
    loop = LoopStatistics(num_steps=9, num_ahead=7, num_discarded=2)
    found = samples(EngineStatistics(loop=loop))
    assert found["phalanx_steps_ahead_total{}"] == 7
    assert found["phalanx_discarded_rows_total{}"] == 2


def test_queue_times_are_cumulative_in_their_bounds():
    found = samples(EngineStatistics(replicas=(FIRST,)))
    for index, bound in enumerate(QUEUE_TIME_BUCKETS_S):
        key = f"phalanx_queue_time_seconds_bucket{{le={bound},replica=0}}"
        assert found[key] == sum(COUNTS[: index + 1])
    assert found["phalanx_queue_time_seconds_bucket{le=+Inf,replica=0}"] == sum(COUNTS)
    assert found["phalanx_queue_time_seconds_count{replica=0}"] == sum(COUNTS) == FIRST.num_started
    assert found["phalanx_queue_time_seconds_sum{replica=0}"] == 1.5


def test_the_totals_stay_beside_the_replicas():
    loop = LoopStatistics(num_running=2, pool_tokens=100, pool_used_tokens=25, paused=True)
    found = samples(EngineStatistics(num_completed=12, num_refused=4, num_in_flight=3, loop=loop))
    assert found["phalanx_engine_requests_total{outcome=completed}"] == 12
    assert found["phalanx_engine_requests_total{outcome=refused}"] == 4
    assert found["phalanx_in_flight_requests{}"] == 3
    assert found["phalanx_running_requests{}"] == 2
    assert found["phalanx_kv_pool_usage{}"] == 0.25
    assert found["phalanx_paused{}"] == 1
    assert not any("replica=" in name for name in found)
