"""What a training loop is tested with: its three toy engines, and phases that keep a log."""

from __future__ import annotations

from contextlib import asynccontextmanager

from phalanx.errors import RoleOperationRefusedError
from tests.distill.looping import PLAN, DigestTrainer
from tests.distill.toy_role import ToyEngine


@asynccontextmanager
async def engines():
    toys = [ToyEngine(name) for name in ("student", "judge", "teacher")]
    toys[0].version = "default"
    for toy in toys:
        await toy.start()
    try:
        yield toys
    finally:
        for toy in toys:
            await toy.stop()


def urls(toys) -> list[str]:
    return [toy.url for toy in toys]


class LoggedPhases:
    """Keeps the order as a coordinator does, and a log; `faults` are raised by the next calls."""

    def __init__(self, trainer: DigestTrainer, names=PLAN.phases) -> None:
        self.names = names
        self.trainer = trainer
        self.log: list[tuple[str, ...]] = []
        self.batch: str | None = None
        self.reached = -1
        self.faults: dict[str, list[Exception]] = {}

    async def enter(self, phase: str, batch: str, /) -> None:
        self.log.append((phase, batch))
        if self.faults.get(phase):
            raise self.faults[phase].pop(0)
        index = self.names.index(phase)
        if self.trainer.holds:
            raise RoleOperationRefusedError("the trainer holds the devices")
        is_new = batch != self.batch
        reached = -1 if is_new else self.reached
        if index > reached + 1 or (is_new and self.reached not in (-1, len(self.names) - 1)):
            raise RoleOperationRefusedError(f"{phase} cannot follow {self.reached}")
        self.batch, self.reached = batch, max(reached, index)

    async def leave(self) -> None:
        self.log.append(("leave",))

    async def attach(self, trainer_id: str, /) -> None:
        self.log.append(("attach", trainer_id))

    async def release(self, trainer_id: str, /) -> None:
        assert not self.trainer.holds
        self.log.append(("release", trainer_id))
