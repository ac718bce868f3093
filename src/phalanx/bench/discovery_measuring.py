"""Runs the discovery benchmark and writes its report."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop
from rich.progress import Progress

import phalanx
from phalanx.bench.benchmark_run import BenchmarkRun
from phalanx.bench.discovery_followers import ROLE, Crowd
from phalanx.bench.results import Goal, Measure, Report, Sample
from phalanx.routing.roles.documents import snapshot_of
from phalanx.routing.roles.encoded import EncodedSnapshot
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.routing.roles.snapshot import (
    ReplicaState,
    RoleContent,
    RoleModel,
    RoleReplica,
    RoleSnapshot,
)
from phalanx.schema.roles import RoutingSpec, WorkloadType
from phalanx.wire.discovery import decode_discovery

OURS, PLAIN = "phalanx", "phalanx, uncompressed"
NUM_MODELS = 4
NUM_WEIGHED = 1000
"""Followers that are weighed."""
MAX_TURN_MS = 50.0
MAX_ANSWER_US = 100.0


@dataclass(frozen=True)
class DiscoveryWorkload:
    """A role of `num_replicas`, `num_followers` of it, and `num_changes` in each of `repeats`."""

    num_replicas: int
    num_followers: int
    num_changes: int
    repeats: int


def _measure(key: str, label: str, unit: str, *, plotted: bool = True) -> Measure:
    return Measure(key=key, label=label, unit=unit, more_is_better=False, plotted=plotted)


DOCUMENT = _measure("document", "document", "KB")
ENCODE = _measure("encode", "encoding it, once a change", "ms")
CPU = _measure("cpu", "one change, all answered, processor time", "ms")
ANSWER = _measure("answer", "the same, a follower", "us")
ASK = _measure("ask", "asking again, a follower, processor time", "us")
TURN = _measure("turn", "longest turn of the event loop meanwhile", "ms")
SENT = _measure("sent", "one change, sent to all", "MB")
MEMORY = _measure("memory", "memory of a waiting follower", "KB")
READ = _measure("read", "reading it, at the client", "ms")
MEASURES = (DOCUMENT, ENCODE, CPU, ANSWER, ASK, TURN, SENT, MEMORY, READ)


def measure_discovery(workload: DiscoveryWorkload, output: Path) -> Path:
    """Measure, print the table and the goals, and return the folder with the report."""
    run = BenchmarkRun("discovery", output)
    samples: list[Sample] = []
    with Progress(console=run.console) as bar:
        task = bar.add_task("discovery", total=2 * workload.repeats)
        for system in (OURS, PLAIN):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                for repeat in range(workload.repeats):
                    bar.update(task, description=f"{repeat + 1}/{workload.repeats} {system}")
                    values = runner.run(_round(workload, compressed=system == OURS))
                    samples += [
                        Sample(measure=key, system=system, repeat=repeat, value=value)
                        for key, value in values.items()
                    ]
                    bar.advance(task)
    return run.deliver(
        {
            OURS: f"phalanx {phalanx.__version__}, followers that accept gzip",
            PLAIN: "the same, followers that do not",
        },
        MEASURES,
        samples,
        context={
            "role": f"{workload.num_replicas} replicas of {NUM_MODELS} models",
            "followers": f"{workload.num_followers}, in memory: without sockets and their buffers",
        },
        goals=goals,
    )


def goals(report: Report) -> tuple[Goal, ...]:
    """What was aimed at for followers that accept gzip, and what the report gives."""
    found = []
    for measure, limit, aim in (
        (TURN, MAX_TURN_MS, "no turn of the event loop takes longer than"),
        (ANSWER, MAX_ANSWER_US, "a change costs the gateway, for each follower, at most"),
    ):
        summary = report.summary(measure.key, OURS)
        if summary is not None:
            found.append(
                Goal(
                    aim=f"{aim} {limit:g} {measure.unit}",
                    result=f"{summary.median:.1f} {measure.unit}",
                    met=summary.median <= limit,
                )
            )
    return tuple(found)


def large_role(num_replicas: int) -> RoleContent:
    """Replicas of several models, all ready."""
    models = tuple(
        RoleModel(
            f"model-{number}",
            ReplicaState.READY,
            replicas=tuple(
                RoleReplica(
                    f"model-{number}/{ordinal}",
                    f"http://10.{ordinal // 250 % 250}.{ordinal % 250}.{number + 1}:15000",
                    ReplicaState.READY,
                    weight_version="default",
                )
                for ordinal in range(number, num_replicas, NUM_MODELS)
            ),
        )
        for number in range(min(NUM_MODELS, num_replicas))
    )
    return RoleContent(WorkloadType.ROLLOUT, RoutingSpec(default_model="model-0"), models)


async def _round(workload: DiscoveryWorkload, *, compressed: bool) -> Mapping[str, float]:
    registry = RoleRegistry(ROLE, "benchmark", large_role(workload.num_replicas))
    encode_s, body = _encoding(registry.snapshot, compressed=compressed)
    read_s = _reading(EncodedSnapshot(registry.snapshot).discovery)
    held_bytes = await _held_bytes(registry, compressed=compressed)
    crowd = Crowd(registry, workload.num_followers, compressed=compressed)
    crowd.ask()
    await crowd.asked()
    answer_s = ask_s = longest_s = 0.0
    for number in range(workload.num_changes):
        turns = _Turns()
        began_s = time.process_time()
        registry.publish(_changed(registry.snapshot.content, number), registry.snapshot.revision)
        await turns.watch(crowd)
        answer_s += time.process_time() - began_s
        longest_s = max(longest_s, turns.longest_s)
        expected = EncodedSnapshot(registry.snapshot)
        assert crowd.last_body.endswith((compressed and expected.compressed) or expected.discovery)
        began_s = time.process_time()
        crowd.ask()
        await crowd.asked()
        ask_s += time.process_time() - began_s
    changes = workload.num_changes
    answers = changes * workload.num_followers
    registry.close()
    await crowd.answered()
    sent_bytes = crowd.num_bytes * changes / (changes + 1)  # one more answer as it closed
    crowd.leave()
    return {
        DOCUMENT.key: len(body) / 1e3,
        ENCODE.key: encode_s * 1e3,
        CPU.key: answer_s / changes * 1e3,
        ANSWER.key: answer_s / answers * 1e6,
        ASK.key: ask_s / answers * 1e6,
        TURN.key: longest_s * 1e3,
        SENT.key: sent_bytes / changes / 1e6,
        MEMORY.key: held_bytes / 1e3,
        READ.key: read_s * 1e3,
    }


class _Turns:
    """The longest turn of the event loop while a crowd is answered."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self, crowd: Crowd) -> None:
        answered = asyncio.ensure_future(crowd.answered())
        last_s = time.perf_counter()
        while not answered.done():
            await asyncio.sleep(0)
            now_s = time.perf_counter()
            self.longest_s = max(self.longest_s, now_s - last_s)
            last_s = now_s
        await answered


