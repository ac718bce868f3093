"""Connections between the machines of a replica that spans several: the head passes on to the others
what it gives to its own ranks, in the same order, which is what keeps all ranks in step.

A message is a pickle behind its length. Neither side takes anything from the other before both have
proved that they have the replica's key.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import msgspec

from phalanx import __version__
from phalanx.clock import Clock
from phalanx.engine.workers.node_key import StrangerError, admit, introduce
from phalanx.engine.workers.node_stream import framed, received
from phalanx.errors import EngineUnavailableError
from phalanx.schema.control import ControlOp, Question

logger = logging.getLogger(__name__)

_MAX_GREETING = 1 << 16
_GREETING_S = 5.0
_RETRY_S = 0.2
_ATTEMPT_S = 5.0


class Greeting(msgspec.Struct, frozen=True):
    """What a follower says first. `replica` describes what it is about to run; `settings` are what
    all machines form their steps by.
    """

    node_rank: int
    version: str
    replica: str
    settings: dict[str, str] = {}


class Welcome(msgspec.Struct, frozen=True):
    """Where all ranks meet, or why this follower is not wanted."""

    port: int = 0
    refusal: str = ""


@dataclass(frozen=True)
class Submitted:
    """A request for every rank."""

    number: int
    rid: str
    request: Any


@dataclass(frozen=True)
class Applied:
    """An operation for every rank."""

    number: int
    op: ControlOp | Question


@dataclass(frozen=True)
class Ended:
    """The head closes."""


Message = Submitted | Applied | Ended


class NodeListener:
    """The head's, before the others have come. `key` is what they have to know."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        """Raises `EngineUnavailableError` where it cannot listen there."""
        self._key = key
        self._stranger = ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise EngineUnavailableError(
                f"the head of a replica cannot listen at {host}:{port}: {error.strerror}; choose"
                " another --dist-init-addr, an address of this machine"
            ) from error

    def accept(
        self, expected: Greeting, num_nodes: int, port: int, timeout_s: float, clock: Clock
    ) -> Mapping[int, socket.socket]:
        """Wait for every other machine and welcome it; connections by their ranks.

        Raises `EngineUnavailableError` where they have not all come in time, or after `close`.
        """
        due_s = clock.monotonic_s() + timeout_s
        links: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as undo:
            while len(links) < num_nodes - 1:
                try:
                    self._listener.settimeout(max(0.001, due_s - clock.monotonic_s()))
                    link, peer = self._listener.accept()
                except OSError as error:
                    raise EngineUnavailableError(
                        f"only {len(links) + 1} of the replica's {num_nodes} machines have come"
                        f" within {timeout_s:g} s; start the others with the same --dist-init-addr"
                        f"{self._stranger}"
                    ) from error
                undo.callback(link.close)
                rank = None
                if self._admitted(link, peer[0]):
                    rank = _welcomed(link, expected, num_nodes, port, links)
                if rank is None:
                    link.close()
                else:
                    links[rank] = link
            undo.pop_all()
        return links

    def _admitted(self, link: socket.socket, peer: str) -> bool:
        link.settimeout(_GREETING_S)
        try:
            admit(link, self._key)
        except (StrangerError, OSError) as error:
            self._stranger = f"; {peer} came and was not let in: {error}"
            logger.warning("%s is not let into this replica: %s", peer, error)
            return False
        return True

    def close(self) -> None:
        """From any thread: `accept` waits no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class NodeRelay:
    """The head's connections to the other machines. A close waits `patience_s` for one that reads
    no more.
    """

    def __init__(self, links: Mapping[int, socket.socket], patience_s: float) -> None:
        self._links = dict(links)
        self._patience_s = patience_s
        self._closing = False
        self._queues: dict[int, SimpleQueue[bytes | None]] = {rank: SimpleQueue() for rank in links}
        self._senders = {rank: _started(rank, self._send, rank) for rank in links}
        self._watchers: list[threading.Thread] = []

    def watch(self, lost: Callable[[int], None]) -> None:
        """Tell `lost` of one that ends, also of one that has ended before this."""
        self._watchers += [_started(rank, self._watch, rank, lost) for rank in self._links]

    def send(self, message: Message) -> None:
        """Never waits; whoever calls this from several threads sees to the order."""
        packet = framed(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        for queue in self._queues.values():
            queue.put(packet)

    def close(self) -> None:
        """Tell the others that it is over."""
        if self._closing:
            return
        self._closing = True
        self.send(Ended())
        for queue in self._queues.values():
            queue.put(None)
        for rank, sender in self._senders.items():
            sender.join(self._patience_s)
            _shut_down(self._links[rank])
        for thread in (*self._senders.values(), *self._watchers):
            if thread is not threading.current_thread():
                thread.join()
        for link in self._links.values():
            link.close()

    def _send(self, rank: int) -> None:
        link, queue = self._links[rank], self._queues[rank]
        with contextlib.suppress(OSError):  # whoever watches it tells
            while (packet := queue.get()) is not None:
                link.sendall(packet)
        _shut_down(link)

    def _watch(self, rank: int, lost: Callable[[int], None]) -> None:
        """Followers say nothing: what comes is the end."""
        with contextlib.suppress(OSError):
            self._links[rank].recv(1)
        if not self._closing:
            lost(rank)


class NodeLink:
    """A follower's connection to its head, which has to know `key`. `meet` comes before `receive`."""

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        greeting: Greeting,
        timeout_s: float,
        clock: Clock,
    ) -> None:
        self._address = address
        self._key = key
        self._head = f"the head at {address[0]}:{address[1]}"
        self._greeting = greeting
        self._timeout_s = timeout_s
        self._clock = clock
        self._interrupted = threading.Event()
        self._link: socket.socket | None = None

    def meet(self) -> int:
        """Wait for the head, which may still be starting; the port at which all ranks meet. Raises
        `EngineUnavailableError`, also after `interrupt`.
        """
        link = self._link = self._connected()
        try:
            return self._welcome(link)
        except EngineUnavailableError:
            link.close()
            raise

    def receive(self) -> Message | None:
        """What comes next; None where the head is gone, or after `interrupt`."""
        assert self._link is not None
        try:
            packet = received(self._link)
        except OSError:
            return None
        if packet is None:
            return None
        message: Message = pickle.loads(packet)
        return message

    def interrupt(self) -> None:
        """From any thread, and from a signal's handler: nothing here waits any more."""
        self._interrupted.set()
        if self._link is not None:
            _shut_down(self._link)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def _welcome(self, link: socket.socket) -> int:
        try:
            link.settimeout(self._timeout_s)
            if self._interrupted.is_set():  # before there was a connection to shut down
                _shut_down(link)
            introduce(link, self._key, self._head)
            link.sendall(_packed(self._greeting))
            packet = received(link, _MAX_GREETING)
        except OSError:
            packet = None
        if packet is None:
            raise EngineUnavailableError(f"{self._head} has gone away")
        welcome = msgspec.msgpack.decode(packet, type=Welcome)
        if welcome.refusal:
            raise EngineUnavailableError(f"{self._head} refused this machine: {welcome.refusal}")
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return welcome.port

    def _connected(self) -> socket.socket:
        due_s = self._clock.monotonic_s() + self._timeout_s
        while True:
            reason: object = "it was interrupted"
            if not self._interrupted.is_set():
                try:
                    return socket.create_connection(self._address, timeout=_ATTEMPT_S)
                except OSError as error:
                    reason = error.strerror or error
            if self._interrupted.wait(_RETRY_S) or self._clock.monotonic_s() >= due_s:
                raise EngineUnavailableError(
                    f"no head answers at {self._address[0]}:{self._address[1]} within"
                    f" {self._timeout_s:g} s ({reason}); start it with --node-rank 0"
                )


