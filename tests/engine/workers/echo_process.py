"""Processes for the transport's tests, which import no torch unless a tensor comes."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import select
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection

from phalanx.engine.workers.channel import ParentChannel, ReplicaLink, connect, open_replica
from phalanx.engine.workers.messages import Start, Stopped
from tests.engine.workers.descriptors import num_memory_files


def echo(endpoint: socket.socket) -> None:
    """Answer each request with itself, until told to stop or the parent is gone."""
    channel = connect(endpoint)
    while (got := channel.receive()) is not None:
        command, request = got
        if not isinstance(command, Start):
            channel.send(Stopped())
            return
        channel.send_events([(command.number, request)], None, None)


def double(endpoint: socket.socket) -> None:
    """Double each tensor in place, and answer with a new one of the same values.

    Each answer is kept until the next request, as a tensor on a device must be.
    """
    channel = connect(endpoint)
    while (got := channel.receive()) is not None:
        command, tensor = got
        answer = tensor.mul_(2).clone()
        float(answer.sum())  # a device has then done all of it
        channel.send_events([(command.number, answer)], None, None)
    del answer


def add_up(endpoint: socket.socket) -> None:
    """Answer each tensor with its sum."""
    channel = connect(endpoint)
    while (got := channel.receive()) is not None:
        command, tensor = got
        channel.send_events([(command.number, float(tensor.sum()))], None, None)


def mourn(endpoint: socket.socket, witness: Connection) -> None:
    """Echo until the parent is gone, then tell the witness what is still open."""
    channel = connect(endpoint)
    before = num_memory_files()
    # The parent may be killed before it is answered.
    with contextlib.suppress(BrokenPipeError):
        while (got := channel.receive()) is not None:
            channel.send_events([(got[0].number, got[1])], None, None)
    got = None
    channel.close()
    del channel
    witness.send((before, num_memory_files()))


def be_killed(witness: Connection) -> None:
    """A parent that uses a worker, tells both ids and then waits for its end."""
    link = open_replica(1)
    process = mp.get_context("spawn").Process(target=mourn, args=(link.endpoints[0], witness))
    process.start()
    link.endpoints[0].close()
    link.sender.submit(1, "a", bytes(3_000_000))
    next_replies(link.channels[0])
    link.sender.submit(2, "b", bytes(100_000))
    witness.send((os.getpid(), process.pid))
    process.join()


def next_replies(channel: ParentChannel) -> list:
    """Wait until something has come, and take all of it."""
    select.select([channel], [], [])
    return list(channel.receive_all())


@contextlib.contextmanager
def replica(num_ranks: int, target=echo) -> Iterator[tuple[ReplicaLink, list]]:
    """Ranks in processes of their own, killed at the end."""
    link = open_replica(num_ranks, 16 << 20)
    context = mp.get_context("spawn")
    processes = [context.Process(target=target, args=(end,)) for end in link.endpoints]
    try:
        for process, endpoint in zip(processes, link.endpoints, strict=True):
            process.start()
            endpoint.close()
        yield link, processes
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        link.sender.close()
        for channel in link.channels:
            channel.close()
