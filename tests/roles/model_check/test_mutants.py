"""Broken parts in the place of real ones: what the model check would say, were the code like that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import pytest

from phalanx.distill import MemoryStore, Stage
from phalanx.roles.coordination.tenants import RoleTenant
from phalanx.testing.job_world import WorldParts
from phalanx.testing.job_world_faults import WorldFault
from phalanx.wire.phases import Holding
from tests.roles.model_check.living import SMALL, Case, live


class HopefulTenant(RoleTenant):
    """Takes what nobody knows for nothing: the lease is given up too early."""

    def holding(self) -> Holding:
        held = super().holding()
        return Holding.NOTHING if held is Holding.UNKNOWN else held


class HastyTenant(RoleTenant):
    """Does not wait until memory is given back."""

    def __init__(self, manager) -> None:
        super().__init__(manager)
        self._going: asyncio.Task | None = None

    def holding(self) -> Holding:
        is_going = self._going is not None and not self._going.done()
        return Holding.NOTHING if is_going else super().holding()

    async def deactivate(self) -> None:
        self._going = asyncio.create_task(super().deactivate())


class EagerTenant(RoleTenant):
    """Does not wait until it serves."""

    async def activate(self) -> None:
        self._activation = asyncio.create_task(super().activate())
        await asyncio.sleep(0)


@dataclass
class Journal:
    """As the one inside."""

    inner: object

    @property
    def where(self) -> str:
        return self.inner.where

    def read(self):
        return self.inner.read()

    def begin(self, remembered) -> None:
        self.inner.begin(remembered)

    def write(self, state, operation=None, *, sync=True) -> None:
        self.inner.write(state, operation, sync=sync)

    def close(self) -> None:
        self.inner.close()


class TrainerlessJournal(Journal):
    def write(self, state, operation=None, *, sync=True) -> None:
        super().write(msgspec.structs.replace(state, trainer=None), operation)


class LateJournal(Journal):
    """Writes a line when the next one comes: after it was answered by it, instead of before."""

    last: tuple = ()

    def write(self, state, operation=None, *, sync=True) -> None:
        if self.last:
            super().write(*self.last)
        self.last = (state, operation)


class OperationlessJournal(Journal):
    def write(self, state, operation=None, *, sync=True) -> None:
        super().write(state)


@dataclass
class RashProcesses:
    """Says of each that it has ended."""

    inner: object

    def started(self, pid: int) -> str | None:
        return self.inner.started(pid)

    def watch(self, pid: int, ended: Callable[[], None]) -> Callable[[], None]:
        return asyncio.get_running_loop().call_later(15.0, ended).cancel


class TwiceStore(MemoryStore):
    """Publishes whenever it is asked."""

    def publish(self, batch_id: str) -> bool:
        super().publish(batch_id)
        return True


class LossyStore(MemoryStore):
    """Loses what the teacher has said of the last sample."""

    def load(self, batch_id: str):
        stored = super().load(batch_id)
        if stored is None or stored.stage is not Stage.PUBLISHED:
            return stored
        *others, last = stored.samples
        return msgspec.structs.replace(
            stored, samples=(*others, msgspec.structs.replace(last, scores=None))
        )


@dataclass(frozen=True)
class Mutant:
    """Caught with `fault` at one of the calls of `point`, or (None) without any."""

    words: str
    point: str | None = None
    fault: WorldFault = WorldFault.LOST
    parts: WorldParts = WorldParts()  # noqa: RUF009 - it is frozen
    store: type[MemoryStore] = MemoryStore
    says: bool = True
    meddling: tuple = ()

    def case(self, faults) -> Case:
        return Case(
            replace(SMALL, says=self.says),
            faults,
            self.meddling,
            parts=self.parts,
            store=self.store(),
        )

    def real(self) -> Mutant:
        return replace(self, parts=WorldParts(), store=MemoryStore)

    def scripts(self) -> list:
        if self.point is None:
            return [()]
        points = live(self.case(())).world.script.points
        return [((at, self.fault),) for at, point in enumerate(points) if point == self.point]


RECOVER = (0.0, "POST", "/v1/phases/recover", {"operation_id": "o"})
LEAVE = (60.0, "POST", "/v1/phases/leave", {"operation_id": "o"})
MUTANTS = {
    "an uncertain role's lease is given up": Mutant(
        "have memory of n:0", "release", parts=WorldParts(tenant=HopefulTenant), says=False
    ),
    "memory that is being given back counts as given back": Mutant(
        "have memory of n:0", parts=WorldParts(tenant=HastyTenant)
    ),
    "a phase is shown before its roles serve": Mutant(
        "is shown, and", parts=WorldParts(tenant=EagerTenant)
    ),
    "the journal forgets who the trainer is": Mutant(
        "has memory without a lease",
        "trainer train",
        WorldFault.CONTROL_ENDS,
        WorldParts(journal=TrainerlessJournal),
    ),
    "the journal is written after the answer instead of before": Mutant(
        "has memory without a lease",
        "trainer train",
        WorldFault.CONTROL_ENDS,
        WorldParts(journal=LateJournal),
    ),
    "the journal forgets operations": Mutant(
        "operation o meant",
        "trainer train",
        WorldFault.CONTROL_ENDS,
        WorldParts(journal=OperationlessJournal),
        meddling=(RECOVER, LEAVE),
    ),
    "a trainer that runs is said to have ended": Mutant(
        "has memory without a lease", parts=WorldParts(processes=RashProcesses)
    ),
    "engines of the control process before are not waited for": Mutant(
        "have memory of n:0",
        "request rollout",
        WorldFault.CONTROL_ENDS,
        WorldParts(waits_for_dead=False),
    ),
    "a batch is published twice": Mutant(
        "published: ['step-0', 'step-0'", "trainer train", WorldFault.DRIVER_ENDS, store=TwiceStore
    ),
    "a trainer gets a sample without scores": Mutant(
        "is trained without its teacher", store=LossyStore
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_it_is_seen_that(name):
    mutant = MUTANTS[name]
    found = [words for script in mutant.scripts() for words in live(mutant.case(script)).problems]
    assert any(mutant.words in words for words in found), found
    for script in mutant.real().scripts():
        assert live(mutant.real().case(script)).problems == []
