"""A `concurrent.futures.ProcessPoolExecutor` of spawned workers."""

from __future__ import annotations

import multiprocessing
import platform
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from dispatch_protocol import Action, Observation, answer, serve  # type: ignore[import-not-found]


class PoolTransport:
    def __init__(self, message: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(message["workers"], mp_context=context)

    def describe(self) -> str:
        return f"concurrent.futures.ProcessPoolExecutor, Python {platform.python_version()}"

    def submit(self, observation: Observation) -> Future[Any]:
        return self._pool.submit(answer, observation)

    def result(self, pending: Future[Any]) -> Action:
        return pending.result()

    def close(self) -> None:
        self._pool.shutdown()


if __name__ == "__main__":
    serve(PoolTransport)
