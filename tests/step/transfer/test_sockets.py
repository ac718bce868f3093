"""Content goes from one engine's transfer to another's, over shared memory and over TCP."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from phalanx.errors import ConfigurationError, RequestFailedError
from phalanx.schema.handoff import Handle, Source
from phalanx.step.transfer import client, frames
from phalanx.step.transfer.base import TAKEN, Ending, Reason
from phalanx.step.transfer.channels import channel_of
from phalanx.step.transfer.sockets import SocketTransfer, create_transfer
from tests.step.transfer.contents import READ, Bytes, Held


@pytest.fixture(params=["shm", "tcp"])
def holder(request) -> Iterator[SocketTransfer]:
    with closing(create_transfer(request.param, "127.0.0.1")) as one:
        yield one


@pytest.fixture
def reader() -> Iterator[SocketTransfer]:
    with closing(create_transfer("shm")) as one:
        yield one


class Waiting(Held):
    """Tells when it is freed."""

    def __init__(self, content: Bytes | None = None) -> None:
        super().__init__(content)
        self.freed = threading.Event()

    def free(self) -> None:
        super().free()
        self.freed.set()


def test_a_read_and_its_release(holder: SocketTransfer, reader: SocketTransfer):
    state = Waiting(Bytes(*[bytes([number]) * 100_000 for number in range(6)]))
    handle = holder.hold(state)
    sink = Bytes(chunk_bytes=100_000, count=6)
    future = reader.read(handle, READ, sink)
    future.result()
    assert sink.chunks == state.content.chunks
    assert sink.finished
    assert not state.freed.is_set()
    reader.release(handle)
    state.freed.wait()
    assert len(holder.holds) == 0


def test_nothing_is_left_in_the_file_system(holder: SocketTransfer, reader: SocketTransfer):
    before = set(os.listdir("/dev/shm"))
    future = reader.read(holder.hold(Held()), READ, Bytes(chunk_bytes=4, count=2))
    future.result()
    assert set(os.listdir("/dev/shm")) <= before


def test_only_its_own_handle_is_taken_back(holder: SocketTransfer, reader: SocketTransfer):
    state, endings = Held(), []
    handle = holder.hold(state)
    holder.holds.watch(handle.hold, endings.append)
    assert reader.take_back(handle) is None
    assert holder.take_back(handle) is state
    holder.release(handle)
    assert (state.num_freed, endings) == (0, [TAKEN])
    with pytest.raises(RequestFailedError, match="nothing is held under this id"):
        holder.take_back(handle)


def test_reads_that_cannot_be(holder: SocketTransfer, reader: SocketTransfer):
    handle = holder.hold(Held())
    source = handle.source
    unknown = Handle(source, "nothing")
    foreign = Handle(msgspec.structs.replace(source, token="guessed"), handle.hold)
    for wrong, size, said in (
        (unknown, 4, "nothing is held"),
        (foreign, 4, "token"),
        (handle, 8, "wanted are 2 chunks of 8 bytes"),
    ):
        assert len(holder.holds) == 1
        future = reader.read(wrong, READ, Bytes(chunk_bytes=size, count=2))
        assert said in str(future.exception())


def test_a_holder_that_has_ended(holder: SocketTransfer, reader: SocketTransfer):
    state = Held()
    handle = holder.hold(state)
    holder.close()
    assert state.num_freed == 1
    future = reader.read(handle, READ, Bytes(chunk_bytes=4, count=2))
    assert isinstance(future.exception(), RequestFailedError)
    assert "cannot be read" in str(future.exception())
    reader.release(handle)  # says nothing, since nobody is there


def test_a_reader_that_breaks_off_has_dropped_it():
    # More than the system keeps for a connection, so that the holder notices.
    content = Bytes(*[bytes(4_000_000)] * 2)
    with closing(create_transfer("tcp", "127.0.0.1")) as holder:
        state = Waiting(content)
        handle = holder.hold(state)
        with channel_of(handle.source).connect(handle.source) as connection:
            connection.sendall(frames.encoded(frames.Read(handle.source.token, handle.hold, READ)))
            assert isinstance(frames.receive_answer(connection), frames.Header)
        state.freed.wait()


def test_who_watches_hears_how_it_ended(holder: SocketTransfer):
    handle = holder.hold(Held())
    call = frames.Watch(handle.source.token, handle.hold)
    ending = Ending(Reason.DROPPED, "the request was cancelled")
    with channel_of(handle.source).connect(handle.source) as connection:
        connection.sendall(frames.encoded(call))
        client.release(handle, ending)
        assert frames.receive_answer(connection) == frames.Ended(ending)


@pytest.mark.parametrize("sent", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02no"])
def test_bytes_that_are_no_call(holder: SocketTransfer, sent: bytes):
    source = holder.source
    with channel_of(source).connect(source) as connection:
        connection.sendall(sent)
        assert isinstance(frames.receive_answer(connection), frames.Refused)


def test_a_call_in_pieces(holder: SocketTransfer):
    handle = holder.hold(Held())
    call = frames.encoded(frames.Release(handle.source.token, handle.hold, Ending(Reason.TAKEN)))
    with channel_of(handle.source).connect(handle.source) as connection:
        for byte in call:
            connection.sendall(bytes([byte]))
        assert frames.receive_answer(connection) == frames.Ended(Ending(Reason.TAKEN))


def test_a_close_waits_for_nobody_who_says_nothing(holder: SocketTransfer):
    source = holder.source
    with channel_of(source).connect(source) as connection:
        holder.close()
        assert connection.recv(1) == b""


def test_where_there_is_nothing():
    with pytest.raises(ConfigurationError, match="transfer='pigeon'"):
        create_transfer("pigeon")
    with (
        closing(create_transfer("tcp", "203.0.113.1")) as one,
        pytest.raises(ConfigurationError, match="transfer_host"),
    ):
        _ = one.source
    elsewhere = Handle(Source("shm", "no-such-socket", 0, "t"), "h")
    with pytest.raises(RequestFailedError, match="transfer=tcp"):
        client.read(elsewhere, READ, Bytes(chunk_bytes=4, count=2))
    with pytest.raises(RequestFailedError, match="'smoke'"):
        client.release(Handle(Source("smoke", "", 0, "t"), "h"))


def test_a_holder_that_stops_in_the_middle():
    """Half of a header, and then nothing: the read fails instead of waiting for ever."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        source = Source("tcp", "127.0.0.1", listener.getsockname()[1], "t")

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"\x00\x00")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RequestFailedError, match="closed the connection"):
            client.read(Handle(source, "h"), READ, Bytes(chunk_bytes=4, count=2))
        thread.join()
