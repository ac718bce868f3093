"""Runs the roles benchmark and writes its report.

Two roles run at once and take turns, one with frozen weights and one whose weights are updated; what
is not being measured does nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

import phalanx
from phalanx.bench.benchmark_run import BenchmarkRun
from phalanx.bench.results import Measure, Sample
from phalanx.bench.roles_job import MODEL, EngineSetting, RoleJob, running_role
from phalanx.roles.contracts import Tag
from phalanx.schema.roles import WeightSource

STATIC, DYNAMIC = "static", "dynamic"
SOURCES = {STATIC: WeightSource.STATIC, DYNAMIC: WeightSource.LOCAL}
DESCRIPTIONS = {
    STATIC: f"phalanx {phalanx.__version__}, frozen weights, which a wake maps again",
    DYNAMIC: "the same, with weights that were updated, which a wake loads from disk again",
}
WEIGHTS, CACHE = frozenset({Tag.WEIGHTS}), frozenset({Tag.KV_CACHE})
REST = frozenset({Tag.KV_CACHE, Tag.CUDA_GRAPH})
STEPS = 6
"""Of a round."""


@dataclass(frozen=True)
class RolesWorkload:
    """`num_requests` of `new_tokens` run as a role is drained, in each of `repeats`."""

    num_requests: int
    new_tokens: int
    repeats: int


def _ms(key: str, label: str) -> Measure:
    return Measure(key=key, label=label, unit="ms", more_is_better=False)


def _mib(key: str, label: str) -> Measure:
    return Measure(key=key, label=f"memory {label}", unit="MiB", more_is_better=False)


SLEEP_IDLE = _ms("sleep_idle", "drain and sleep, idle")
SLEEP_BUSY = _ms("sleep_busy", "drain and sleep, with requests running")
SLEEP_REST = _ms("sleep_rest", "of that, after the last token")
WAKE_ALL = _ms("wake_all", "wake, everything")
WAKE_WEIGHTS = _ms("wake_weights", "wake, weights alone")
WAKE_REST = _ms("wake_rest", "wake, the rest then")
RELEASE_CACHE = _ms("release_cache", "KV cache alone, released")
RESUME_CACHE = _ms("resume_cache", "KV cache alone, taken again")
FIRST_REQUEST = _ms("first_request", "first request after a wake, one token")
NEXT_REQUEST = _ms("next_request", "the next one")
UPDATE = _ms("update", "update from disk")
MEMORY_READY = _mib("memory_ready", "before")
MEMORY_NO_CACHE = _mib("memory_no_cache", "without KV cache")
MEMORY_ASLEEP = _mib("memory_asleep", "asleep")
MEMORY_WEIGHTS = _mib("memory_weights", "with weights alone")
MEMORY_AGAIN = _mib("memory_again", "after a wake")
START = Measure(key="start", label="start until ready", unit="s", more_is_better=False)
MEASURES = (
    SLEEP_IDLE,
    SLEEP_BUSY,
    SLEEP_REST,
    WAKE_ALL,
    WAKE_WEIGHTS,
    WAKE_REST,
    RELEASE_CACHE,
    RESUME_CACHE,
    FIRST_REQUEST,
    NEXT_REQUEST,
    UPDATE,
    MEMORY_READY,
    MEMORY_NO_CACHE,
    MEMORY_ASLEEP,
    MEMORY_WEIGHTS,
    MEMORY_AGAIN,
    START,
)


def measure_roles(setting: EngineSetting, workload: RolesWorkload, output: Path) -> Path:
    """Measure, print the table, and return the folder with the report and the engines' logs."""
    run = BenchmarkRun("roles", output)
    with Progress(console=run.console) as bar, asyncio.Runner() as runner:
        samples = runner.run(_Measuring(setting, workload, run.folder / "logs", bar).measure())
    return run.deliver(
        DESCRIPTIONS,
        MEASURES,
        samples,
        context={
            "model": f"{setting.checkpoint.name}, {setting.dtype}, {setting.threads} threads, "
            f"KV cache of {setting.kv_tokens} tokens",
            "requests that run": f"{workload.num_requests} of {workload.new_tokens} tokens",
            "memory": "resident, of all processes of one engine, mapped files with it",
        },
    )


