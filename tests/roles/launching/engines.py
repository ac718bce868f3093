"""Engines in processes of their own, started as a manager starts them, and waited for by events."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from phalanx.roles.contracts import ReplicaLaunch
from phalanx.roles.engine_command import EnginePrograms
from phalanx.roles.local_launcher import LocalLauncher, LocalLauncherSettings, LocalReplica
from phalanx.roles.sglang_engine import SGLangEngine
from phalanx.schema.roles import EngineGroupSpec, EngineKind, InferenceModelSpec, WeightSource
from tests.roles.launching.specs import launch_of, model_of, sglang_group

CONFORMANCE = EnginePrograms(sglang=(sys.executable, "-m", "phalanx.testing.sglang_server"))
SMALL = {"device": "cpu", "pool_tokens": 8192, "num_threads": 1, "log_level": "WARNING"}


def our_model(directory: Path, source: WeightSource = WeightSource.LOCAL) -> InferenceModelSpec:
    group = EngineGroupSpec(engine_args=SMALL)
    return model_of(group, path=str(directory), weight_source=source)


def sglang_model(directory: Path, source: WeightSource = WeightSource.LOCAL) -> InferenceModelSpec:
    """The conformance server; a token takes a moment, so that requests stay for as long as wanted."""
    group = sglang_group(engine_args={"step_interval_s": 0.001})
    return model_of(group, path=str(directory), weight_source=source)


def model_for(kind: EngineKind, directory: Path, source: WeightSource) -> InferenceModelSpec:
    return (our_model if kind is EngineKind.PHALANX else sglang_model)(directory, source)


@asynccontextmanager
async def launching(logs: Path, **fields: object) -> AsyncIterator[LocalLauncher]:
    launcher = LocalLauncher(LocalLauncherSettings(logs, programs=CONFORMANCE, **fields))
    try:
        yield launcher
    finally:
        await launcher.close()


async def healthy(replica: LocalReplica, engine: SGLangEngine) -> None:
    """Returns when it answers; raises where it ends before."""
    exited = asyncio.ensure_future(replica.exited())
    try:
        while not await engine.healthy():
            assert not exited.done(), exited.result()
            await asyncio.sleep(0.02)
    finally:
        exited.cancel()


@asynccontextmanager
async def started(
    logs: Path, launch: ReplicaLaunch | InferenceModelSpec
) -> AsyncIterator[tuple[LocalReplica, SGLangEngine]]:
    """A replica that answers, and its control calls."""
    wanted = launch if isinstance(launch, ReplicaLaunch) else launch_of(launch)
    async with launching(logs) as launcher:
        replica = await launcher.launch(wanted)
        async with SGLangEngine(replica.url) as engine:
            await healthy(replica, engine)
            yield replica, engine
