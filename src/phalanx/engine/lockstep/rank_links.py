"""Sockets between the leader of a replica and its other ranks, beside the collectives.

A rank that waits here for work may wait for ever, which a collective would not let it. A packet is
msgpack behind its length. The leader sends turns, the others acknowledge them.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from phalanx.clock import Clock
from phalanx.errors import PhalanxDistError

_LENGTH = struct.Struct("!I")
_TOKEN_BYTES = 16
_GREETING_BYTES = _TOKEN_BYTES + _LENGTH.size
GREETING_S = 5.0
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
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        port: int = self._listener.getsockname()[1]
        self.address = Address(host, port, secrets.token_bytes(_TOKEN_BYTES))

    def accept(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        clock: Clock,
        *,
        greeting_s: float = GREETING_S,
    ) -> LeaderLinks:
        """Wait for these ranks; whoever does not know the token, or is silent for `greeting_s`, is
        turned away.

        Raises `PhalanxDistError` where they have not all come within `timeout_s`.
        """
        due_s = clock.monotonic_s() + timeout_s
        links: dict[int, socket.socket] = {}
        with self._listener, ExitStack() as undo:
            while len(links) < len(ranks):
                left_s = due_s - clock.monotonic_s()
                link = self._next(left_s) if left_s > 0 else None
                if link is None:
                    raise PhalanxDistError(
                        f"only {len(links)} of {len(ranks)} ranks reached the leader within "
                        f"{timeout_s:g} s"
                    )
                undo.callback(link.close)
                # A silent stranger keeps the others waiting for a moment only.
                link.settimeout(min(left_s, greeting_s))
                rank = self._greeted(link)
                if rank is None or rank not in ranks or rank in links:
                    link.close()
                else:
                    _keep_alive(link)
                    links[rank] = link
            undo.pop_all()
        return LeaderLinks(links)

    def _next(self, timeout_s: float) -> socket.socket | None:
        self._listener.settimeout(timeout_s)
        try:
            return self._listener.accept()[0]
        except TimeoutError:
            return None

    def _greeted(self, link: socket.socket) -> int | None:
        """The rank that says the token; None for anybody else."""
        greeting = _receive(link, _GREETING_BYTES)
        if greeting is None or len(greeting) != _GREETING_BYTES:
            return None
        if not secrets.compare_digest(greeting[:_TOKEN_BYTES], self.address.token):
            return None
        rank: int = _LENGTH.unpack(greeting[_TOKEN_BYTES:])[0]
        return rank


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

    def interrupt(self) -> None:
        """From any thread: nobody is waited for any more."""
        for link in self._links.values():
            _shut_down(link)

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
        _keep_alive(self._link)
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
        _shut_down(self._link)

    def close(self) -> None:
        self._link.close()


def address_towards(host: str, port: int) -> str:
    """This machine's address as seen by whoever reaches `host`; nothing is sent."""
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            found: str = probe.getsockname()[0]
    except OSError as error:
        raise PhalanxDistError(
            f"no way leads from here to {host!r}, where ranks meet: {error}"
        ) from error
    return found


def _keep_alive(link: socket.socket) -> None:
    """Wait for ever from here on, but notice a machine that is gone."""
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        option = getattr(socket, name, None)  # not every system has them
        if option is not None:
            link.setsockopt(socket.IPPROTO_TCP, option, value)


def _shut_down(link: socket.socket) -> None:
    try:
        link.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is closed already


def _lost(rank: int) -> PhalanxDistError:
    return PhalanxDistError(f"rank {rank} of this replica is gone")


def _send(link: socket.socket, packet: bytes) -> None:
    link.sendall(_LENGTH.pack(len(packet)) + packet)


def _receive(link: socket.socket, limit: int = _MAX_PACKET) -> bytes | None:
    """The next packet; None where the other end has closed, is lost, or sends a larger one."""
    try:
        length = _exactly(link, _LENGTH.size)
        if length is None:
            return None
        size = _LENGTH.unpack(length)[0]
        return _exactly(link, size) if size <= limit else None
    except OSError:
        return None


def _exactly(link: socket.socket, size: int) -> bytes | None:
    parts = b""
    while len(parts) < size:
        part = link.recv(size - len(parts))
        if not part:
            return None
        parts += part
    return parts
