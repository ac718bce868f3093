"""What nothing that leaves the process can beat: copying the payload, waking another process with
one byte and being woken, both together; and what processes of their own reach without any engine.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import platform
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
from command_loop import Message, answer_commands  # type: ignore[import-not-found]

from phalanx.bench.busy_loop import burn

NUM_BURNERS = 2


def echo(sock: socket.socket) -> None:
    """Send back each byte until the other end is closed."""
    while byte := sock.recv(1):
        sock.send(byte)


def take_over(sock: socket.socket) -> None:
    """Map each shared file that is sent, then copy all of it out whenever told by a byte."""
    shared, target = np.empty(0, np.uint8), np.empty(0, np.uint8)
    while True:
        byte, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
        if not byte:
            return
        if descriptors:
            shared = _mapped(descriptors[0])
            target = np.zeros_like(shared)
        else:
            np.copyto(target, shared)
        sock.send(byte)


def compute(connection: Connection) -> None:
    """Run so many steps whenever told, until the other end is closed."""
    while (told := connection.recv()) is not None:
        count, num_iterations = told
        for _ in range(count):
            burn(num_iterations)
        connection.send(None)


class Floor:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._echo, echoing = socket.socketpair()
        self._taker, taking = socket.socketpair()
        self._connections = []
        self._processes = [
            context.Process(target=echo, args=(echoing,)),
            context.Process(target=take_over, args=(taking,)),
        ]
        for _ in range(NUM_BURNERS):
            ours, end = context.Pipe()
            self._connections.append(ours)
            self._processes.append(context.Process(target=compute, args=(end,)))
        for process in self._processes:
            process.start()
        echoing.close()
        taking.close()

    def describe(self) -> str:
        return f"plain copies and processes, numpy {np.__version__}, {platform.python_version()}"

    def copies(self, num_bytes: int, count: int) -> list[float]:
        """Seconds of copying an array into one that was written before."""
        source = np.ones(num_bytes, np.uint8)
        target = np.zeros_like(source)
        return [_timed(lambda: np.copyto(target, source)) for _ in range(count)]

    def handovers(self, num_bytes: int, count: int) -> list[float]:
        """Seconds of copying an array into shared memory, from where another process copies it
        into memory of its own and then says so.
        """
        source = np.ones(num_bytes, np.uint8)
        descriptor = os.memfd_create("phalanx-bench")
        os.truncate(descriptor, num_bytes)
        socket.send_fds(self._taker, [b"x"], [descriptor])
        shared = _mapped(descriptor)
        self._taker.recv(1)

        def once() -> None:
            np.copyto(shared, source)
            self._taker.send(b"x")
            self._taker.recv(1)

        once()
        return [_timed(once) for _ in range(count)]

    def ping_pongs(self, count: int) -> list[float]:
        """Seconds from sending a byte to having it back."""

        def once() -> None:
            self._echo.send(b"x")
            self._echo.recv(1)

        return [_timed(once) for _ in range(count)]

    def steps(self, num_processes: int, count: int, num_iterations: int) -> float:
        """Seconds in which that many processes run `count` steps each."""
        chosen = self._connections[:num_processes]
        began_s = time.perf_counter()
        for connection in chosen:
            connection.send((count, num_iterations))
        for connection in chosen:
            connection.recv()
        return time.perf_counter() - began_s

    def close(self) -> None:
        self._echo.close()
        self._taker.close()
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join()


def _mapped(descriptor: int) -> npt.NDArray[np.uint8]:
    """All of a file's memory; closes the descriptor."""
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    os.close(descriptor)
    return np.frombuffer(memory, np.uint8)


def _timed(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def start(message: Message) -> Floor:
    return Floor()


def copies(floor: Floor, message: Message) -> Message:
    return {"times_s": floor.copies(message["num_bytes"], message["count"])}


def handovers(floor: Floor, message: Message) -> Message:
    return {"times_s": floor.handovers(message["num_bytes"], message["count"])}


def ping_pongs(floor: Floor, message: Message) -> Message:
    return {"times_s": floor.ping_pongs(message["count"])}


def steps(floor: Floor, message: Message) -> Message:
    asked = message["num_replicas"], message["count"], message["num_iterations"]
    return {"seconds": floor.steps(*asked)}


if __name__ == "__main__":
    commands = {"copies": copies, "handovers": handovers, "ping_pongs": ping_pongs, "steps": steps}
    answer_commands(start, commands)
