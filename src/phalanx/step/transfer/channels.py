"""How connections are made and chunks go over them: a file in memory on one machine, or TCP."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
from typing import Protocol

from phalanx.errors import ConfigurationError
from phalanx.schema.handoff import Source
from phalanx.step.transfer.base import Content, Sink
from phalanx.step.transfer.deadline import Deadline
from phalanx.step.transfer.frames import receive_into

BACKLOG = 256
CONNECT_TIMEOUT_S = 5.0


class Channel(Protocol):
    """One way for bytes to travel."""

    def listen(self, token: str) -> tuple[socket.socket, Source]: ...

    def connect(self, source: Source) -> socket.socket: ...

    def send(self, connection: socket.socket, content: Content) -> None: ...

    def receive(self, connection: socket.socket, sink: Sink, deadline: Deadline) -> None: ...


class SharedMemory:
    """Chunks are written into a file that exists in memory only, and its descriptor is sent.

    The sockets have names without a file, so nothing is left behind whoever dies.
    """

    def listen(self, token: str) -> tuple[socket.socket, Source]:
        name = f"phalanx-kv-{os.getpid()}-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{name}")
        listener.listen(BACKLOG)
        return listener, Source("shm", name, 0, token)

    def connect(self, source: Source) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect(f"\0{source.host}")
        except OSError as error:
            connection.close()
            raise ConnectionError(
                f"{error.strerror or error}; the engine has ended, or it is on another machine and "
                "must be run with transfer=tcp"
            ) from error
        return connection

    def send(self, connection: socket.socket, content: Content) -> None:
        size = content.chunk_bytes
        descriptor = os.memfd_create("phalanx-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(1, size * content.num_chunks))
            with mmap.mmap(descriptor, 0) as memory:
                for index in range(content.num_chunks):
                    memory[index * size : (index + 1) * size] = content.chunk(index)
            socket.send_fds(connection, [b"m"], [descriptor])
        finally:
            os.close(descriptor)

    def receive(self, connection: socket.socket, sink: Sink, deadline: Deadline) -> None:
        size = sink.chunk_bytes
        deadline.limit(connection)
        data, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not data or not descriptors:
            raise ConnectionError("the other side closed the connection")
        try:
            if os.fstat(descriptors[0]).st_size < size * sink.num_chunks:
                raise ConnectionError("the memory that was sent is too small")
            memory = mmap.mmap(descriptors[0], 0, access=mmap.ACCESS_COPY)
            with memory, memoryview(memory) as view:
                for index in range(sink.num_chunks):
                    with view[index * size : (index + 1) * size] as chunk:
                        sink.write(index, chunk)
        finally:
            os.close(descriptors[0])


class Tcp:
    """Chunks follow one another on the connection. `host` is where a holder listens."""

    def __init__(self, host: str) -> None:
        self._host = host

    def listen(self, token: str) -> tuple[socket.socket, Source]:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((self._host, 0))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigurationError(
                f"cannot listen on transfer_host={self._host!r}: {error.strerror or error}; give "
                "an address of this machine"
            ) from error
        return listener, Source("tcp", self._host, listener.getsockname()[1], token)

    def connect(self, source: Source) -> socket.socket:
        connection = socket.create_connection((source.host, source.port), CONNECT_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def send(self, connection: socket.socket, content: Content) -> None:
        for index in range(content.num_chunks):
            connection.sendall(content.chunk(index))

    def receive(self, connection: socket.socket, sink: Sink, deadline: Deadline) -> None:
        buffer = memoryview(bytearray(sink.chunk_bytes))
        for index in range(sink.num_chunks):
            receive_into(connection, buffer, deadline)
            sink.write(index, buffer)


def channel_of(source: Source) -> Channel:
    """What reads at `source`."""
    if source.scheme == "shm":
        return SharedMemory()
    if source.scheme == "tcp":
        return Tcp(source.host)
    raise ConnectionError(f"scheme={source.scheme!r} is not known; there are shm and tcp")
