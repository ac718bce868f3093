"""A `step` where the computing is done elsewhere: submit, and wait for the outcome."""

from __future__ import annotations

from typing import Any

from phalanx.engine.executors.base import ReplicaExecutor
from phalanx.engine.requests import LiveRequest
from phalanx.engine.sinks import CallerSink


def submit_and_wait(
    executor: ReplicaExecutor, live: LiveRequest, sink: CallerSink, request: Any
) -> Any:
    """The complete output of a request, which is cancelled if its caller is interrupted."""
    try:
        executor.submit(live, request)
        return sink.future.result()
    finally:
        if not sink.future.done():
            executor.cancel(live)
