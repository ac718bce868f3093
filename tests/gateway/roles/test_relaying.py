"""What a role's requests and answers look like on both sides of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest

from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.roles.json_members import MAX_TOKENS
from tests.gateway.http.running import HOST, Client
from tests.gateway.roles.running import (
    CHAT,
    GENERATE,
    Engine,
    ask_json,
    content,
    listening,
    model,
    raw,
    role,
    run,
)

EVENTS = (b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n")
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Streaming(Engine):
    """Answers with events, each when the test says so; breaks off after `left` of them."""

    def __init__(self, left: int = len(EVENTS)) -> None:
        super().__init__()
        self.go_on = asyncio.Semaphore(0)
        self.left = left

    async def respond(self, writer):
        writer.write(STREAM)
        for event in EVENTS[: self.left]:
            await self.go_on.acquire()
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        if self.left < len(EVENTS):
            await self.go_on.acquire()
            raise ConnectionError
        writer.write(b"0\r\n\r\n")


def test_i25_what_an_engine_is_asked_and_answers_passes_byte_for_byte():
    engine = Engine(b'{"text":  "\\u00e9", "meta_info": {"routed_experts": "QUJD", "n": 1.0}}')
    body = (
        b'{"model" : "m", "input_ids": [[1,2],[3]], "sampling_params": {"temperature": 0.0},'
        b' "image_data": "aGk=",  "future_field": null}'
    )

    async def scenario():
        async with listening(engine) as ports, role(content(model("m", *ports))) as front:
            answer = await front.ask(GENERATE, body, x_request_id="abc", x_own="kept")
            assert (answer.status, answer.body) == (200, engine.answer)
            assert answer.headers["x-inference-model"] == "m"
            assert answer.headers["x-request-id"] == "abc"
            assert front.in_flight == 0

    run(scenario())
    head, got = engine.asked[0]
    assert got == body.replace(b'"model" : "m",', b"")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /generate HTTP/1.1"
    assert b"x-own: kept" in lines and b"x-request-id: abc" in lines
    assert b"content-length: %d" % len(got) in lines
    hosts = [line for line in lines if line.lower().startswith(b"host:")]
    assert hosts == [f"host: 127.0.0.1:{engine.port}".encode()]


@pytest.mark.parametrize("path", [CHAT, "/rollout/chat/completions"])
def test_i26_i27_both_chat_paths_ask_the_engine_for_its_own_name_of_the_model(path):
    engine = Engine(b'{"choices": []}')
    body = b'{"messages": [{"role": "user", "content": "the \\"model\\": x"}], "model": "m"}'

    async def scenario():
        served = content(model("m", engine.port, served_model_name="org/base"))
        async with role(served) as front:
            assert (await front.ask(path, body)).body == engine.answer
            assert (await front.ask(path + "?x=1", b'{"route_key": null}')).status == 200

    async def whole():
        async with listening(engine):
            await scenario()

    run(whole())
    assert engine.asked[0][0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert engine.bodies[0] == body.replace(b'"model": "m"', b'"model": "org/base"')
    assert engine.asked[1][0].startswith(b"POST /v1/chat/completions?x=1 HTTP/1.1\r\n")
    assert engine.bodies[1] == b'{"model":"org/base"}'


def test_the_path_of_an_engines_url_comes_before_its_own():
    engine = Engine()

    async def scenario():
        async with listening(engine) as (port,):
            published = content(model("m", port))
            replica = published.models[0].replicas[0]
            object.__setattr__(replica, "base_url", f"http://127.0.0.1:{port}/teacher/")
            async with role(published) as front:
                assert (await front.ask(GENERATE, b"{}")).status == 200

    run(scenario())
    assert engine.asked[0][0].startswith(b"POST /teacher/generate HTTP/1.1\r\n")


@pytest.mark.parametrize("size", [100, 40_000, 900_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_of_any_size_and_framing(size, chunked):
    engine = Engine()
    body = b'{"text": "%b", "model": "m"}' % (b"x" * size)

    async def scenario():
        async with listening(engine) as ports, role(content(model("m", *ports))) as front:
            client = await front.connect()
            for _ in range(2):
                if chunked:
                    client.write(
                        b"POST /rollout/generate HTTP/1.1\r\nhost: a\r\n"
                        b"transfer-encoding: chunked\r\n\r\n"
                    )
                    for part in (body[:50], body[50:]):
                        client.write(b"%x\r\n%b\r\n" % (len(part), part))
                    client.write(b"0\r\n\r\n")
                else:
                    client.write(raw(GENERATE, body))
                assert (await client.answer()).status == 200

    run(scenario())
    assert engine.bodies == [b'{"text": "%b"}' % (b"x" * size)] * 2
    assert all(b"chunked" not in head for head, _ in engine.asked)


def test_requests_that_come_together_are_answered_in_their_order():
    engine = Engine()

    async def scenario():
        async with listening(engine) as ports, role(content(model("m", *ports))) as front:
            client = await front.connect()
            client.write(raw(GENERATE, b'{"n": 1}') + raw(GENERATE, b"[]") + raw(GENERATE, b"{}"))
            assert [(await client.answer()).status for _ in range(3)] == [200, 400, 200]

    run(scenario())
    assert engine.bodies == [b'{"n": 1}', b"{}"]


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_i28_events_arrive_unchanged_and_each_by_itself(path):
    engine = Streaming()

    async def scenario():
        async with listening(engine) as ports, role(content(model("m", *ports))) as front:
            client = await front.connect()
            client.write(raw(path, b'{"stream": true}'))
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert b"x-inference-model: m\r\n" in head and head.count(b"x-inference-model") == 1
            for event in EVENTS:
                engine.go_on.release()
                size = int(await client.reader.readuntil(b"\r\n"), 16)
                assert (await client.reader.readexactly(size + 2))[:-2] == event
            assert await client.reader.readexactly(5) == b"0\r\n\r\n"
            assert front.in_flight == 0

    run(scenario())


def test_i28_a_client_that_leaves_ends_the_request_at_the_engine():
    class Endless(Engine):
        async def serve(self, reader, writer):
            await reader.readuntil(b'{"stream": true}')
            writer.write(STREAM + b"%x\r\n%b\r\n" % (len(EVENTS[0]), EVENTS[0]))
            with contextlib.suppress(ConnectionError):
                await reader.read()  # nothing more comes but the end
            self.closed.set()
            writer.close()

    engine = Endless()

    async def scenario():
        async with listening(engine) as ports, role(content(model("m", *ports))) as front:
            client = await front.connect()
            client.write(raw(GENERATE, b'{"stream": true}'))
            await client.reader.readuntil(EVENTS[0])
            assert front.in_flight == 1 and not engine.closed.is_set()
            client.close()
            await front.until_in_flight(0)
            await engine.closed.wait()

    run(scenario())


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (GENERATE, {"type": "server_error", "code": 502, "retryable": False}),
        (CHAT, {"type": "server_error", "code": "bad_gateway", "param": None}),
    ],
)
def test_a_stream_that_breaks_ends_with_an_error_event(path, told):
    engine = Streaming(left=1)

    async def scenario():
        async with listening(engine) as ports, role(content(model("m", *ports))) as front:
            client = await front.connect()
            client.write(raw(path, b'{"stream": true}'))
            engine.go_on.release()
            engine.go_on.release()
            answer = await client.answer()
            assert answer.whole and answer.status == 200
            first, error, done = answer.body.split(b"\n\n")[:3]
            assert first == b"data: one" and done == b"data: [DONE]"
            words = json.loads(error.removeprefix(b"data: "))["error"]
            assert told.items() <= words.items()
            assert "broke off" in words["message"] and str(engine.port) not in words["message"]

    run(scenario())


@pytest.mark.parametrize(
    ("path", "method", "body", "status", "allowed"),
    [
        ("/rollout/generate", "GET", None, 405, "POST"),
        ("/rollout/generate", "PUT", b"{}", 405, "POST"),
        ("/rollout/chat/completions", "DELETE", None, 405, "POST"),
        ("/rollout/engines", "POST", b"{}", 405, "GET"),
        ("/rollout/health", "POST", b"{}", 405, "GET"),
        ("/rollout", "GET", None, 404, None),
        ("/rollout/", "GET", None, 404, None),
        ("/rollout/v1/completions", "POST", b"{}", 404, None),
        ("/rollout/generate/", "POST", b"{}", 404, None),
        ("/teacher/generate", "POST", b"{}", 404, None),
        ("/rollout/generate", "POST", b"", 400, None),
        ("/rollout/generate", "POST", b"[]", 400, None),
        ("/rollout/generate", "POST", b'{"text": }', 400, None),
        ("/rollout/generate", "POST", b'{"model": 1}', 400, None),
        ("/rollout/v1/chat/completions", "POST", b'"x"', 400, None),
    ],
)
def test_i29_wrong_methods_paths_and_bodies(path, method, body, status, allowed):
    engine = Engine()

    async def scenario():
        async with listening(engine) as ports, role(content(model("m", *ports))) as front:
            return await front.ask(path, body, method)

    answer = run(scenario())
    assert answer.status == status and ask_json(answer)["error"]["message"]
    assert answer.headers.get("allow") == allowed
    assert engine.asked == []


def test_an_engines_own_refusal_passes_as_it_came():
    engine = Engine(b'{"error": {"message": "too long"}}', status=400)

    async def scenario():
        async with listening(engine) as ports, role(content(model("m", *ports))) as front:
            answer = await front.ask(GENERATE, b"{}")
            assert (answer.status, answer.body) == (400, engine.answer)
            assert answer.headers["x-inference-model"] == "m"

    run(scenario())


@pytest.mark.parametrize("passes", [True, False])
def test_the_callers_key_goes_on_only_where_it_is_not_the_gateways(passes):
    engine = Engine()

    async def scenario():
        async with listening(engine) as ports:
            keys = {} if passes else {"api_key": "secret"}
            async with role(content(model("m", *ports)), **keys) as front:
                refused = await front.ask(GENERATE, b"{}")
                assert refused.status == (200 if passes else 401)
                given = "Bearer secret"
                assert (await front.ask(GENERATE, b"{}", authorization=given)).status == 200

    run(scenario())
    assert (b"authorization: Bearer secret" in engine.asked[-1][0]) is passes


def test_a_body_above_the_limit_is_refused():
    engine = Engine()

    async def scenario():
        async with listening(engine) as ports:
            limits = HttpLimits(max_body_bytes=1000)
            async with role(content(model("m", *ports)), limits=limits) as front:
                assert (await front.ask(GENERATE, b'{"x": "%b"}' % (b"y" * 1000))).status == 413

    run(scenario())
    assert engine.asked == []


def test_an_engine_that_is_a_gateway_itself_does_not_name_the_model():
    class Labelled(Engine):
        async def respond(self, writer):
            writer.write(
                b"HTTP/1.1 200 OK\r\nx-inference-model: other\r\ncontent-length: 2\r\n\r\n{}"
            )

    async def scenario():
        async with listening(Labelled()) as ports, role(content(model("m", *ports))) as front:
            answer = await front.ask(GENERATE, b"{}")  # which fails where it is there twice
            assert answer.headers["x-inference-model"] == "m"

    run(scenario())


def test_a_body_that_is_too_large_to_be_searched_is_refused():
    """Over a new connection and over one that waits."""
    much = b"[" + b"[]," * (MAX_TOKENS // 2) + b"1]"
    twice = b'{"model":"m","model":"m","x":' + much + b',"y":1}'
    engine = Engine()

    async def scenario():
        async with listening(engine) as ports, role(content(model("m", *ports))) as front:
            for path in (GENERATE, CHAT):
                for _ in range(2):
                    refused = await front.ask(path, twice)
                    assert refused.status == 400
                    assert "too large to be searched" in ask_json(refused)["error"]["message"]
                    assert (await front.ask(path, b"{}")).status == 200
            assert front.in_flight == 0
            return front.gateway.servers.traffic.of("m/0").codes

    assert run(scenario()) == {"400": 4, "200": 4}


def test_a_client_that_does_not_read_keeps_nobody_elses_answer():
    """The engine's connection goes to whose turn is next, while that client is waited for."""
    engine = Engine(answer=bytes(50_000))

    async def scenario():
        async with listening(engine) as ports, role(content(model("m", *ports))) as front:
            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, (HOST, front.port))
            num_asked = 0
            while not front.in_flight:
                await loop.sock_sendall(deaf, raw(GENERATE, b"{}"))
                await engine.has_been_asked(2 * num_asked + 1)
                assert (await front.ask(GENERATE, b"{}")).status == 200
                num_asked += 1
            client = Client(*await asyncio.open_connection(sock=deaf, limit=2**22))
            for _ in range(num_asked):
                assert (await client.answer()).body == engine.answer
            client.close()

    run(scenario())
