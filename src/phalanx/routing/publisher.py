"""The published snapshots of a pool of servers."""

from __future__ import annotations

from dataclasses import replace

from phalanx.routing.snapshot import Server, Snapshot
from phalanx.routing.snapshot_publisher import SnapshotPublisher


class Publisher(SnapshotPublisher[Snapshot, tuple[Server, ...]]):
    """One line of snapshots of servers, that of `epoch`."""

    def __init__(self, epoch: str) -> None:
        super().__init__(Snapshot(epoch), _with_servers)


def _with_servers(current: Snapshot, servers: tuple[Server, ...]) -> Snapshot:
    if servers == current.servers:
        return current
    return replace(current, revision=current.revision + 1, servers=servers)
