"""Calls of gRPC's own clients: compression, metadata, streams, deadlines, addresses, many at once."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import pytest

from phalanx.errors import InvalidRequestError
from phalanx.gateway.grpc.front import GrpcFront
from phalanx.gateway.grpc.service import Service
from tests.gateway.http2.echo import Echo, calling, client, echo
from tests.gateway.http2.peer import FIELDS, message
from tests.gateway.policy_servers import (
    HOST,
    FakePolicyServer,
    answer_to,
    failure,
    fleet,
    infer,
    request,
    run,
)

Code = grpc.StatusCode
Compression = grpc.Compression
SAY = "/test.Echo/Say"


def channel(served: Echo, **options: object) -> grpc.aio.Channel:
    given = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
    return grpc.aio.insecure_channel(f"{HOST}:{served.port}", options=given, **options)


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("num_bytes", [0, 10, 3_000_000])
def test_messages_may_be_compressed(compression, num_bytes):
    async def scenario():
        async with echo() as served, channel(served, compression=compression) as caller:
            data = (b"all work and no play " * (num_bytes // 20 + 1))[:num_bytes]
            assert await caller.unary_unary(SAY)(data) == data
            sizes = caller.stream_unary("/test.Echo/Sizes")
            assert await sizes(iter([data, b"", data])) == f"{num_bytes},0,{num_bytes}".encode()

    run(scenario())


@pytest.mark.parametrize("compression", [Compression.Gzip, Compression.Deflate])
def test_a_compressed_request_reaches_its_server(compression):
    async def scenario():
        server = FakePolicyServer()
        async with fleet(server) as gateway:
            async with grpc.aio.insecure_channel(
                gateway.address, compression=compression
            ) as caller:
                sent = request("r-1", instructions=("pick it up " * 500,))
                assert await (await infer(caller, sent)) == answer_to(sent)
                assert server.requests == [sent]

    run(scenario())


@pytest.mark.parametrize(
    ("encoding", "data", "status", "words"),
    [
        (b"snappy", b"x", b"12", b"known: gzip, deflate"),
        (b"gzip", b"not gzip", b"3", b"cannot be decompressed as gzip"),
        (b"gzip", gzip.compress(b"a" * 100, mtime=0)[:-9], b"3", b"ends too early"),
        (
            b"gzip",
            gzip.compress(bytes(1 << 20), mtime=0),
            b"8",
            b"more than 1100 bytes when decompressed",
        ),
        (b"deflate", zlib.compress(bytes(1 << 20)), b"8", b"more than 1100 bytes"),
        (b"gzip", gzip.compress(bytes(1 << 24), mtime=0), b"8", b"the message has"),
        (b"identity", b"x", b"3", b"no grpc-encoding says how"),
    ],
)
def test_a_compressed_message_that_cannot_be_taken_is_refused(encoding, data, status, words):
    async def scenario():
        async with echo(max_message_bytes=1100) as served:
            async with client(served) as peer:
                peer.call(1, fields=calling("Say", (b"grpc-encoding", encoding)))
                peer.data(1, message(data, flag=1), last=True)
                fields, _ = await peer.answered(1)
                assert fields[b"grpc-status"] == status, fields
                assert words in fields[b"grpc-message"]
                assert fields[b"grpc-accept-encoding"] == b"identity, gzip, deflate"

    run(scenario())


def test_a_call_of_one_message_takes_no_second():
    async def scenario():
        async with echo() as served, client(served) as peer:
            peer.call(1)
            peer.data(1, message(b"a") + message(b"b"), last=True)
            fields, _ = await peer.answered(1)
            assert fields[b"grpc-status"] == b"3"
            assert fields[b"grpc-message"] == b"the call has more than one message"

    run(scenario())


def test_metadata_passes_both_ways():
    async def scenario():
        async def tell(data, context):
            metadata = dict(context.invocation_metadata())
            assert metadata["x-text"] == "words"
            context.set_trailing_metadata(
                (
                    ("back-bin", metadata["x-data-bin"] + b"!"),
                    ("text", "more words"),
                    ("bad", "line\nbreak"),
                    (":bad", "x"),
                )
            )
            return "|".join((context.authority, context.peer().rpartition(":")[0])).encode()

        front = GrpcFront(HOST, 0)
        front.add(Service("test.Meta", unary={"Tell": tell}))
        port = await front.start()
        async with grpc.aio.insecure_channel(f"localhost:{port}") as caller:
            metadata = (("x-text", "words"), ("x-data-bin", bytes(range(256))))
            call = caller.unary_unary("/test.Meta/Tell")(b"", metadata=metadata)
            assert await call == f"localhost:{port}|ipv4:127.0.0.1".encode()
            trailing = dict(tuple(await call.trailing_metadata()))
            assert trailing == {"back-bin": bytes(range(256)) + b"!", "text": "more words"}
        await front.close()

    run(scenario())


def test_a_stream_is_answered_message_by_message():
    async def scenario():
        async with echo() as served, channel(served) as caller:
            call = caller.stream_stream("/test.Echo/Talk")()
            for number in range(20):
                data = bytes((number,)) * (number * 20_000)
                await call.write(data)
                assert await call.read() == data
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is Code.OK

    run(scenario())


def test_a_call_that_does_not_end_by_its_deadline_is_ended():
    async def scenario():
        async with echo() as served, client(served) as peer:
            peer.call(1, b"x", calling("Hold", (b"grpc-timeout", b"20m")))
            fields, _ = await peer.answered(1)
            assert fields[b"grpc-status"] == b"4"
            await served.until(left=1)
            for value in (b"1", b"m", b"-1m", b"999999999m", b"1x", b""):
                # What is no timeout is none.
                peer.call(2 * len(value) + 101, b"x", calling("Say", (b"grpc-timeout", value)))

    run(scenario())


def test_a_client_on_threads_with_many_calls_at_once():
    ready = threading.Event()
    ports: list[int] = []
    loop_end: list[object] = []

    async def serve() -> None:
        async with echo() as served:
            ports.append(served.port)
            end = asyncio.Event()
            loop_end.append((asyncio.get_running_loop(), end))
            ready.set()
            await end.wait()

    thread = threading.Thread(target=run, args=(serve(),))
    thread.start()
    ready.wait()
    with grpc.insecure_channel(f"{HOST}:{ports[0]}") as caller, ThreadPoolExecutor(8) as threads:
        say = caller.unary_unary(SAY)
        sent = [bytes((number,)) * (number * 5000) for number in range(64)]
        assert list(threads.map(say, sent)) == sent
    loop, end = loop_end[0]
    loop.call_soon_threadsafe(end.set)
    thread.join()


def test_a_hundred_calls_at_once_of_each_of_several_clients():
    async def scenario():
        async with echo() as served:
            callers = [channel(served) for _ in range(4)]
            sent = [f"{number}".encode() * 700 for number in range(100)]
            calls = [caller.unary_unary(SAY)(data) for caller in callers for data in sent]
            assert await asyncio.gather(*calls) == sent * 4
            for caller in callers:
                await caller.close()

    run(scenario())


def test_a_client_that_pings_all_the_time_is_served():
    async def scenario():
        async with echo() as served:
            options = (
                ("grpc.keepalive_time_ms", 20),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
            )
            async with grpc.aio.insecure_channel(f"{HOST}:{served.port}", options) as caller:
                held = caller.unary_unary("/test.Echo/Hold")(b"x")
                await served.until(held=1)
                for _ in range(200):
                    await caller.unary_unary(SAY)(b"y")
                served.release.set()
                assert await held == b"x"

    run(scenario())


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
@pytest.mark.parametrize(("host", "ways"), [("::1", ["[::1]"]), ("::", ["[::1]", "127.0.0.1"])])
def test_addresses_of_ipv6(host, ways):
    async def scenario():
        served = Echo()
        front = GrpcFront(host, 0)
        front.add(served.service())
        port = await front.start()
        for way in ways:
            async with grpc.aio.insecure_channel(f"{way}:{port}") as caller:
                assert await caller.unary_unary(SAY)(b"x") == b"x"
        await front.close()

    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    run(scenario())


def test_closing_without_time_cuts_calls_off():
    async def scenario():
        served = Echo()
        front = GrpcFront(HOST, 0)
        front.add(served.service())
        served.port = await front.start()
        async with channel(served) as caller:
            call = caller.unary_unary("/test.Echo/Hold")(b"x")
            await served.until(held=1)
            patient = asyncio.ensure_future(front.close(600.0))
            await asyncio.sleep(0)
            await front.close(0.0)
            await patient
            assert (await failure(call)).code() in (Code.UNAVAILABLE, Code.CANCELLED)
            await served.until(left=1)

    run(scenario())


def test_the_fields_of_a_call_are_read_anew_where_they_differ():
    async def scenario():
        async with echo() as served, client(served) as peer:
            for number in range(40):
                stream_id = 2 * number + 1
                peer.call(stream_id, b"%d" % number, (*FIELDS, (b"x-number", b"%d" % number)))
                assert (await peer.answered(stream_id))[1] == message(b"%d" % number)

    run(scenario())


@pytest.mark.parametrize("words", ["a" * 5000, "é" * 2000, "%" * 3000])
def test_the_words_of_a_status_are_cut_where_clients_would_not_take_them(words):
    async def scenario():
        async def refuse(data, context):
            raise InvalidRequestError(words)

        front = GrpcFront(HOST, 0)
        front.add(Service("test.Words", unary={"Refuse": refuse}))
        port = await front.start()
        async with grpc.aio.insecure_channel(f"{HOST}:{port}") as caller:
            error = await failure(caller.unary_unary("/test.Words/Refuse")(b""))
            assert error.code() is Code.INVALID_ARGUMENT
            assert words.startswith(error.details()) and len(error.details()) > 600
        await front.close()

    run(scenario())


def test_a_call_whose_handler_was_cancelled_by_something_else_ends():
    async def scenario():
        async with echo() as served, client(served) as peer:
            peer.call(1, b"x", calling("Quit"))
            fields, _ = await peer.answered(1)
            assert fields[b"grpc-status"] == b"1"
            assert fields[b"grpc-message"] == b"the gateway has given the call up"

    run(scenario())
