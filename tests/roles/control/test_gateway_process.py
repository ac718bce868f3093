"""The gateway's process: its command, its port, and that it is started anew wherever it dies."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cli.key_file import KeyFile, read_key_file
from phalanx.errors import ConfigurationError, EngineUnavailableError
from phalanx.roles.child_process import ProcessHost
from phalanx.roles.gateway_process import GatewayLaunch, GatewayProcess
from phalanx.roles.job_sections import GatewaySection
from phalanx.roles.run_file import PrivateFile
from tests.roles.control import stub_gateway


def launch(folder: Path, **section: object) -> GatewayLaunch:
    return GatewayLaunch(
        section=GatewaySection(**{"http_port": 0, "drain_timeout_s": 0.1, **section}),
        control_url="http://127.0.0.1:1",
        control_key="k1",
        key_file=PrivateFile(folder / "job.keys"),
        log_file=folder / "gateway.log",
        log_level=None,
        program=stub_gateway.PROGRAM,
    )


def words(launch: GatewayLaunch) -> dict[str, str]:
    given = launch.command(7).arguments[len(launch.program) :]
    return dict(zip(given[::2], given[1::2], strict=False))


def test_the_command_is_the_section_of_the_file(tmp_path):
    given = words(
        launch(tmp_path, http_host="::1", api_key="a", admin_key="b", tls_cert="c", tls_key="d")
    )
    assert given["--roles"] == "http://127.0.0.1:1"
    assert given["--http-host"] == "::1"
    assert given["--http-port"] == "7"
    assert given["--key-file"] == str(tmp_path / "job.keys")
    assert (given["--tls-cert"], given["--tls-key"]) == ("c", "d")
    assert "--access-log" in launch(tmp_path, access_log=True).command(7).arguments


def test_keys_are_in_a_file_for_this_user_alone_and_not_in_the_command(tmp_path):
    given = launch(tmp_path, api_key="a1", admin_key="b1")
    given.write_keys()
    assert read_key_file(given.key_file.path) == KeyFile(
        api_key="a1", admin_key="b1", roles_key="k1"
    )
    assert given.key_file.path.stat().st_mode & 0o077 == 0
    assert not {"a1", "b1", "k1"} & set(given.command(7).arguments)
    without = replace(launch(tmp_path), control_key=None)
    assert "--key-file" not in without.command(7).arguments


@asynccontextmanager
async def process(
    given: GatewayLaunch, host: ProcessHost | None = None
) -> AsyncIterator[tuple[GatewayProcess, asyncio.Queue[str]]]:
    host, changes = host or ProcessHost(), asyncio.Queue()
    gateway = GatewayProcess(given, host, changes.put_nowait)
    try:
        yield gateway, changes
    finally:
        await gateway.stop()
        await host.close(0.0)


async def pid_at(url: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        return int(await reader.readline())
    finally:
        writer.close()
        await writer.wait_closed()


def test_it_listens_when_it_has_started_and_is_gone_when_it_has_stopped(tmp_path):
    async def scenario():
        async with process(launch(tmp_path)) as (gateway, _):
            assert not gateway.up
            await gateway.start()
            assert gateway.up
            pid = await pid_at(gateway.url)
            os.kill(pid, 0)
            assert (tmp_path / "job.keys").exists()
        assert not (tmp_path / "job.keys").exists()
        assert not gateway.up
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(scenario())


def test_a_killed_gateway_is_started_anew_at_the_same_address(tmp_path):
    async def scenario():
        async with process(launch(tmp_path)) as (gateway, changes):
            await gateway.start()
            running = asyncio.create_task(gateway.run())
            first = await pid_at(gateway.url)
            for _ in range(2):
                os.kill(first, signal.SIGKILL)
                assert "was killed by SIGKILL" in await changes.get()
                assert await changes.get() == "the gateway is there again"
                second = await pid_at(gateway.url)
                assert second != first
                first = second
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


class Crowded(ProcessHost):
    """Of a machine that has no place for further processes for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals = 0

    def start(self, *args, **kwargs):
        if self.refusals:
            self.refusals -= 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return super().start(*args, **kwargs)


def test_a_machine_that_has_no_place_for_it_is_asked_again(tmp_path):
    async def scenario():
        host = Crowded()
        async with process(launch(tmp_path), host) as (gateway, changes):
            await gateway.start()
            running = asyncio.create_task(gateway.run())
            host.refusals = 1
            os.kill(await pid_at(gateway.url), signal.SIGKILL)
            assert "was killed by SIGKILL" in await changes.get()
            again = asyncio.create_task(changes.get())
            await asyncio.wait((running, again), return_when=asyncio.FIRST_COMPLETED)
            assert not running.done()
            assert await again == "the gateway is there again"
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def test_what_a_gateway_says_that_does_not_start_is_told(tmp_path):
    async def scenario():
        async with process(launch(tmp_path, access_log=True)) as (gateway, _):
            with pytest.raises(EngineUnavailableError, match="I do not like this flag"):
                await gateway.start()

    asyncio.run(scenario())


def test_a_taken_port_is_named_before_anything_is_started(tmp_path):
    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigurationError, match=f"gateway.http_port={port} is taken"):
                GatewayProcess(launch(tmp_path, http_port=port), ProcessHost(), print)
        assert not list(tmp_path.iterdir())

    asyncio.run(scenario())
