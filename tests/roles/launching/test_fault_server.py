"""The proxy in which faults can be set: what passes, what goes wrong, and how it is controlled."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from phalanx.testing.fault_server import (
    Fault,
    FaultControlPort,
    FaultKind,
    FaultServer,
    crashes_as_sglang,
    lost_response,
)
from phalanx.testing.faults import FLUSH, RELEASE, RESUME

WAITS = 60.0


class Upstream:
    """An engine that counts what it does; `/generate` answers in two parts, the second on `finish`."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str, bytes]] = []
        self.finish = asyncio.Event()
        self.left = asyncio.Event()
        self.url = ""
        self._tasks: set[asyncio.Task] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = head.partition("content-length:")[2].split("\r\n")[0].strip() or "0"
            body = await reader.readexactly(int(length))
            method, path = head.split(" ")[:2]
            self.done.append((method, path, body))
            if path == "/generate":
                await self._stream(reader, writer)
            else:
                told = json.dumps({"path": path, "count": len(self.done)}).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nx-engine: 1\r\ncontent-length: %d\r\n" % len(told)
                )
                writer.write(b"connection: close\r\n\r\n" + told)
                await writer.drain()
        finally:
            writer.close()

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        leaving = asyncio.create_task(reader.read(1))
        finishing = asyncio.create_task(self.finish.wait())
        await asyncio.wait({leaving, finishing}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.left.set()
        for task in (leaving, finishing):
            task.cancel()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Upstream]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


class Case:
    def __init__(self, engine: Upstream, server: FaultServer, client: httpx.AsyncClient) -> None:
        self.engine, self.server, self.client = engine, server, client

    async def post(self, path: str, **body: object) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def lost(self, path: str, **body: object) -> None:
        with pytest.raises(httpx.TransportError):
            await self.post(path, **body)

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[asyncio.Task]:
        """A request that is being answered; its text is the task's result."""
        begun = asyncio.Event()

        async def generate() -> str:
            parts = []
            async with self.client.stream("POST", "/generate", json={}) as response:
                async for part in response.aiter_text():
                    parts.append(part)
                    begun.set()
            return "".join(parts)

        task = asyncio.create_task(generate())
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        try:
            yield task
        finally:
            task.cancel()
            waiting.cancel()
            await asyncio.gather(task, return_exceptions=True)


def run_with_engine(test: Callable[[Case], Awaitable[None]], **fields: object) -> None:
    async def main() -> None:
        async with Upstream().listening() as engine:
            async with FaultServer(engine.url, **fields) as server:
                async with httpx.AsyncClient(base_url=server.url, timeout=WAITS) as client:
                    await test(Case(engine, server, client))

    asyncio.run(main())


def test_without_a_fault_everything_passes_as_it_is():
    async def test(case: Case) -> None:
        response = await case.post("/server_info?x=1", a="é")
        assert response.headers["x-engine"] == "1"
        assert response.json() == {"path": "/server_info?x=1", "count": 1}
        assert (
            case.engine.done[0][2]
            == json.dumps({"a": "é"}, ensure_ascii=False, separators=(",", ":")).encode()
        )
        async with case.generating() as task:
            case.engine.finish.set()
            assert await task == "data: 1\n\ndata: [DONE]\n\n"
        calls = [(call.path, call.status, call.fault) for call in case.server.calls]
        assert calls == [("/server_info", 200, None), ("/generate", 200, None)]

    run_with_engine(test)


def test_a_body_in_chunks_arrives_whole():
    async def test(case: Case) -> None:
        async def parts() -> AsyncIterator[bytes]:
            yield b"one "
            yield b"two"

        assert (await case.client.post("/x", content=parts())).status_code == 200
        assert case.engine.done[0][2] == b"one two"

    run_with_engine(test)


def test_a_client_that_leaves_is_passed_on():
    async def test(case: Case) -> None:
        async with case.generating() as task:
            task.cancel()
            await case.engine.left.wait()

    run_with_engine(test)


