"""Where one rank of one replica runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class WorkerPlacement:
    """One worker process of a deployment; immutable, and as good in another process.

    `worker_id` counts the workers of all replicas, `replica_rank` those of one. `device_index` is
    an index into the devices that the launching process sees. `group_ranks` has, by the name of
    each family of groups, the rank's position in its group. The output rank answers for its replica.
    """

    worker_id: int
    replica_id: int
    replica_rank: int
    node_rank: int
    device_index: int
    group_ranks: Mapping[str, int] = field(hash=False)
    is_output_rank: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_ranks", MappingProxyType(dict(self.group_ranks)))

    def __reduce__(self) -> tuple[type[WorkerPlacement], tuple[object, ...]]:
        return WorkerPlacement, (
            self.worker_id,
            self.replica_id,
            self.replica_rank,
            self.node_rank,
            self.device_index,
            dict(self.group_ranks),
            self.is_output_rank,
        )