def _welcomed(
    link: socket.socket,
    expected: Greeting,
    num_nodes: int,
    port: int,
    known: Mapping[int, socket.socket],
) -> int | None:
    """The rank of a follower that fits; None for anybody else, who is told why."""
    try:
        packet = received(link, _MAX_GREETING)
        if packet is None:
            return None
        greeting = msgspec.msgpack.decode(packet, type=Greeting)
        refusal = _refusal(greeting, expected, num_nodes, tuple(known))
        link.sendall(_packed(Welcome(port, refusal)))
    except (OSError, msgspec.MsgspecError):
        return None  # no follower of ours
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return None if refusal else greeting.node_rank


def _refusal(greeting: Greeting, expected: Greeting, num_nodes: int, known: Sequence[int]) -> str:
    if greeting.version != expected.version:
        return f"it has Phalanx {greeting.version}, and the head {__version__}"
    if greeting.replica != expected.replica:
        return f"it was started for {greeting.replica}, and the head for {expected.replica}"
    for name in sorted({*greeting.settings, *expected.settings}):
        theirs, ours = greeting.settings.get(name), expected.settings.get(name)
        if theirs != ours:
            return f"it was started with {name}={theirs}, and the head with {name}={ours}"
    if not 0 < greeting.node_rank < num_nodes or greeting.node_rank in known:
        return f"its --node-rank {greeting.node_rank} is another one's, or not below {num_nodes}"
    return ""


def _started(rank: int, act: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=act, args=arguments, name=f"phalanx-node-{rank}", daemon=True)
    thread.start()
    return thread


def _shut_down(link: socket.socket) -> None:
    """Whoever waits there waits no more."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def _packed(value: Greeting | Welcome) -> bytes:
    return framed(msgspec.msgpack.encode(value))
