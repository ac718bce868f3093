"""LeRobot's own client in its own environment, and policy servers, each a process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from scripts import peer_env

from phalanx.routing.endpoint import Endpoint

ROOT = Path(__file__).parents[3]
QUIET = {"OMP_NUM_THREADS": "1", "PHALANX_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def lerobots_python(peer: str) -> Path:
    """The interpreter of the peer's environment; the test is skipped, with why, without one."""
    python = ROOT / f".venv-{peer}" / "bin" / "python"
    if not (python.parents[1] / ".installed").exists():
        try:
            peer_env.find_python(peer_env.PEERS[peer].python or "")
        except peer_env.NoPythonError as error:
            pytest.skip(f"{peer}: {error}")
        pytest.skip(f"no .venv-{peer}: run `python scripts/peer_env.py {peer}`")
    return python


async def _ended(process: Process, number: signal.Signals) -> None:
    if process.returncode is None:
        process.send_signal(number)
    await process.wait()


class PolicyServer:
    """`phalanx serve` of a small policy."""

    def __init__(self, process: Process, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._process = process

    async def kill(self) -> None:
        await _ended(self._process, signal.SIGKILL)


@asynccontextmanager
async def policy_server(
    log: Path, example: str = "pi05.yaml", *options: str
) -> AsyncIterator[PolicyServer]:
    phalanx = Path(sys.executable).with_name("phalanx")
    ports = ("--port", "0", "--http-port", "0")
    arguments = ("serve", ROOT / "examples" / example, *ports, *options)
    with log.open("w") as errors:
        process = await asyncio.create_subprocess_exec(
            phalanx, *arguments, stdout=PIPE, stderr=errors, env={**os.environ, **QUIET}
        )
        try:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            found = re.search(r"grpc://([^\s,;]+)", line)
            assert found is not None, line
            yield PolicyServer(process, Endpoint.parse(found[1]))
        finally:
            await _ended(process, signal.SIGKILL)


class RealClient:
    """`move_times_s` are when the robot moved; `errors` is what the client logged at its end."""

    def __init__(self, process: Process, log: Path) -> None:
        self.move_times_s: list[float] = []
        self._process = process
        self._log = log
        self._moved = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def moved(self, count: int) -> None:
        """Wait until the robot has made so many moves."""
        while len(self.move_times_s) < count:
            assert not self._reader.done(), self.log
            self._moved.clear()
            await self._moved.wait()

    async def ended(self) -> int:
        """Wait until the client ends by itself."""
        await self._reader
        return await self._process.wait()

    async def stop(self) -> None:
        """Not as Ctrl-C would, at which LeRobot's client may hang where it is inside of gRPC."""
        await _ended(self._process, signal.SIGKILL)
        await self._reader

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                if line.startswith(b"{"):
                    event = json.loads(line)
                    if event["event"] == "moved":
                        self.move_times_s.append(event["at_s"])
                        self._moved.set()
        finally:
            self._moved.set()


@asynccontextmanager
async def real_client(
    python: Path, address: str, folder: Path, *options: str
) -> AsyncIterator[RealClient]:
    """LeRobot's client as its documentation starts it; `folder` is its own."""
    log = folder / "client.log"
    arguments = [
        "-m",
        "lerobot.async_inference.robot_client",
        "--config_path",
        str(ROOT / "examples" / "robot" / "client.yml"),
        f"--server_address={address}",
        f"--robot.calibration_dir={folder}",
        *options,
    ]
    with log.open("w") as errors:
        process = await asyncio.create_subprocess_exec(
            python,
            *arguments,
            stdout=PIPE,
            stderr=errors,
            cwd=folder,
            env={**os.environ, **QUIET},
        )
        client = RealClient(process, log)
        try:
            yield client
        finally:
            await client.stop()
