"""The workers of one replica on this node, as those who send to them see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.engine.boundary import run_every
from phalanx.engine.workers.channel import open_replica
from phalanx.engine.workers.launch import Launch, WorkerProcess
from phalanx.engine.workers.messages import Apply, Cancel
from phalanx.engine.workers.packets import Descriptor
from phalanx.engine.workers.worker import Worker


class Replica:
    """Its connection is open when it is built; its workers run when `launch` has started them."""

    def __init__(self, launches: Sequence[Launch], arena_bytes: int | None) -> None:
        self.replica_id = launches[0].placement.replica_id
        self._launches = tuple(launches)
        self._link = open_replica(len(launches), arena_bytes)
        outputs = [rank for rank, each in enumerate(launches) if each.placement.is_output_rank]
        # The rank that answers may be on another node.
        self._output = outputs[0] if outputs else None

    def launch(self) -> Iterator[Worker]:
        """Start one worker after the other. Raises OSError where a process cannot be created."""
        for launch, channel, endpoint in zip(
            self._launches, self._link.channels, self._link.endpoints, strict=True
        ):
            with endpoint:
                process = WorkerProcess(launch, endpoint)
            yield Worker(launch.placement, process, channel)

    @property
    def wants_write(self) -> bool:
        """Whether something waits for a worker's socket to be writable."""
        return self._link.sender.wants_write

    def submit(self, number: int, rid: str, request: Any) -> int:
        """Send a request to every rank, in their order; returns the bytes of its payload."""
        return self._link.sender.submit(number, rid, request)

    def send(self, command: Cancel | Apply, descriptors: Sequence[Descriptor] = ()) -> None:
        """Send an operation to every rank, a cancel to the rank that answers, whose word it is."""
        for rank in range(len(self._launches)):
            if isinstance(command, Apply) or rank == self._output:
                self._link.sender.send(command, rank, descriptors)

    def shut_down(self, reason: str) -> None:
        """Tell every rank to leave, without the requests that none of them has begun."""
        self._link.sender.shut_down(reason)

    def close(self) -> None:
        """Drop the connection; whoever still sends is refused."""
        link = self._link
        run_every(
            [
                link.sender.close,
                *(channel.close for channel in link.channels),
                *(endpoint.close for endpoint in link.endpoints),
            ]
        )
