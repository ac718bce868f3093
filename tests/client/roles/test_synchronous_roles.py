"""The synchronous client: several threads at once, streams, and closing while requests run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from phalanx.client import RoleClient
from phalanx.client.roles.loop_thread import LoopThread
from phalanx.errors import ConfigurationError, EngineUnavailableError, UnknownModelError
from tests.client.roles.published import PAYLOAD
from tests.client.roles.servers import FakeEngine, FakeGateway, Request, model


class Served:
    """A gateway and an engine on a loop in another thread, for clients that block.

    Requests with `hold` wait until as many have come together.
    """

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.left = threading.Event()
        self.arrived = threading.Semaphore(0)
        self.num_together = 0
        self.url = ""
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()))

    async def serve(self) -> None:
        self.loop, self.end = asyncio.get_running_loop(), asyncio.Event()
        self.engine, self.gateway = FakeEngine(behave=self.behave), FakeGateway()
        self.waiting: list[asyncio.Event] = []
        await self.engine.start()
        await self.gateway.start()
        self.gateway.show(model("math", self.engine.replica()))
        self.url = self.gateway.role_url
        self.ready.set()
        await self.end.wait()
        await self.gateway.stop()
        await self.engine.stop()

    async def behave(self, request: Request) -> None:
        sent = request.json
        if sent.get("stream"):
            request.begin_stream()
            for number in range(3):
                request.event({"n": number})
            if not sent.get("hold"):
                request.end_stream()
                return
            await request.gone.wait()
            self.left.set()
        elif sent.get("hold"):
            self.arrived.release()
            mine = asyncio.Event()
            self.waiting.append(mine)
            if len(self.waiting) == self.num_together:
                for other in self.waiting:
                    other.set()
            gone = asyncio.create_task(request.gone.wait())
            met = asyncio.create_task(mine.wait())
            await asyncio.wait((gone, met), return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            met.cancel()
            if request.gone.is_set():
                self.left.set()
            else:
                request.answer({"sent": sent})
        else:
            request.answer({"sent": sent})


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served()
    server.thread.start()
    server.ready.wait()
    yield server
    server.loop.call_soon_threadsafe(server.end.set)
    server.thread.join()


def test_it_does_what_the_asynchronous_one_does(served):
    with RoleClient(served.url) as client:
        assert client.generate(PAYLOAD, model="math") == {"sent": PAYLOAD}
        assert client.chat({"messages": []}) == {"sent": {"messages": [], "model": "math"}}
        assert client.engines().models["math"].state == "ready"
        assert client.wait_ready("math").revision == client.snapshot.revision == 1
        assert [event["n"] for event in client.stream_generate(PAYLOAD)] == [0, 1, 2]
        assert [event["n"] for event in client.stream_chat({"messages": []})] == [0, 1, 2]
        assert client.health()["path"] == "/teacher/health"
        with pytest.raises(UnknownModelError):
            client.generate(PAYLOAD, model="typo")
    with pytest.raises(EngineUnavailableError, match="the client is closed"):
        client.generate(PAYLOAD)
    client.close()


def test_requests_of_several_threads_run_at_the_same_time(served):
    served.num_together = 6
    with RoleClient(served.url) as client:
        got: list[object] = []
        threads = [
            threading.Thread(target=lambda: got.append(client.generate({"hold": True})))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [{"sent": {"hold": True}}] * 6


def test_closing_while_requests_of_other_threads_run_ends_them(served):
    client = RoleClient(served.url)
    failures: list[Exception] = []

    def ask() -> None:
        try:
            client.generate({"hold": True})
        except EngineUnavailableError as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        served.arrived.acquire()
    closing = [threading.Thread(target=client.close) for _ in range(2)]
    for thread in (*closing, *threads):
        if not thread.ident:
            thread.start()
    for thread in (*closing, *threads):
        thread.join()
    assert len(failures) == 3 and all("is closed" in str(error) for error in failures)
    served.left.wait()


def test_leaving_a_stream_cancels_it_and_a_closed_client_closes_it(served):
    client = RoleClient(served.url)
    with client.stream_generate({"hold": True}) as stream:
        assert next(stream) == {"n": 0}
    served.left.wait()
    with client.stream_generate({"hold": True}) as stream:
        assert next(stream) == {"n": 0}
        client.close()
        with pytest.raises(EngineUnavailableError, match="the client is closed"):
            list(stream)


def test_it_is_not_for_a_running_loop(served):
    client = RoleClient(served.url)

    async def inside():
        for use in (lambda: RoleClient(served.url), lambda: client.generate(PAYLOAD)):
            with pytest.raises(ConfigurationError, match="use AsyncRoleClient there"):
                use()

    asyncio.run(inside())
    client.close()


def test_a_client_that_cannot_be_made_leaves_no_thread():
    before = threading.active_count()
    with pytest.raises(ConfigurationError, match="no HTTP URL"):
        RoleClient("nowhere")
    assert threading.active_count() == before


def test_what_is_about_to_end_when_it_is_closed_ends_by_itself():
    async def ending() -> str:
        begun.set()
        await loop._stop.wait()  # from here on nothing is waited for but what still runs
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return "whole"

    async def last() -> None: ...

    loop, begun, got = LoopThread("RoleClient"), threading.Event(), []
    thread = threading.Thread(target=lambda: got.append(loop.run(ending())))
    thread.start()
    begun.wait()
    loop.close(last)
    thread.join()
    assert got == ["whole"]


BLOCKED = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {blocked!r}:
            raise ModuleNotFoundError("refused", name={blocked!r})
sys.meta_path.insert(0, Refuse())
import phalanx.client
print(*sorted(set(sys.modules) & {{"grpc", "httpcore", "httpx", "torch"}}))
from phalanx.client import {works}
try:
    from phalanx.client import {fails}
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("blocked", "works", "fails"),
    [("grpc", "RoleClient", "PolicyClient"), ("httpcore", "PolicyClient", "RoleClient")],
)
def test_each_client_needs_its_own_packages_alone(blocked, works, fails):
    program = BLOCKED.format(blocked=blocked, works=works, fails=fails)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    heavy, told = done.stdout.split("\n", 1)
    assert heavy == ""  # nothing is loaded before a client is named
    assert f"{fails} needs {blocked}; install it with" in told