def test_a_bad_gateway_once():
    async def test(case: Case) -> None:
        case.server.add(Fault(kind=FaultKind.STATUS, path=RELEASE, times=1))
        assert (await case.post(RELEASE)).status_code == 502
        assert not case.engine.done
        assert (await case.post(RELEASE)).status_code == 200
        assert [call.fault for call in case.server.calls] == [FaultKind.STATUS, None]

    run_with_engine(test)


def test_a_bad_gateway_for_what_was_done():
    async def test(case: Case) -> None:
        case.server.add(Fault(kind=FaultKind.STATUS, path=RESUME, status=504, after=True))
        assert (await case.post(RESUME)).status_code == 504
        assert (await case.post("/other")).status_code == 200
        assert [path for _, path, _ in case.engine.done] == [RESUME, "/other"]

    run_with_engine(test)


def test_a_lost_response_and_a_lost_request():
    async def test(case: Case) -> None:
        case.server.add(lost_response(RELEASE))
        await case.lost(RELEASE)
        assert len(case.engine.done) == 1
        case.server.add(Fault(kind=FaultKind.DROP, path="*", times=1))
        await case.lost("/anything")
        assert len(case.engine.done) == 1
        assert (await case.post(RELEASE)).status_code == 200

    run_with_engine(test)


@pytest.mark.parametrize("after", [False, True])
def test_a_hanging_request_goes_on_when_the_fault_is_lifted(after):
    async def test(case: Case) -> None:
        fault = case.server.add(Fault(kind=FaultKind.HANG, path="/x*", after=after))
        asking = asyncio.create_task(case.post("/xy"))
        await case.server.arrived("/xy")
        assert (await case.post("/other")).status_code == 200
        assert ("/xy" in [path for _, path, _ in case.engine.done]) == after
        assert not asking.done()
        case.server.lift(fault)
        assert (await asking).status_code == 200

    run_with_engine(test)


def test_a_delay():
    async def test(case: Case) -> None:
        case.server.add(Fault(kind=FaultKind.DELAY, path="/x", delay_s=0.001))
        assert (await case.post("/x")).status_code == 200
        assert case.server.calls[0].fault is FaultKind.DELAY

    run_with_engine(test)


def test_a_stream_that_is_cut():
    async def test(case: Case) -> None:
        case.server.add(Fault(kind=FaultKind.CUT, path="/generate", num_bytes=3, times=1))
        with pytest.raises(httpx.TransportError):
            async with case.generating() as task:
                await task
        async with case.generating() as task:
            case.engine.finish.set()
            assert (await task).endswith("[DONE]\n\n")

    run_with_engine(test)


def test_a_slow_drain_is_not_idle_until_it_is_lifted():
    async def test(case: Case) -> None:
        case.server.add(Fault(kind=FaultKind.SLOW_DRAIN, path="/generate"))
        body = asyncio.create_task(case.post("/generate"))
        await case.server.arrived("/generate")
        case.engine.finish.set()
        assert (await case.post(FLUSH)).status_code == 400
        assert not body.done()
        case.server.lift()
        assert (await body).text.endswith("[DONE]\n\n")
        assert (await case.post(FLUSH)).status_code == 200

    run_with_engine(test)


def test_a_crash_when_busy_loses_everything_and_nobody_listens_then():
    crashes = []

    async def test(case: Case) -> None:
        case.server.add(*crashes_as_sglang())
        assert (await case.post(RELEASE)).status_code == 200
        assert (await case.post(RESUME)).status_code == 200
        with pytest.raises(httpx.TransportError):
            async with case.generating() as task:
                await case.lost(RELEASE)
                await task
        assert case.server.has_crashed and crashes == [1]
        with pytest.raises(httpx.ConnectError):
            await case.post("/health")
        await case.server.revive()
        assert (await case.post("/health")).status_code == 200

    run_with_engine(test, on_crash=lambda: crashes.append(1))


