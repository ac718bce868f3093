"""What runs inside a worker process, named by a string so that the parent need not import it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.engine.workers.messages import Command, Reply
from phalanx.errors import ConfigurationError
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import LoopStatistics


class WorkerChannel(Protocol):
    """A worker's end of the connection to its parent; `receive` is for one thread, `send` for any."""

    def receive(self) -> tuple[Command, Any] | None:
        """The next command with what came along, decoded: a request, or an operation's tensors; waits.

        Passes over requests that came too late for a shutdown; all ranks of a replica the same
        ones. None when the parent has closed its end.
        """
        ...

    def send(self, reply: Reply) -> None:
        """Send a message that carries no payload; waits where the parent reads slowly."""
        ...

    def send_events(
        self, events: list[tuple[int, Any]], execution_s: float | None, statistics: Any
    ) -> None:
        """Encode and send events; raises what pickling raises, and then nothing was sent."""
        ...


class DuringRequestError(Exception):
    """`cause` was raised while request `number` was executed or its result was sent."""

    def __init__(self, number: int, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__} during request number {number}")
        self.number = number
        self.cause = cause


class WorkerRuntime(Protocol):
    """One rank, loaded when it is built."""

    @property
    def limits(self) -> Limits: ...

    @property
    def statistics(self) -> LoopStatistics | None:
        """A batching plugin's newest counters."""
        ...

    def metadata(self) -> Mapping[str, str | int | dict[str, int]]:
        """Facts about this rank: plugin, ids, group ranks, replica world, device."""
        ...

    def serve(self, channel: WorkerChannel) -> None:
        """Execute commands until `Shutdown` or until the parent is gone.

        Raises to fail the group; `DuringRequestError` where one request is the reason.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class WorkerFactorySpec:
    """How a worker builds its runtime: `target` is `module:function`, called with `config`.

    `config` must be picklable.
    """

    target: str
    config: Any

    def resolve(self) -> Callable[[Any], WorkerRuntime]:
        """The function; imported in the worker."""
        module, _, name = self.target.partition(":")
        if not module or not name:
            raise ConfigurationError(
                f"worker factory {self.target!r} must be written as module:function"
            )
        factory: Any = importlib.import_module(module)
        for part in name.split("."):
            factory = getattr(factory, part)
        resolved: Callable[[Any], WorkerRuntime] = factory
        return resolved
