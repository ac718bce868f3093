"""Which devices of a cluster are taken in which phase, and the next free ones for an engine."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice

from phalanx.schema.job_placement import ClusterSpec


class Occupancy:
    """Devices are numbered over all nodes, in their order. Taking the first free ones of one kind of
    engine is one pass over them.
    """

    def __init__(self, cluster: ClusterSpec, phases: Sequence[str]) -> None:
        sizes = [node.num_devices for node in cluster.nodes]
        self._ends = list(accumulate(sizes))
        self._starts = [end - size for end, size in zip(self._ends, sizes, strict=True)]
        self.num_devices = cluster.num_devices
        self._taken = {phase: bytearray(self.num_devices) for phase in phases}

    def node_of(self, device: int) -> int:
        """The position of its node."""
        return bisect_right(self._starts, device) - 1

    def node(self, position: int) -> range:
        """The devices of a node."""
        return range(self._starts[position], self._ends[position])

    def is_free(self, phases: Sequence[str], devices: Sequence[int]) -> bool:
        return not any(self._taken[phase][device] for phase in phases for device in devices)

    def take(self, phases: Sequence[str], devices: Sequence[int]) -> None:
        """They are nobody else's in these phases."""
        for phase in phases:
            taken = self._taken[phase]
            for device in devices:
                taken[device] = 1

    def engines(
        self, phases: Sequence[str], size: int, count: int, num_nodes: int, *, tight: bool = False
    ) -> list[int] | None:
        """Free devices for `count` engines of `size`, engine by engine in their order; None where
        there are not so many. An engine is on one node, or fills `num_nodes` of them. The first free
        ones are taken or, with `tight`, those in the smallest gaps.
        """
        places = (
            self._inside(phases, size, tight)
            if num_nodes == 1
            else self._whole(phases, size, num_nodes)
        )
        engines = sorted(islice(places, count), key=lambda devices: devices[0])
        return list(chain.from_iterable(engines)) if len(engines) == count else None

    def anywhere(self, phases: Sequence[str], count: int) -> list[int] | None:
        """Free devices together on one node where that can be, else the first ones that are free."""
        together = self.engines(phases, count, 1, 1)
        if together is not None:
            return together
        free = [device for start, end in self._runs(phases) for device in range(start, end)]
        return free[:count] if len(free) >= count else None

    def _inside(self, phases: Sequence[str], size: int, tight: bool) -> Iterator[range]:
        runs: Iterable[tuple[int, int]] = self._runs(phases)
        if tight:
            runs = sorted(runs, key=lambda run: run[1] - run[0])
        for start, end in runs:
            for first in range(start, end - size + 1, size):
                yield range(first, first + size)

    def _whole(self, phases: Sequence[str], size: int, num_nodes: int) -> Iterator[Sequence[int]]:
        engine: list[int] = []
        for start, end in self._runs(phases):
            whole = self.node(self.node_of(start))
            if (start, end) == (whole.start, whole.stop) and len(whole) * num_nodes == size:
                engine += whole
            if len(engine) == size:
                yield engine
                engine = []

    def _runs(self, phases: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Neighbouring free devices of one node, from the first to behind the last."""
        blocked = self._blocked(phases)
        position = blocked.find(0)
        while position >= 0:
            node_end = self._ends[self.node_of(position)]
            end = blocked.find(1, position, node_end)
            end = node_end if end < 0 else end
            yield position, end
            position = blocked.find(0, end)

    def _blocked(self, phases: Sequence[str]) -> bytes:
        either = 0
        for phase in phases:
            either |= int.from_bytes(self._taken[phase], "little")
        return either.to_bytes(self.num_devices, "little")
