"""What is counted of a replica, on a clock of its own."""

from __future__ import annotations

from phalanx.engine.replicas import ReplicaAccount
from phalanx.schema.statistics import QUEUE_TIME_BUCKETS_S


def test_a_replica_is_busy_while_anything_is_in_flight():
    account = ReplicaAccount(3, opened_s=100.0)
    account.enter(101.0)
    account.enter(102.0)
    account.leave(104.0)
    assert account.statistics(105.0, None).busy_s == 4.0
    account.leave(106.0)
    account.enter(109.0)
    statistics = account.statistics(110.0, None)
    assert (statistics.replica, statistics.busy_s, statistics.uptime_s) == (3, 6.0, 10.0)
    assert statistics.num_in_flight == 1


def test_r114_queueing_times_are_counted_in_their_classes():
    account = ReplicaAccount(0, opened_s=0.0)
    assert account.statistics(0.0, None).num_started == 0
    for queue_time_s in (0.0, 0.001, 0.0015, 120.0, 121.0):
        account.start(queue_time_s)
    statistics = account.statistics(0.0, None)
    counts = dict(zip((*QUEUE_TIME_BUCKETS_S, "above"), statistics.queue_time_counts, strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {
        0.001: 2,
        0.002: 1,
        120.0: 1,
        "above": 1,
    }
    assert statistics.num_started == 5
    assert statistics.queue_time_s == sum((0.0, 0.001, 0.0015, 120.0, 121.0))


def test_r114_payload_is_summed_and_the_largest_request_kept():
    account = ReplicaAccount(0, opened_s=0.0)
    for request_bytes in (10, 30, 20):
        account.carry(request_bytes)
    statistics = account.statistics(0.0, None)
    assert (statistics.request_bytes, statistics.max_request_bytes) == (60, 30)
