"""The connection between a parent and the workers of one replica.

A request is encoded and written once, into an arena that the replica's ranks share; each rank then
gets a packet. Every worker answers over its own socket and arena. The parent never waits for a
worker, and an end that dies is noticed at once, as the end of its packets.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from phalanx.engine.workers.arena import CUTOFF_OFFSET, ArenaReader, ArenaWriter, create_arena
from phalanx.engine.workers.cutoff import Cutoff, RankCutoff, map_words
from phalanx.engine.workers.messages import Apply, Cancel, Command, Events, Reply, Shutdown, Start
from phalanx.engine.workers.outbox import Outbox
from phalanx.engine.workers.packets import (
    Descriptor,
    Packet,
    PacketSocket,
    UndecodablePacketError,
    close_all,
    create_socket_pair,
)
from phalanx.engine.workers.payload import encode, encode_request
from phalanx.engine.workers.places import PayloadReader, PayloadWriter
from phalanx.errors import EngineOverloadedError, EngineUnavailableError, InvalidRequestError
from phalanx.heap import keep_freed_memory

__all__ = [
    "DEFAULT_ARENA_BYTES",
    "ParentChannel",
    "ReplicaLink",
    "ReplicaSender",
    "SocketWorkerChannel",
    "UndecodablePacketError",
    "connect",
    "open_replica",
]

M = TypeVar("M")

DEFAULT_ARENA_BYTES = 64 * 1024 * 1024


class ParentChannel:
    """The parent's end towards one worker. One thread receives and flushes."""

    def __init__(self, sock: socket.socket, replies: ArenaReader) -> None:
        sock.setblocking(False)
        self._socket = PacketSocket(sock)
        self._payloads: PayloadReader | None = PayloadReader(replies)
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self.outbox = Outbox(self._socket)
        self.ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether commands wait for the socket to be writable; then call `flush`."""
        return self.outbox.wants_write

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        self.outbox.flush()

    def receive_all(self) -> Iterator[tuple[Reply, list[tuple[int, Any]]]]:
        """Every message that has come, with its decoded events ([] for other than `Events`).

        Each is handed out before the next is looked for. Sets `ended` when the worker's end is
        closed and all that it sent was received. Raises `UndecodablePacketError` for what is not a
        message.
        """
        while not self.ended:
            try:
                packet = self._socket.receive()
            except BlockingIOError:
                return
            if packet is None:
                self.ended = True
            else:
                yield self._decode(packet)

    def _decode(self, packet: Packet) -> tuple[Reply, list[tuple[int, Any]]]:
        reply = _decode_message(self._decoder, packet)
        if not isinstance(reply, Events) or self._payloads is None:
            close_all(packet.descriptors)
            return reply, []
        try:
            return reply, self._payloads.take(reply.payload, packet.descriptors)
        except Exception as error:
            raise _undecodable("a worker's events", error) from error

    def close(self) -> None:
        """Drop what waits to be sent and let go of the socket; the worker sees its parent's end.

        What was received stays valid.
        """
        self.outbox.close()
        self.ended = True
        self._payloads = None
        self._socket.close()


class ReplicaSender:
    """Sends commands to the ranks of one replica; safe to use from any thread."""

    def __init__(
        self, requests: ArenaWriter, cutoff: Cutoff, channels: tuple[ParentChannel, ...]
    ) -> None:
        self._cutoff: Cutoff | None = cutoff
        self._outboxes = tuple(channel.outbox for channel in channels)
        self._payloads: PayloadWriter | None = PayloadWriter(requests)
        self._encoder = msgspec.msgpack.Encoder()
        # Held while a request is written and announced, so that every rank sees the same order.
        self._lock = threading.Lock()

    @property
    def wants_write(self) -> bool:
        """Whether commands wait for some rank's socket to be writable."""
        return any(outbox.wants_write for outbox in self._outboxes)

    def submit(self, number: int, rid: str, request: Any) -> int:
        """Send a request to every rank; returns the bytes of its payload.

        The request's arrays may change when this returns. Never waits for a worker. A request that
        cannot be pickled is an InvalidRequestError, and one for which shared memory or descriptors
        do not suffice an EngineOverloadedError; then no rank was sent anything.
        """
        encoded = encode_request(request, len(self._outboxes))
        with self._lock:
            if self._payloads is None:
                raise EngineUnavailableError("the connection to the workers is closed")
            try:
                ref, descriptors = self._payloads.place(encoded)
            except OSError as error:
                raise EngineOverloadedError(
                    f"a request of {encoded.num_bytes} bytes cannot be sent to its workers now: "
                    f"{error}; wait for others to complete, or give the system more shared memory "
                    "or open files (ulimit -n)"
                ) from error
            try:
                packet = self._encoder.encode(Start(number, rid, ref))
            except UnicodeEncodeError as error:
                raise InvalidRequestError(
                    f"rid {rid!r} is not valid Unicode: {error.reason}", field="rid"
                ) from error
            for outbox in self._outboxes:
                outbox.put(packet, descriptors)
        return encoded.num_bytes

    def send(
        self,
        command: Cancel | Apply | Shutdown,
        rank: int,
        descriptors: Sequence[Descriptor] = (),
    ) -> None:
        """Send a command to one rank, after what was submitted before; never waits."""
        self._outboxes[rank].put(self._encoder.encode(command), descriptors)

    def shut_down(self, reason: str) -> None:
        """Tell every rank to leave, without the requests that none of them has taken yet."""
        if self._cutoff is not None:
            self._cutoff.decide()
        for rank in range(len(self._outboxes)):
            self.send(Shutdown(reason), rank)

    def close(self) -> None:
        """Send no more requests; the channels are closed by themselves."""
        with self._lock:
            self._payloads = None
        self._cutoff = None


