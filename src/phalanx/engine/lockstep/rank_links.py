"""Sockets between the leader of a replica and its other ranks, beside the collectives.

A rank that waits here for work may wait for ever, which a collective would not let it. A packet is
msgpack behind its length. The leader sends turns, the others acknowledge them.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Sequence

import msgspec

from phalanx.errors import PhalanxDistError

_LENGTH = struct.Struct("!I")
_TOKEN_BYTES = 16
_MAX_PACKET = 1 << 24


class StartStep(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Start the request of this number."""

    number: int


class CancelStep(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Cancel the request of this number."""

    number: int


class ControlStep(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Apply the operation of this number."""

    number: int


class CloseStep(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Leave the loop."""


Step = StartStep | CancelStep | ControlStep | CloseStep


class _Turn(msgspec.Struct, frozen=True, array_like=True):
    index: int
    steps: list[Step]


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a leader listens, and what its followers say first."""

    host: str
    port: int
    token: bytes


class LeaderListener:
    """The leader's end before the others have come; its `address` goes to them by a broadcast."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self.address = Address(
            host, self._listener.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES)
        )

    def accept(self, num_followers: int, timeout_s: float) -> LeaderLinks:
        """Wait for every other rank; whoever does not know the token is turned away."""
        links: dict[int, socket.socket] = {}
        with self._listener:
            while len(links) < num_followers:
                self._listener.settimeout(timeout_s)
                try:
                    link, _ = self._listener.accept()
                    link.settimeout(timeout_s)
                    greeting = _receive(link)
                except TimeoutError:
                    raise PhalanxDistError(
                        f"only {len(links)} of {num_followers} ranks reached the leader within "
                        f"{timeout_s:g} s"
                    ) from None
                if greeting is None or greeting[:-4] != self.address.token:
                    link.close()
                    continue
                link.settimeout(None)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                links[_LENGTH.unpack(greeting[-4:])[0]] = link
        return LeaderLinks(links)


class LeaderLinks:
    """Connections to the other ranks."""

    def __init__(self, links: dict[int, socket.socket]) -> None:
        self._links = links
        self._acknowledged = dict.fromkeys(links, 0)
        self._encoder = msgspec.msgpack.Encoder()

    def announce(self, index: int, steps: Sequence[Step]) -> None:
        """Say what belongs to turn `index`."""
        packet = self._encoder.encode(_Turn(index, list(steps)))
        packet = _LENGTH.pack(len(packet)) + packet
        for rank, link in self._links.items():
            try:
                link.sendall(packet)
            except OSError as error:
                raise _lost(rank) from error

    def await_turn(self, index: int) -> None:
        """Wait until every other rank has finished turn `index`."""
        for rank, link in self._links.items():
            while self._acknowledged[rank] < index:
                received = _receive(link)
                if received is None:
                    raise _lost(rank)
                self._acknowledged[rank] = _LENGTH.unpack(received)[0]

    def close(self) -> None:
        for link in self._links.values():
            link.close()


class FollowerLink:
    """One follower's connection to its leader."""

    def __init__(self, address: Address, rank: int, timeout_s: float) -> None:
        try:
            self._link = socket.create_connection((address.host, address.port), timeout=timeout_s)
        except OSError as error:
            raise PhalanxDistError(
                f"rank {rank} cannot reach its leader at {address.host}:{address.port}: {error}"
            ) from error
        self._link.settimeout(None)
        self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _send(self._link, address.token + _LENGTH.pack(rank))
        self._interrupted = False
        self._decoder = msgspec.msgpack.Decoder(_Turn)

    def next_turn(self) -> tuple[int, list[Step]] | None:
        """What the leader announces next; None where this rank is to close."""
        received = _receive(self._link)
        if received is None:
            if self._interrupted:
                return None
            raise PhalanxDistError("the leader of this replica is gone")
        turn = self._decoder.decode(received)
        return turn.index, turn.steps

    def acknowledge(self, index: int) -> None:
        """Turn `index` is finished here."""
        try:
            _send(self._link, _LENGTH.pack(index))
        except OSError as error:
            if not self._interrupted:
                raise PhalanxDistError("the leader of this replica is gone") from error

    def interrupt(self) -> None:
        """From any thread: `next_turn` returns None."""
        self._interrupted = True
        try:
            self._link.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is closed already

    def close(self) -> None:
        self._link.close()


def address_towards(host: str, port: int) -> str:
    """This machine's address as seen by whoever reaches `host`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        found: str = probe.getsockname()[0]
        return found


def _lost(rank: int) -> PhalanxDistError:
    return PhalanxDistError(f"rank {rank} of this replica is gone")


def _send(link: socket.socket, packet: bytes) -> None:
    link.sendall(_LENGTH.pack(len(packet)) + packet)


def _receive(link: socket.socket) -> bytes | None:
    """The next packet; None where the other end has closed."""
    try:
        length = _exactly(link, _LENGTH.size)
        if length is None:
            return None
        size = _LENGTH.unpack(length)[0]
        return _exactly(link, size) if size <= _MAX_PACKET else None
    except ConnectionError:
        return None


def _exactly(link: socket.socket, size: int) -> bytes | None:
    parts = b""
    while len(parts) < size:
        part = link.recv(size - len(parts))
        if not part:
            return None
        parts += part
    return parts
