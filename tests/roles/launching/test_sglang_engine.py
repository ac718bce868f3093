"""What an engine's answers mean: done, refused, uncertain, or nobody there; each call is sent once."""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

import phalanx.roles
from phalanx.errors import ConfigurationError, InvalidRequestError
from phalanx.roles.contracts import ALL_TAGS, EngineCallError, EngineControl, Tag
from phalanx.roles.sglang_engine import EngineTimeouts, SGLangEngine
from phalanx.schema.roles import DeploymentSpec
from phalanx.server.operations.call_order import CallOrder
from phalanx.wire.sglang.errors import failure_body

Call = Callable[[SGLangEngine], Awaitable[object]]
URL = "http://engine:30000"
EVERY_CALL: dict[str, tuple[Call, str, object]] = {
    "pause": (lambda engine: engine.pause(), "POST /pause_generation", {"mode": "abort"}),
    "go_on": (lambda engine: engine.go_on(), "POST /continue_generation", {}),
    "abort_all": (
        lambda engine: engine.abort_all(),
        "POST /abort_request",
        {"rid": "", "abort_all": True},
    ),
    "release": (
        lambda engine: engine.release(frozenset({Tag.WEIGHTS, Tag.KV_CACHE})),
        "POST /release_memory_occupation",
        {"tags": ["kv_cache", "weights"]},
    ),
    "resume": (
        lambda engine: engine.resume(frozenset({Tag.CUDA_GRAPH})),
        "POST /resume_memory_occupation",
        {"tags": ["cuda_graph"]},
    ),
    "load_weights": (
        lambda engine: engine.load_weights("/step-7", "7"),
        "POST /update_weights_from_disk",
        {
            "model_path": "/step-7",
            "weight_version": "7",
            "abort_all_requests": False,
            "flush_cache": True,
        },
    ),
}


def asked(call: Call, *answers: httpx.Response | Exception) -> tuple[object, list[httpx.Request]]:
    """What `call` returns, or raises, and what it sent; one answer for each request."""
    left, sent = list(answers), []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        given = left.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    async def main() -> object:
        async with SGLangEngine(URL + "/", transport=httpx.MockTransport(answer)) as engine:
            try:
                return await call(engine)
            except EngineCallError as error:
                return error

    return asyncio.run(main()), sent


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """The URL of a server that handles each connection so, and has ended all of them on exit."""
    tasks = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            await handler(reader, writer)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_i5_there_is_one_class_of_engine_for_every_role_and_make():
    _: Callable[[str], EngineControl] = SGLangEngine
    for module in pkgutil.iter_modules(phalanx.roles.__path__, "phalanx.roles."):
        importlib.import_module(module.name)
    assert SGLangEngine.__subclasses__() == []


@pytest.mark.parametrize("name", EVERY_CALL)
def test_each_call_is_one_request(name):
    call, where, body = EVERY_CALL[name]
    result, sent = asked(call, httpx.Response(200, json=None))
    assert result is None
    (request,) = sent
    assert f"{request.method} {request.url.path}" == where
    assert json.loads(request.content) == body


