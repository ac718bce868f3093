"""A whole job in a directory of its own: `phalanx up`, what it is asked, and what it holds."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import psutil

from phalanx import settings
from phalanx.errors import PhalanxError
from phalanx.testing.tiny_llama import write_tiny_llama

MODEL = "student"
STARTED_S = 300.0
_ENGINE_ARGS = (
    "{num_threads: 1, device: cpu, pool_tokens: 16384, max_batch_size: 64, log_level: WARNING,"
    " native_operators: 'off'}"
)


class SoakError(PhalanxError, AssertionError):
    """Something that was promised did not hold."""


class JobEngine(msgspec.Struct, frozen=True):
    """An engine as the control process shows it."""

    engine_id: str
    base_url: str | None
    state: str
    generation: int = 0


class _Model(msgspec.Struct, frozen=True):
    state: str
    engines: tuple[JobEngine, ...]
    weight_version: str | None = None


class _Document(msgspec.Struct, frozen=True):
    topology_revision: int
    registry_epoch: str
    models: Mapping[str, _Model]


class _Run(msgspec.Struct, frozen=True):
    control_url: str


class SoakJob:
    """One role `rollout` with the model `student`, whose weights are those of `checkpoints[0]`."""

    def __init__(self, directory: Path, process: asyncio.subprocess.Process) -> None:
        self.directory = directory
        self.process = process
        self.checkpoints = (directory / "a", directory / "b")
        self.gateway_url = ""
        # A connection that is kept may be closed by the other side just when it is used again.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._control = httpx.AsyncClient(timeout=STARTED_S, limits=limits)
        self._said: deque[bytes] = deque(maxlen=200)
        self._reading: asyncio.Task[None] | None = None

    async def started(self) -> None:
        """Wait until everything is up."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self._said.append(line)
            if b" is up" in line:
                address = line.decode().partition("status page ")[2].partition("/,")[0]
                self.gateway_url = address.strip().rstrip("/,")
                break
        else:
            raise SoakError(f"the job did not start:\n{self.said}")
        self._reading = asyncio.create_task(self._take())
        found = next((self.directory / "cache" / "run").glob("*.json"))
        run = msgspec.json.decode(found.read_bytes(), type=_Run)
        self._control.base_url = httpx.URL(run.control_url)

    async def ask(self, path: str, body: Mapping[str, object] | None = None) -> int:
        """Have an operation done; its status. Everything but 200 and 409 is a failure."""
        answer = await self._control.post(f"/v1/roles/rollout/{path}", json=dict(body or {}))
        if answer.status_code not in (200, 409):
            raise SoakError(f"{path} answered {answer.status_code}: {answer.text[:500]}")
        return answer.status_code

    async def document(self, after: int | None = None) -> _Document:
        """The role as it is now, or once it is another one than `after`."""
        query = "" if after is None else f"?after={after}&wait_s=30"
        answer = await self._control.get(f"/v1/roles/rollout{query}")
        return msgspec.json.decode(answer.content, type=_Document)

    async def ready(self, replicas: int) -> _Model:
        """The model, once so many replicas serve and no other is on its way."""
        document = await self.document()
        while True:
            model = document.models[MODEL]
            serving = [engine for engine in model.engines if engine.state == "ready"]
            if len(serving) == len(model.engines) == replicas:
                return model
            try:
                async with asyncio.timeout(STARTED_S):
                    document = await self.document(document.topology_revision)
            except TimeoutError:
                raise SoakError(f"{replicas} replicas were never ready: {model}") from None

    def processes(self) -> dict[str, list[psutil.Process]]:
        """All of its processes: `control`, `gateway`, `engine`."""
        control = psutil.Process(self.process.pid)
        found: dict[str, list[psutil.Process]] = {"control": [control], "gateway": [], "engine": []}
        for child in control.children(recursive=True):
            try:
                line = child.cmdline()
            except psutil.Error:
                continue  # it has just ended
            if "gateway" in line:
                found["gateway"].append(child)
            elif "serve" in line:
                found["engine"].append(child)
        return found

    def kill_engine(self, base_url: str) -> None:
        """kill -9 of the engine that listens there."""
        port = httpx.URL(base_url).port
        for process in self.processes()["engine"]:
            if str(port) in process.cmdline() or f"--port={port}" in process.cmdline():
                process.send_signal(signal.SIGKILL)
                return
        raise SoakError(f"no engine's process listens at {base_url}")

    async def close(self) -> None:
        await self._control.aclose()
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        await self._read()
        await self.process.wait()

    @property
    def said(self) -> str:
        """The last lines that it has printed."""
        return b"".join(self._said).decode()

    async def _read(self) -> None:
        """What it prints must be taken, or it stops at a full pipe."""
        await (self._take() if self._reading is None else self._reading)

    async def _take(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self._said.append(line)


@asynccontextmanager
async def soak_job(directory: Path) -> AsyncIterator[SoakJob]:
    """A job that is up, in `directory`; stopped at the end."""
    first = write_tiny_llama(directory / "a", seed=1)
    write_tiny_llama(directory / "b", seed=2)
    file = directory / "roles.yaml"
    file.write_text(
        "gateway: {http_port: 0}\n"
        "roles:\n"
        "  rollout:\n"
        "    deployment: {health_interval_s: 0.5, drain_timeout_s: 60}\n"
        "    models:\n"
        f"      {MODEL}: {{model: {first}, weight_source: local, engine_args: {_ENGINE_ARGS}}}\n",
        encoding="utf-8",
    )
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("phalanx")),
        "up",
        str(file),
        env=settings.child_environment(
            {"PHALANX_CACHE_DIR": str(directory / "cache"), "OMP_NUM_THREADS": "1"}
        ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    job = SoakJob(directory, process)
    try:
        await job.started()
        yield job
    finally:
        await job.close()