async def _held_bytes(registry: RoleRegistry, *, compressed: bool) -> float:
    """What Python's objects of one waiting follower take, by its allocator's own account."""
    gc.collect()
    tracemalloc.start()
    before_bytes, _ = tracemalloc.get_traced_memory()
    crowd = Crowd(registry, NUM_WEIGHED, compressed=compressed)
    crowd.ask()
    await crowd.asked()
    gc.collect()
    after_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    content = registry.snapshot.content
    registry.publish(replace(content, phase="weighed"), registry.snapshot.revision)
    await crowd.answered()
    crowd.leave()
    return (after_bytes - before_bytes) / NUM_WEIGHED


def _changed(content: RoleContent, number: int) -> RoleContent:
    """One replica has been started again."""
    first, *models = content.models
    replica, *others = first.replicas
    replica = replace(replica, generation=number + 1)
    return replace(content, models=(replace(first, replicas=(replica, *others)), *models))


def _encoding(snapshot: RoleSnapshot, *, compressed: bool) -> tuple[float, bytes]:
    began_s = time.process_time()
    encoded = EncodedSnapshot(snapshot)
    body = (compressed and encoded.compressed) or encoded.discovery
    return time.process_time() - began_s, body


def _reading(body: bytes) -> float:
    began_s = time.process_time()
    snapshot_of(decode_discovery(body))
    return time.process_time() - began_s
