"""A whole job in this process: real sockets and a stub for a gateway, on fake engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from phalanx.clock import SystemClock
from phalanx.roles.child_process import ProcessHost
from phalanx.roles.config import parse_job
from phalanx.roles.control_process import ControlProcess, JobPlace, Machinery
from phalanx.roles.run_file import RunDirectory
from phalanx.testing.role_fakes import FakeRoleWorld
from tests.roles.control import stub_gateway

T = TypeVar("T")
FILE = """
gateway: {http_port: 0, drain_timeout_s: 0.1}
roles:
  rollout:
    deployment: {drain_timeout_s: 60}
    models: {student: {model: m, replicas: 2, weight_source: local}}
  genrm: {models: {judge: {model: m}}}
"""


class FakeJob:
    """Its control process, and the world of its engines."""

    def __init__(self, folder: Path, process: ControlProcess, world: FakeRoleWorld) -> None:
        self.folder = folder
        self._loop = asyncio.get_running_loop()
        self.process = process
        self.world = world

    @property
    def runs(self) -> RunDirectory:
        return RunDirectory(self.folder / "run")

    def in_its_loop(self, act: Callable[[], T]) -> T:
        """What `act` gives, called from another thread."""
        done: Future[T] = Future()
        self._loop.call_soon_threadsafe(lambda: done.set_result(act()))
        return done.result()

    def end(self) -> None:
        """Have it end, from another thread, where it has not ended by itself."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.process.stop)


@asynccontextmanager
async def fake_job(folder: Path, text: str = FILE, name: str = "job") -> AsyncIterator[FakeJob]:
    """One that is not started yet; it is closed at the end."""
    world = FakeRoleWorld(load_s=0.0)
    runs = RunDirectory(folder / "run")
    with runs.claim(name) as file:
        place = JobPlace(name, file, "r.yaml", folder / "logs")

        async def kill() -> None:
            await world.close()

        machinery = Machinery(
            ProcessHost(), world, lambda role: world.backends, kill, stub_gateway.PROGRAM
        )
        process = ControlProcess(parse_job(text, "r.yaml"), place, machinery, SystemClock())
        try:
            yield FakeJob(folder, process, world)
        finally:
            await asyncio.shield(process.close())