class _Measuring:
    """Both roles, and what has been measured so far."""

    def __init__(
        self, setting: EngineSetting, workload: RolesWorkload, logs: Path, bar: Progress
    ) -> None:
        self._setting = setting
        self._workload = workload
        self._logs = logs
        self._bar = bar
        self._task = bar.add_task("starting", total=len(SOURCES) * (1 + workload.repeats * STEPS))
        self._num_updates = 0

    async def measure(self) -> list[Sample]:
        samples = []
        async with AsyncExitStack() as stack:
            jobs = {}
            for name, source in SOURCES.items():
                self._tell(f"starting {name}")
                began_s = time.perf_counter()
                jobs[name] = await stack.enter_async_context(
                    running_role(name, self._setting, source, self._logs)
                )
                samples.append(_sample(START, name, 0, time.perf_counter() - began_s))
                await self._warm_up(jobs[name], name)
                self._bar.console.print(f"{name} is up at {jobs[name].engine.url}")
                self._bar.advance(self._task)
            for repeat in range(self._workload.repeats):
                for name, job in jobs.items():
                    place = f"{repeat + 1}/{self._workload.repeats} {name}"
                    values = await self._round(job, place, updates=name == DYNAMIC)
                    samples += [_sample(each, name, repeat, values[each]) for each in values]
        return samples

    async def _warm_up(self, job: RoleJob, name: str) -> None:
        if name == DYNAMIC:  # before its first update its weights are the frozen ones
            await self._update(job)
        await self._crowd(job, lambda: asyncio.sleep(0))

    async def _round(self, job: RoleJob, place: str, *, updates: bool) -> Mapping[Measure, float]:
        manager = job.manager
        values: dict[Measure, float] = {MEMORY_READY: job.memory_mib()}
        self._step(place, "idle sleep")
        values[SLEEP_IDLE] = await _timed(manager.deactivate)
        values[MEMORY_ASLEEP] = job.memory_mib()
        self._step(place, "wake")
        values[WAKE_ALL] = await _timed(manager.activate)
        values[FIRST_REQUEST] = await _timed(lambda: job.ask(1))
        values[NEXT_REQUEST] = await _timed(lambda: job.ask(1))
        values[MEMORY_AGAIN] = job.memory_mib()
        self._step(place, "KV cache alone")
        values |= await self._cache_alone(job)
        self._step(place, "sleep with requests running")
        values |= await self._busy_sleep(job)
        self._step(place, "wake by tags")
        values[WAKE_WEIGHTS] = await _timed(lambda: manager.activate(WEIGHTS))
        values[MEMORY_WEIGHTS] = job.memory_mib()
        values[WAKE_REST] = await _timed(lambda: manager.activate(REST))
        await job.ask(1)
        self._step(place, "update")
        if updates:
            values[UPDATE] = await _timed(lambda: self._update(job))
        return values

    async def _cache_alone(self, job: RoleJob) -> Mapping[Measure, float]:
        """By the engine's own calls, as a trainer beside it does it: a manager's sleep is whole."""
        released_s = await _timed(lambda: job.change_memory("release", CACHE))
        memory_mib = job.memory_mib()
        resumed_s = await _timed(lambda: job.change_memory("resume", CACHE))
        return {
            RELEASE_CACHE: released_s,
            MEMORY_NO_CACHE: memory_mib,
            RESUME_CACHE: resumed_s,
        }

    async def _busy_sleep(self, job: RoleJob) -> Mapping[Measure, float]:
        asleep_ms = 0.0

        async def sleep() -> None:
            nonlocal asleep_ms
            asleep_ms = await _timed(job.manager.deactivate)

        began_s, ended_s = await self._crowd(job, sleep)
        return {SLEEP_BUSY: asleep_ms, SLEEP_REST: asleep_ms - (ended_s - began_s) * 1e3}

    async def _crowd(self, job: RoleJob, act: Callable[[], Awaitable[None]]) -> tuple[float, float]:
        """Do `act` once all requests have had a token; when it began, and the last one's end."""
        firsts = [asyncio.Event() for _ in range(self._workload.num_requests)]

        async def ask(first: asyncio.Event) -> float:
            await job.ask(self._workload.new_tokens, first)
            return time.perf_counter()

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(first)) for first in firsts]
            for first in firsts:
                await first.wait()
            began_s = time.perf_counter()
            await act()
        return began_s, max(task.result() for task in asked)

    async def _update(self, job: RoleJob) -> None:
        self._num_updates += 1
        version = str(self._num_updates)
        await job.manager.update_weights(MODEL, str(self._setting.checkpoint), version)

    def _step(self, place: str, what: str) -> None:
        self._tell(f"{place}: {what}")
        self._bar.advance(self._task)

    def _tell(self, description: str) -> None:
        self._bar.update(self._task, description=description)


async def _timed(act: Callable[[], Awaitable[None]]) -> float:
    """How many ms it takes."""
    began_s = time.perf_counter()
    await act()
    return (time.perf_counter() - began_s) * 1e3


def _sample(measure: Measure, system: str, repeat: int, value: float) -> Sample:
    return Sample(measure=measure.key, system=system, repeat=repeat, value=value)