@pytest.mark.parametrize("name", EVERY_CALL)
@pytest.mark.parametrize(
    ("answer", "uncertain", "gone"),
    [
        (httpx.Response(400, json={"error": {"message": "no"}}), False, False),
        (httpx.Response(404, text="Not Found"), False, False),
        (httpx.Response(503, json={"error": {"message": "starting"}}), False, False),
        (httpx.Response(503, text="upstream connect error"), True, False),
        (httpx.Response(502, text="Bad Gateway"), True, False),
        (httpx.Response(504, text="Gateway Timeout"), True, False),
        (httpx.Response(500, json={"error": "boom"}), True, False),
        (httpx.Response(200, json={"success": False, "message": "no such group"}), False, False),
        (
            httpx.Response(400, json={"success": False, "message": "cache flush failed"}),
            True,
            False,
        ),
        (httpx.ReadTimeout("slow"), True, False),
        (httpx.WriteTimeout("slow"), True, False),
        (httpx.ReadError("reset"), True, False),
        (httpx.RemoteProtocolError("left"), True, False),
        (httpx.DecodingError("it is no gzip"), True, False),
        (httpx.ConnectTimeout("slow"), False, False),
        (httpx.ConnectError("no route"), False, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_no_call_is_repeated_and_its_failure_is_classed(name, answer, uncertain, gone):
    error, sent = asked(EVERY_CALL[name][0], answer)
    assert isinstance(error, EngineCallError)
    assert (error.uncertain, error.gone) == (uncertain, gone)
    assert len(sent) == 1
    assert EVERY_CALL[name][1].partition(" ")[2] in str(error)


def test_whether_it_is_idle_is_what_a_flush_says():
    def idle(engine):
        return engine.is_idle()

    assert asked(idle, httpx.Response(200, text="Cache flushed."))[0] is True
    assert asked(idle, httpx.Response(400, text="not flushed"))[0] is False
    error, _ = asked(idle, httpx.Response(500))
    assert isinstance(error, EngineCallError) and error.uncertain


def test_requests_are_counted_over_all_ranks_where_an_engine_says_how_many():
    def count(engine):
        return engine.num_requests()

    loads = [
        {"num_running_reqs": 2, "num_waiting_reqs": 1},
        {"num_running_reqs": 4, "num_waiting_reqs": 0},
    ]
    assert asked(count, httpx.Response(200, json={"loads": loads}))[0] == 7
    for said in ({}, {"loads": []}):
        assert asked(count, httpx.Response(200, json=said))[0] is None
    assert asked(count, httpx.Response(200, json={"loads": [{"running": 2}]}))[0] is None


def test_what_ours_says_of_its_memory_is_read():
    memory = {"resident": ["weights", "cuda_graph"], "asleep": [], "waiting_for_weights": True}
    told = httpx.Response(200, json={"memory": memory})
    assert asked(lambda engine: engine.resident(), told)[0] == {Tag.WEIGHTS, Tag.CUDA_GRAPH}
    assert asked(lambda engine: engine.waits_for_weights(), told)[0] is True


@pytest.mark.parametrize("info", [{}, {"memory": None}, {"memory": 3}, {"memory": {}}])
def test_an_engine_that_cannot_say_what_it_holds(info):
    answer = httpx.Response(200, json=info)
    assert asked(lambda engine: engine.resident(), answer)[0] is None
    assert asked(lambda engine: engine.waits_for_weights(), answer)[0] is None


def test_the_weight_version_is_read():
    def version(engine):
        return engine.weight_version()

    assert asked(version, httpx.Response(200, json={"weight_version": "7"}))[0] == "7"
    for answer in (httpx.Response(200, json={}), httpx.Response(200, text="hello")):
        error, _ = asked(version, answer)
        assert isinstance(error, EngineCallError) and not error.uncertain


@pytest.mark.parametrize(
    "answer", [httpx.Response(503), httpx.ReadTimeout(""), httpx.ConnectError("")]
)
def test_health_checks_do_not_raise(answer):
    assert asked(lambda engine: engine.healthy(), answer)[0] is False
    assert asked(lambda engine: engine.ready(), answer)[0] is False


def test_health_and_readiness_are_different_questions():
    _, sent = asked(lambda engine: engine.healthy(), httpx.Response(200))
    assert sent[0].url.path == "/health"
    _, sent = asked(lambda engine: engine.ready(), httpx.Response(200))
    assert sent[0].url.path == "/health_generate"


@pytest.mark.parametrize("healthy", [200, 503])
def test_a_server_of_another_make_is_ready_when_it_is_healthy(healthy):
    answers = httpx.Response(404), httpx.Response(healthy)
    ready, sent = asked(lambda engine: engine.ready(), *answers)
    assert ready is (healthy == 200)
    assert [request.url.path for request in sent] == ["/health_generate", "/health"]


def test_a_key_goes_along():
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return httpx.Response(200)

    async def main() -> None:
        transport = httpx.MockTransport(answer)
        async with SGLangEngine(URL, api_key="k", transport=transport) as engine:
            await engine.healthy()

    asyncio.run(main())
    assert seen == ["Bearer k"]


def test_a_client_whose_engine_another_one_has_taken_over_knows_and_a_new_one_has_it():
    order = CallOrder()

    def answer(request: httpx.Request) -> httpx.Response:
        try:
            order.check(request.headers.get("x-phalanx-call"), "10.0.0.9")
        except InvalidRequestError as error:
            return httpx.Response(400, content=failure_body(str(error), error.field))
        return httpx.Response(200, content=b"null")

    async def main() -> None:
        engines = [SGLangEngine(URL, transport=httpx.MockTransport(answer)) for _ in range(3)]
        first, second, third = engines
        await first.release(ALL_TAGS)
        await second.resume(ALL_TAGS)
        with pytest.raises(EngineCallError) as refused:
            await first.release(ALL_TAGS)
        assert refused.value.taken_over and not refused.value.uncertain
        assert "at 10.0.0.9 has taken this engine" in str(refused.value)
        assert "recover ROLE/MODEL/N` does" in str(refused.value), "nothing of it is cut off"
        await third.release(ALL_TAGS)
        for engine in engines:
            await engine.close()

    asyncio.run(main())


def test_where_nobody_listens_the_engine_is_gone():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"

        async def main() -> EngineCallError:
            async with SGLangEngine(url) as engine:
                with pytest.raises(EngineCallError, match="no connection") as caught:
                    await engine.pause()
                return caught.value

        error = asyncio.run(main())
    assert error.gone and not error.uncertain


def test_a_lost_answer_is_uncertain():
    async def main() -> EngineCallError:
        async def lose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")

        async with serving(lose) as url, SGLangEngine(url) as engine:
            with pytest.raises(EngineCallError, match="may have been done") as caught:
                await engine.resume(frozenset(Tag))
            return caught.value

    error = asyncio.run(main())
    assert error.uncertain and not error.gone


def test_no_connection_is_used_twice():
    """A kept one may be closed by the engine just as a call is written to it."""
    ports = []

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ports.append(writer.get_extra_info("peername")[1])
            while await reader.read(4096):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnull")

        async with serving(serve) as url, SGLangEngine(url) as engine:
            await engine.healthy()
            await engine.healthy()

    asyncio.run(main())
    assert len(set(ports)) == 2


def test_an_engine_that_is_silent_is_not_waited_for_longer_than_said():
    async def main() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        timeouts = EngineTimeouts(health_s=0.02, call_s=0.02)
        async with serving(silent) as url, SGLangEngine(url, timeouts=timeouts) as engine:
            assert not await engine.healthy()
            with pytest.raises(EngineCallError, match=r"no answer within 0\.02 s") as caught:
                await engine.go_on()
            assert caught.value.uncertain

    asyncio.run(main())


def test_a_role_gives_its_engines_the_time_that_its_file_says():
    """A client that gave up before would take the engine for dead, or repeat a long load."""
    waited: list[tuple[str, float]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        waited.append((request.url.path, request.extensions["timeout"]["read"]))
        return httpx.Response(200, json={})

    async def main(deployment: DeploymentSpec) -> None:
        timeouts, transport = EngineTimeouts.of(deployment), httpx.MockTransport(answer)
        async with SGLangEngine(URL, timeouts=timeouts, transport=transport) as engine:
            await engine.healthy()
            await engine.load_weights("/step-7", "7")

    asyncio.run(main(DeploymentSpec(health_timeout_s=45.0, startup_timeout_s=3600.0)))
    assert waited == [("/health", 45.0), ("/update_weights_from_disk", 3600.0)]


def test_timeouts_are_checked():
    with pytest.raises(ConfigurationError, match="call_s=0 must be above 0"):
        EngineTimeouts(call_s=0)
