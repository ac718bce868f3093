"""A pair of `multiprocessing.Queue`, shared by spawned workers."""

from __future__ import annotations

import multiprocessing
import platform
from itertools import count
from multiprocessing.queues import Queue
from typing import Any

from dispatch_protocol import Action, Observation, answer, serve  # type: ignore[import-not-found]


def work(requests: Queue[Any], replies: Queue[Any]) -> None:
    """Answer until told to end."""
    for number, observation in iter(requests.get, None):
        replies.put((number, answer(observation)))


class QueueTransport:
    def __init__(self, message: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._requests, self._replies = context.Queue(), context.Queue()
        self._workers = [
            context.Process(target=work, args=(self._requests, self._replies))
            for _ in range(message["workers"])
        ]
        for worker in self._workers:
            worker.start()
        self._numbers = count()
        self._arrived: dict[int, Any] = {}

    def describe(self) -> str:
        return f"two multiprocessing.Queue, Python {platform.python_version()}"

    def submit(self, observation: Observation) -> int:
        number = next(self._numbers)
        self._requests.put((number, observation))
        return number

    def result(self, pending: int) -> Action:
        while pending not in self._arrived:
            number, action = self._replies.get()
            self._arrived[number] = action
        return self._arrived.pop(pending)

    def close(self) -> None:
        for _ in self._workers:
            self._requests.put(None)
        for worker in self._workers:
            worker.join()


if __name__ == "__main__":
    serve(QueueTransport)