class SocketWorkerChannel:
    """A worker's end: the `WorkerChannel` of its runtime."""

    def __init__(
        self,
        sock: socket.socket,
        requests: PayloadReader,
        cutoff: RankCutoff,
        replies: ArenaWriter,
    ) -> None:
        self._socket = PacketSocket(sock)
        self._requests = requests
        self._cutoff = cutoff
        self._replies = PayloadWriter(replies)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._lock = threading.Lock()

    def receive(self) -> tuple[Command, Any] | None:
        """The next command with what came along, decoded: a request, or an operation's tensors; waits.

        Passes over requests that came too late for a shutdown. None when the parent has closed its
        end. Raises `UndecodablePacketError`, with the request's number where only its payload
        cannot be decoded.
        """
        while True:
            self._cutoff.reach()
            packet = self._socket.receive()
            if packet is None:
                return None
            command = _decode_message(self._decoder, packet)
            if isinstance(command, Start) and self._cutoff.admits():
                return command, self._take(command, packet)
            if isinstance(command, Apply) and command.tensors is not None:
                return command, self._requests.take(command.tensors, packet.descriptors)
            close_all(packet.descriptors)
            if not isinstance(command, Start):
                return command, None

    def _take(self, command: Start, packet: Packet) -> Any:
        try:
            return self._requests.take(command.payload, packet.descriptors)
        except Exception as error:
            raise _undecodable(f"request {command.rid!r}", error, command.number) from error

    def send(self, reply: Reply) -> None:
        """Send a message that carries no payload; waits where the parent reads slowly.

        Raises BrokenPipeError where the parent is gone.
        """
        self._socket.send(self._encoder.encode(reply))

    def send_events(
        self, events: list[tuple[int, Any]], execution_s: float | None, statistics: Any
    ) -> None:
        """Encode and send events; raises what pickling raises, and then nothing was sent.

        Otherwise as `send`.
        """
        encoded = encode(events)
        with self._lock:
            ref, descriptors = self._replies.place(encoded)
            packet = self._encoder.encode(Events(ref, execution_s, statistics))
            self._socket.send(packet, descriptors)

    def close(self) -> None:
        """Close the socket, which the parent sees as this worker's end; no other call may run."""
        self._socket.close()


class ReplicaLink(NamedTuple):
    """Both sides of the connection to one replica; channels and endpoints by replica rank.

    Each endpoint goes to its worker's process, which calls `connect` with it. The parent closes it
    when the process has started, else it would never see the worker's end.
    """

    sender: ReplicaSender
    channels: tuple[ParentChannel, ...]
    endpoints: tuple[socket.socket, ...]


def open_replica(num_ranks: int, arena_bytes: int | None = None) -> ReplicaLink:
    """The connection to a replica's workers.

    `arena_bytes` are those of each arena (default 64 MiB, taken only as far as payloads fill it);
    payloads that do not fit travel as files in memory.
    """
    arena_bytes = DEFAULT_ARENA_BYTES if arena_bytes is None else arena_bytes
    channels, endpoints = [], []
    with contextlib.ExitStack() as undo, create_arena(arena_bytes) as requests:
        for rank in range(num_ranks):
            with create_arena(arena_bytes) as replies:
                ours, theirs = create_socket_pair()
                endpoints.append(undo.enter_context(theirs))
                # The worker's first packet: which reader of how many, and the arenas themselves.
                first = bytes((rank, num_ranks))
                PacketSocket(undo.enter_context(ours)).send(first, (requests, replies))
                channels.append(ParentChannel(ours, ArenaReader(replies.fileno())))
        sender = ReplicaSender(
            ArenaWriter(requests.fileno(), num_ranks),
            Cutoff(map_words(requests.fileno(), CUTOFF_OFFSET), num_ranks),
            tuple(channels),
        )
        undo.pop_all()
    return ReplicaLink(sender, tuple(channels), tuple(endpoints))


def connect(endpoint: socket.socket) -> SocketWorkerChannel:
    """In the worker: its channel over the endpoint, which belongs to the channel from here on.

    Also lets the process keep memory that it frees. Raises EOFError where the parent is gone.
    """
    keep_freed_memory()
    endpoint.set_inheritable(False)
    endpoint.setblocking(True)
    packet = PacketSocket(endpoint).receive()
    if packet is None:
        raise EOFError("the parent closed the connection before this worker took it")
    requests, replies = packet.descriptors
    rank, num_ranks = packet.body
    try:
        return SocketWorkerChannel(
            endpoint,
            PayloadReader(ArenaReader(requests, rank), rank, borrows=num_ranks == 1),
            RankCutoff(map_words(requests, CUTOFF_OFFSET), rank),
            ArenaWriter(replies, 1),
        )
    finally:
        close_all(packet.descriptors)


def _decode_message(decoder: msgspec.msgpack.Decoder[M], packet: Packet) -> M:
    try:
        return decoder.decode(packet.body)
    except msgspec.DecodeError as error:
        close_all(packet.descriptors)
        raise UndecodablePacketError(
            f"a packet of {len(packet.body)} bytes is not a message: {error}"
        ) from error


def _undecodable(what: str, error: Exception, number: int | None = None) -> UndecodablePacketError:
    return UndecodablePacketError(
        f"{what} cannot be decoded: {type(error).__name__}: {error}", number
    )
