"""Packets over a socket pair that keeps their boundaries, each with the descriptors it mentions."""

from __future__ import annotations

import array
import errno
import os
import socket
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

MAX_PACKET_BYTES = 32 * 1024
MAX_DESCRIPTORS = 253
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)
# Plain numbers: each operation on an enumeration's member costs as much as a system call.
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_TRUNCATED = int(socket.MSG_CTRUNC)
# Stands for a packet that is too large for the socket and came as a file.
_IN_FILE = b"\xc1"  # no msgpack value begins with it

_TEMPORARY = frozenset(
    {
        errno.EAGAIN,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.ETOOMANYREFS,
    }
)


class Packet(NamedTuple):
    """`body` is valid until the next packet is received; the descriptors are the receiver's."""

    body: memoryview
    descriptors: list[int]


class UndecodablePacketError(Exception):
    """What the other side sent is not a message; `number` is the request's where it is known."""

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.number = number


def create_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; whoever dies, the other end reads to the end of what it sent."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Descriptor(Protocol):
    """Something that keeps a file open while it lives."""

    def fileno(self) -> int: ...


class MemoryFile:
    """A file in memory that holds chunks one after another; closed when nobody refers to it."""

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._descriptor = os.memfd_create("phalanx-payload", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def fileno(self) -> int:
        return self._descriptor


class PacketSocket:
    """One end. Whether `send` and `receive` wait is the socket's setting.

    `send` may be called from any thread, `receive` from one at a time.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray(MAX_PACKET_BYTES)
        self._view = memoryview(self._buffer)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, body: bytes, descriptors: Sequence[Descriptor] = ()) -> None:
        """Send all of a packet or, raising OSError, nothing."""
        if len(body) > MAX_PACKET_BYTES:
            descriptors = (*descriptors, MemoryFile([body]))
            body = _IN_FILE
        if descriptors:
            rights = array.array("i", [each.fileno() for each in descriptors])
            self._socket.sendmsg([body], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        else:
            self._socket.send(body)

    def receive(self) -> Packet | None:
        """The next packet, or None when the other side is gone and all that it sent was read.

        Raises BlockingIOError where nothing has come and the socket does not wait.
        """
        try:
            num_bytes, ancillary, flags, _ = self._socket.recvmsg_into(
                [self._view], _ANCILLARY_BYTES, _CLOSE_ON_EXEC
            )
        except ConnectionResetError:
            # The other side left packets of ours unread. Reported once; what it sent comes next.
            return self.receive()
        descriptors: list[int] = []
        for _level, _type, data in ancillary:
            descriptors += array.array("i", data)
        if flags & _TRUNCATED:
            close_all(descriptors)
            raise UndecodablePacketError(
                "a packet's file descriptors did not arrive: this process has too many open files"
            )
        if num_bytes == 0 and not descriptors:
            return None
        body = self._view[:num_bytes]
        if body == _IN_FILE and descriptors:
            body = memoryview(_read_file(descriptors.pop()))
        return Packet(body, descriptors)

    def close(self) -> None:
        self._socket.close()


def is_temporary(error: OSError) -> bool:
    """Whether a failed `send` may succeed later: the socket is full, or the system short of
    something.
    """
    return error.errno in _TEMPORARY


def close_all(descriptors: Sequence[int]) -> None:
    """Close each of them."""
    for descriptor in descriptors:
        os.close(descriptor)


def _read_file(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()
