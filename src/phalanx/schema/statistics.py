"""Counters and gauges of an engine, as `Engine.statistics()` returns them."""

from __future__ import annotations

import msgspec


class LoopStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a batching plugin's loop holds and has done; counters since its start.

    `num_generated_tokens` and `num_prompt_tokens` count computed work, `num_retractions` requests
    pushed back, `last_batch_size` the rows of the newest step, `pool_tokens` the capacity of the
    cache and `pool_used_tokens` the part of it that requests hold.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_retractions: int = 0
    last_batch_size: int = 0
    pool_tokens: int = 0
    pool_used_tokens: int = 0
    paused: bool = False


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by outcome since the start, and what is in flight now.

    `queue_time_s` is the sum over started requests of the time from submit to their first step;
    `execution_time_s` the sum over ended requests of the time from there to the end.
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
