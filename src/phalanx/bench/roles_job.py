"""One role of one engine on this machine, under its manager, with its requests and its memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from phalanx.clock import SystemClock
from phalanx.errors import MissingDependencyError, PhalanxError
from phalanx.roles.contracts import Backends, ReplicaLaunch
from phalanx.roles.local_launcher import LocalLauncher, LocalLauncherSettings, LocalReplica
from phalanx.roles.manager import InferenceManager
from phalanx.roles.publication import initial_content
from phalanx.roles.router_process import RouterSettings, RouterStarter
from phalanx.roles.sglang_engine import SGLangEngine
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.schema.roles import (
    DeploymentSpec,
    EngineGroupSpec,
    InferenceModelSpec,
    InferenceRoleSpec,
    RoutingSpec,
    WeightSource,
    WorkloadType,
)

try:
    import psutil
except ImportError as missing:
    raise MissingDependencyError(
        "benchmarks need psutil; install it with pip install 'phalanx[bench]'"
    ) from missing

MODEL = "student"
PROMPT = "The sea is"
_TIMEOUT_S = 3600.0
_MIB = 2**20
_MAX_SHOWN = 400


@dataclass(frozen=True)
class EngineSetting:
    """What every engine of a run is started with."""

    checkpoint: Path
    dtype: str
    threads: int
    kv_tokens: int


class RoleJob:
    """A role of one model and one replica. Belongs to one event loop; see `running_role`."""

    def __init__(
        self, manager: InferenceManager, launcher: _RememberingLauncher, client: httpx.AsyncClient
    ) -> None:
        self.manager = manager
        self._launcher = launcher
        self._client = client

    @property
    def engine(self) -> LocalReplica:
        return self._launcher.last

    def memory_mib(self) -> float:
        """What is resident of the engine's processes, mapped files with it."""
        total = 0
        for process in _tree(self.engine.pid):
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total / _MIB

    async def change_memory(self, verb: str, tags: Iterable[str]) -> None:
        """`release` or `resume` these tags by the engine's own route, as a trainer beside its
        manager does. Raises `PhalanxError` where it is refused.
        """
        url = f"{self.engine.url}/{verb}_memory_occupation"
        answer = await self._client.post(url, json={"tags": sorted(tags)})
        if answer.status_code != 200:
            raise PhalanxError(f"{url} answered {answer.status_code}: {answer.text[:_MAX_SHOWN]}")

    async def ask(self, new_tokens: int, first: asyncio.Event | None = None) -> None:
        """One answer of `new_tokens`, sent to the engine itself; `first` is set at its first event.

        Raises `PhalanxError` where it is not whole.
        """
        body = {
            "text": PROMPT,
            "sampling_params": {
                "max_new_tokens": new_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
            "stream": True,
        }
        last = b""
        url = f"{self.engine.url}/generate"
        async with self._client.stream("POST", url, json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                last = line.removeprefix("data: ").encode()
                if first is not None:
                    first.set()
        if answer.status_code != 200 or _num_tokens(last) != new_tokens:
            raise PhalanxError(
                f"a request for {new_tokens} tokens was answered with {answer.status_code} and"
                f" {_num_tokens(last)} tokens, at last {last[-_MAX_SHOWN:]!r}; the engine's log is"
                f" {self.engine.log_file}"
            )


@asynccontextmanager
async def running_role(
    name: str, setting: EngineSetting, source: WeightSource, logs: Path
) -> AsyncIterator[RoleJob]:
    """A role whose engine is ready; every process of it has ended afterwards."""
    spec = _role(name, setting, source)
    registry = RoleRegistry(spec.role, "benchmark", initial_content(spec))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            httpx.AsyncClient(timeout=_TIMEOUT_S, verify=False, trust_env=False)
        )
        launcher = _RememberingLauncher(LocalLauncher(LocalLauncherSettings(logs)))
        stack.push_async_callback(launcher.close)
        backends = Backends(launcher, SGLangEngine, RouterStarter(RouterSettings(logs)).open)
        manager = InferenceManager(spec, backends, registry, SystemClock())
        stack.push_async_callback(manager.shutdown, 0.0)
        await manager.start()
        yield RoleJob(manager, launcher, client)


class _RememberingLauncher:
    """A launcher of local processes that knows the last one."""

    def __init__(self, launcher: LocalLauncher) -> None:
        self._launcher = launcher
        self._launched: list[LocalReplica] = []

    @property
    def last(self) -> LocalReplica:
        return self._launched[-1]

    async def launch(self, launch: ReplicaLaunch) -> LocalReplica:
        self._launched.append(await self._launcher.launch(launch))
        return self.last

    async def close(self) -> None:
        await self._launcher.close()


class _Told(msgspec.Struct):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    meta_info: _Told = msgspec.field(default_factory=_Told)


def _num_tokens(chunk: bytes) -> int:
    """What the last event of a stream counts; none where there was no event."""
    return msgspec.json.decode(chunk, type=_Chunk).meta_info.completion_tokens if chunk else 0


def _role(name: str, setting: EngineSetting, source: WeightSource) -> InferenceRoleSpec:
    group = EngineGroupSpec(
        engine_args={
            "device": "cpu",
            "dtype": setting.dtype,
            "num_threads": setting.threads,
            "pool_tokens": setting.kv_tokens,
            "log_level": "WARNING",
        }
    )
    model = InferenceModelSpec(MODEL, str(setting.checkpoint), (group,), weight_source=source)
    deployment = DeploymentSpec(
        drain_timeout_s=_TIMEOUT_S,
        offload_timeout_s=_TIMEOUT_S,
        # No checks while it is measured: a manager that finds memory released by another than
        # itself takes the engine out.
        health_interval_s=_TIMEOUT_S,
    )
    return InferenceRoleSpec(name, WorkloadType.ROLLOUT, deployment, RoutingSpec(), (model,))


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
