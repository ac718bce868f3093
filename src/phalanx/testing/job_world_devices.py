"""The devices of a job as they are, whatever anybody believes: who has memory on which, at this moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from phalanx.schema.job_placement import TRAINER
from phalanx.testing.role_fakes import FakeEngine


class FakeDevices:
    """`bundles` are those of each engine by role and engine id, and of the trainer under its name.

    `violations` has, in words, every moment at which two had memory of one device, or somebody had
    some without `has_lease`.
    """

    def __init__(
        self,
        bundles: Mapping[tuple[str, str], tuple[str, ...]],
        has_lease: Callable[[str], bool | None],
    ) -> None:
        self._bundles = bundles
        self._has_lease = has_lease
        self._engines: dict[FakeEngine, None] = {}
        self._trainers: dict[int, None] = {}
        self.violations: list[str] = []
        self.num_takes = 0

    def took(self, engine: FakeEngine) -> None:
        """An engine has taken memory."""
        self._engines[engine] = None
        self.num_takes += 1
        self.check()

    def trainer_took(self, pid: int) -> None:
        self._trainers[pid] = None
        self.num_takes += 1
        self.check()

    def trainer_gave(self, pid: int) -> None:
        self._trainers.pop(pid, None)

    def trainer_holds(self, pid: int | None = None) -> bool:
        """Whether this one has memory, or (none given) any of them."""
        return bool(self._trainers) if pid is None else pid in self._trainers

    @property
    def resident(self) -> tuple[FakeEngine, ...]:
        """The engines that have memory."""
        for engine in tuple(self._engines):
            if not (engine.is_up and engine.held):
                del self._engines[engine]
        return tuple(self._engines)

    def check(self) -> None:
        """Note what must not be."""
        holders: dict[str, str] = {}
        for name, role, its in self._residents():
            for bundle in its:
                if bundle in holders:
                    self._note(f"{name} and {holders[bundle]} have memory of {bundle}")
                holders[bundle] = name
            if self._has_lease(role) is False:
                self._note(f"{name} has memory without a lease")

    def _residents(self) -> Iterable[tuple[str, str, tuple[str, ...]]]:
        for engine in self.resident:
            role, engine_id = engine.launch.role, engine.launch.engine_id
            name = f"{role}:{engine_id} generation {engine.launch.generation} at {engine.url}"
            yield name, role, self._bundles[role, engine_id]
        for pid in self._trainers:
            yield f"trainer {pid}", TRAINER, self._bundles[TRAINER, TRAINER]

    def _note(self, words: str) -> None:
        if words not in self.violations:
            self.violations.append(words)
