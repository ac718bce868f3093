"""The gateway of a job: a process of its own, which is started anew whenever it dies.

Its port is taken before its first start and kept through all of them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from phalanx import settings
from phalanx.errors import ConfigurationError, EngineUnavailableError
from phalanx.roles.child_process import ChildProcess, Command, ProcessHost
from phalanx.roles.job_sections import GatewaySection
from phalanx.roles.ports import PortTakenError, ReservedPort
from phalanx.roles.run_file import PrivateFile

logger = logging.getLogger(__name__)
PROGRAM = (sys.executable, "-P", "-c", "from phalanx.cli.main import main; main()", "gateway")
_LOOK_S = 0.02
_START_S = 60.0
_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0)
_CLOSE_S = 5.0


@dataclass(frozen=True)
class GatewayLaunch:
    """How the gateway is started: its part of the file, whom it follows, where it logs, and the file
    that its keys are written to.
    """

    section: GatewaySection
    control_url: str
    control_key: str | None
    key_file: PrivateFile
    log_file: Path
    log_level: str | None
    program: tuple[str, ...] = PROGRAM

    def command(self, port: int) -> Command:
        section = self.section
        words = [*self.program, "--roles", self.control_url]
        words += ["--http-host", section.http_host, "--http-port", str(port)]
        words += ["--gateway", section.grpc]
        words += ["--request-timeout-s", str(section.request_timeout_s)]
        words += ["--drain-timeout-s", str(section.drain_timeout_s)]
        words += ["--max-message-mib", str(section.max_message_mib)]
        for flag, value in (
            ("--key-file", str(self.key_file.path) if self._keys() else None),
            ("--tls-cert", section.tls_cert),
            ("--tls-key", section.tls_key),
            ("--log-level", self.log_level),
        ):
            if value is not None:
                words += [flag, value]
        if section.access_log:
            words.append("--access-log")
        environment = settings.machine_environment({"PYTHONUNBUFFERED": "1"}, same_python=True)
        return Command(tuple(words), environment)

    def write_keys(self) -> None:
        """What the command reads them from. They are not in it, where others could see them."""
        if keys := self._keys():
            self.key_file.write(msgspec.json.encode(keys))

    def _keys(self) -> dict[str, str]:
        given = {
            "roles_key": self.control_key,
            "api_key": self.section.api_key,
            "admin_key": self.section.admin_key,
        }
        return {name: key for name, key in given.items() if key is not None}


class GatewayProcess:
    """Made in a running event loop. `start` once, then `run` until it is cancelled, then `stop`."""

    def __init__(
        self, launch: GatewayLaunch, host: ProcessHost, on_change: Callable[[str], None]
    ) -> None:
        """`on_change` is told, in words, of each death and each new start.

        Raises `ConfigurationError` where the address is not free.
        """
        section = launch.section
        self._launch = launch
        self._host = host
        self._on_change = on_change
        self._port = _reserved(section.http_host, section.http_port)
        self._child: ChildProcess | None = None
        scheme = "http" if section.tls_cert is None else "https"
        self.url = f"{scheme}://{_authority(section.http_host, self._port.number)}"
        self.up = False

    async def start(self) -> None:
        """Start it, and wait until it listens.

        Raises `ConfigurationError` where it cannot be started, `EngineUnavailableError` where it
        has ended instead; what it said is in the message.
        """
        self._launch.write_keys()
        child = self._child = self._host.start(
            self._launch.command(self._port.number), self._launch.log_file
        )
        ended = asyncio.create_task(child.exited())
        listens = asyncio.create_task(self._listens())
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.wait((ended, listens), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            await child.stop(0.0)
            raise EngineUnavailableError(
                f"the gateway does not listen after {_START_S:g} s; {child.tail()}"
            ) from None
        finally:
            for task in (ended, listens):
                task.cancel()
            await asyncio.gather(ended, listens, return_exceptions=True)
        if not ended.cancelled():
            raise EngineUnavailableError(f"the gateway did not start: {ended.result()}")
        self.up = True

    async def run(self) -> None:
        """Start it anew each time that it has ended."""
        while True:
            assert self._child is not None
            why = await self._child.exited()
            self.up = False
            logger.error("the gateway has died: %s", why)
            self._on_change(f"the gateway has died: {why.splitlines()[0]}")
            await self._again()
            self._on_change("the gateway is there again")

    async def stop(self, *, hurry: bool = False) -> None:
        """End it; its running requests have their time to end unless in a `hurry`."""
        self.up = False
        if self._child is not None:
            drain_s = self._launch.section.drain_timeout_s + _CLOSE_S
            await self._child.stop(0.0 if hurry else drain_s)
        self._launch.key_file.remove()
        self._port.close()

    async def _again(self) -> None:
        failures = 0
        while True:
            await asyncio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
            try:
                await self.start()
            except (ConfigurationError, EngineUnavailableError, OSError) as error:
                failures += 1
                logger.error("the gateway cannot be started anew: %s", error)
            else:
                return

    async def _listens(self) -> None:
        """Until somebody listens at its port, which nobody but it can."""
        host = self._launch.section.http_host
        target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        while True:
            try:
                _, writer = await asyncio.open_connection(target, self._port.number)
            except OSError:
                await asyncio.sleep(_LOOK_S)
            else:
                writer.close()
                return


def _reserved(host: str, port: int) -> ReservedPort:
    if port == 0:
        return ReservedPort(host)
    try:
        return ReservedPort(host, exact=port)
    except PortTakenError:
        raise ConfigurationError(
            f"gateway.http_port={port} is taken at {host}; choose another one, or 0 for a free one"
        ) from None


def _authority(host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return f"[{host}]:{port}" if family is socket.AF_INET6 else f"{host}:{port}"
