"""Counters and gauges of an engine, as `Engine.statistics()` returns them."""

from __future__ import annotations

import msgspec

from phalanx.errors import EngineAsleepError
from phalanx.schema.control import ALL_TAGS, MemoryTag

QUEUE_TIME_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0),
)
"""Upper bounds of the classes in which queueing times are counted."""


class LoopStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a batching plugin's loop holds and has done; counters since its start.

    `num_generated_tokens` and `num_prompt_tokens` count computed work, `num_cached_tokens` prompt
    tokens that were found in the cache instead, `num_ahead` steps that were prepared while the one
    before was computed, `num_discarded` rows of them that were computed for nothing (their request
    had ended, or wanted something else), `num_retractions` requests pushed back,
    `num_offloads` and `num_reloads` requests whose state was moved to the host and brought back,
    `num_offloaded` those that wait with it there, `last_batch_size` the rows of the newest step,
    `pool_tokens` the capacity of the cache, `pool_used_tokens` the part of it that requests hold,
    and `pool_cached_tokens` the part that is kept for requests to come and given up when room is
    needed. `asleep` has the tags whose memory was given back, and `waiting_for_weights` is set where
    weights were lost that way and new ones have yet to come. `stage_s` has the host seconds that
    each stage of the steps took, where `RuntimeConfig.step_timings` asks for it.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_ahead: int = 0
    num_discarded: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_retractions: int = 0
    num_offloads: int = 0
    num_reloads: int = 0
    num_offloaded: int = 0
    last_batch_size: int = 0
    pool_tokens: int = 0
    pool_used_tokens: int = 0
    pool_cached_tokens: int = 0
    paused: bool = False
    asleep: frozenset[MemoryTag] = frozenset()
    waiting_for_weights: bool = False
    stage_s: dict[str, float] = {}


class ReplicaStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica has done since it was opened, and what is in flight there now.

    `queue_time_s` and `execution_time_s` are sums as in `EngineStatistics`. `busy_s` is the time
    during which at least one request was in flight; divided by `uptime_s` it is the busy fraction.
    `request_bytes` and `response_bytes` are payload that crossed to and from worker processes (0
    for a replica in this process), `max_request_bytes` the largest single request.
    `device_utilization` is the busy fraction of its devices, 0 to 1, as their driver measures it;
    None where there is no such measure. `queue_time_counts` has the started requests by their time
    in the queue: one count for each of `QUEUE_TIME_BUCKETS_S` (up to that bound and above the one
    before), and one for those above all.
    """

    replica: int
    num_completed: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_in_flight: int = 0
    queue_time_s: float = 0.0
    execution_time_s: float = 0.0
    busy_s: float = 0.0
    uptime_s: float = 0.0
    request_bytes: int = 0
    response_bytes: int = 0
    max_request_bytes: int = 0
    device_utilization: float | None = None
    queue_time_counts: tuple[int, ...] = ()
    loop: LoopStatistics | None = None

    @property
    def num_started(self) -> int:
        """Requests whose first step has begun."""
        return sum(self.queue_time_counts)

    @property
    def num_ended(self) -> int:
        """Requests that are no longer in flight, however they ended."""
        return self.num_completed + self.num_failed + self.num_cancelled


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by outcome since the start, and what is in flight now.

    `queue_time_s` is the sum over started requests of the time from submit to their first step;
    `execution_time_s` the sum over ended requests of the time from there to the end. `loop` and
    all counts are over all of `replicas`.
    """

    num_accepted: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_refused: int = 0
    num_in_flight: int = 0
    queue_time_s: float = 0.0
    execution_time_s: float = 0.0
    loop: LoopStatistics | None = None
    replicas: tuple[ReplicaStatistics, ...] = ()


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Which parts of its memory an engine holds, as `Engine.memory` returns it.

    `asleep` are the tags that some replica has given back. `waiting_for_weights`: the memory for the
    weights is there and some have yet to come. `rss_bytes` is what the processes that compute hold
    of the host's memory, all together, mapped files included.
    """

    asleep: frozenset[MemoryTag] = frozenset()
    waiting_for_weights: bool = False
    rss_bytes: int = 0

    @property
    def resident(self) -> frozenset[MemoryTag]:
        """The tags that every replica holds."""
        return ALL_TAGS - self.asleep

    @property
    def ready(self) -> bool:
        """Whether the engine can compute: every tag is resident, and all weights are there."""
        return not self.asleep and not self.waiting_for_weights

    def refusal(self) -> EngineAsleepError:
        """Why a request is not taken while the engine is not `ready`."""
        if self.asleep:
            tags = ", ".join(sorted(self.asleep))
            return EngineAsleepError(
                f"the engine is asleep: it gave the memory of {tags} back; wake it first, "
                "with control(Wake()) or POST /resume_memory_occupation. The request was not started"
            )
        return EngineAsleepError(
            "the engine waits for weights, since those that it served were given back with their "
            "memory; send all of them first (LoadWeights, ReplaceWeights or ReceiveWeights; over HTTP "
            "/update_weights_from_disk and the like). The request was not started"
        )