@pytest.mark.parametrize(
    ("released", "resumed", "dies"),
    [
        (["weights"], ["weights"], False),
        (None, ["weights"], False),
        (["weights"], ["kv_cache"], True),
        (["weights"], None, True),
    ],
)
def test_a_resume_of_what_was_not_released_crashes(released, resumed, dies):
    async def test(case: Case) -> None:
        case.server.add(*crashes_as_sglang())
        await case.post(RELEASE, tags=released)
        if not dies:
            assert (await case.post(RESUME, tags=resumed)).status_code == 200
            # A second time there is nothing left to take.
        await case.lost(RESUME, tags=resumed)
        assert case.server.has_crashed

    run_with_engine(test)


def test_an_engine_that_is_not_there_is_a_bad_gateway():
    async def main() -> None:
        async with Upstream().listening() as engine:
            url = engine.url
        async with FaultServer(url) as server, httpx.AsyncClient(base_url=server.url) as client:
            answer = await client.get("/health")
            assert answer.status_code == 502 and "cannot be reached" in answer.text

    asyncio.run(main())


@pytest.mark.parametrize("fields", [{"path": "x"}, {"times": 0}])
def test_faults_are_checked(fields):
    with pytest.raises(ValueError, match="must"):
        Fault(kind=FaultKind.DROP, **fields)
    with pytest.raises(ValueError, match="must be http://HOST:PORT"):
        FaultServer("engine:30000")


def test_it_is_controlled_over_http():
    async def test(case: Case) -> None:
        async with await FaultControlPort(case.server).listen("127.0.0.1", 0) as port:
            url = f"http://127.0.0.1:{port.sockets[0].getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=WAITS) as control:
                fault = {"kind": "status", "path": "/x", "status": 503, "times": 2}
                one = (await control.post("/faults", json=fault)).json()["id"]
                assert (await case.post("/x")).status_code == 503
                shown = (await control.get("/faults")).json()[str(one)]
                assert (shown["kind"], shown["num_left"]) == ("status", 1)
                assert (await control.delete(f"/faults/{one}")).json() == {}
                assert (await case.post("/x")).status_code == 200
                await control.post("/faults", json={"kind": "drop"})
                await case.lost("/y")
                await control.delete("/faults")
                await control.get("/wait", params={"path": "/x", "count": 2})
                calls = (await control.get("/calls")).json()
                assert [call["path"] for call in calls] == ["/x", "/x", "/y"]
                await control.post("/crash")
                await case.lost("/x")
                await control.post("/revive", json={"upstream": case.engine.url})
                assert (await case.post("/x")).status_code == 200
                for bad in ({"kind": "nonsense"}, {"kind": "drop", "x": 1}, [], {"kind": 1}):
                    assert (await control.post("/faults", json=bad)).status_code == 400
                assert (await control.get("/nowhere")).status_code == 404

    run_with_engine(test)


@contextlib.contextmanager
def as_a_command(upstream: str):
    """The URLs of the engine, to callers, and of its control."""
    command = [sys.executable, "-m", "phalanx.testing.fault_server", "--upstream", upstream]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        words = process.stdout.readline().replace(",", "").split()
        try:
            yield words[2], words[-1]
        finally:
            process.terminate()


def test_it_is_a_command():
    async def main() -> None:
        async with Upstream().listening() as engine:
            with as_a_command(engine.url) as (url, control):
                async with httpx.AsyncClient(timeout=WAITS) as client:
                    assert (await client.post(f"{url}/x")).json()["path"] == "/x"
                    await client.post(f"{control}/faults", json={"kind": "status"})
                    assert (await client.post(f"{url}/x")).status_code == 502

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("crashes", [False, True])
def test_a_connection_that_arrives_as_it_ends_is_closed_too(turns, crashes):
    async def scenario():
        server = FaultServer("http://127.0.0.1:9")
        await server.revive()
        with socket.create_connection(("127.0.0.1", urlsplit(server.url).port)) as caller:
            for _ in range(turns):
                await asyncio.sleep(0)
            if crashes:
                server.crash()
            await server.close()
            caller.setblocking(False)
            try:
                assert caller.recv(1) == b""
            except ConnectionResetError:
                pass

    asyncio.run(scenario(), debug=True)
    gc.collect()  # what is left open is an error then
