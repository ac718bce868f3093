"""What happens to a role while it is used: two rounds by turns, which are everything together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from phalanx.testing.soak.job import MODEL, JobEngine, SoakError, SoakJob
from phalanx.testing.soak.traffic import Traffic


class Disturbances:
    """Versions are `u1`, `u2`, ...: the odd ones have the second checkpoint, all others the first."""

    def __init__(self, job: SoakJob, traffic: Traffic, note: Callable[[str], None]) -> None:
        self._job = job
        self._traffic = traffic
        self._note = note
        self.num_updates = 0
        self.num_rounds = 0

    async def round(self) -> None:
        """From one replica to four, a kill and a drain; or down to two, a sleep and a kill: by turns,
        each with new versions all the time.
        """
        await (self._downwards() if self.num_rounds % 2 else self._upwards())
        self.num_rounds += 1

    async def _upwards(self) -> None:
        await self._scale(1)
        await self._updates()
        await self._scale(4)
        await self._kill(4)
        await self._updates()
        await self._turn("drain")
        await self._updates()

    async def _downwards(self) -> None:
        await self._scale(2)
        await self._updates()
        await self._turn("deactivate")
        await self._kill(2)
        await self._updates()

    async def update(self) -> None:
        """New weights on every replica, while it is used."""
        version = f"u{self.num_updates + 1}"
        path = self._job.checkpoints[checkpoint_of(version)]
        self._note(f"weights {version}")
        await self._job.ask(f"models/{MODEL}/weights", {"path": str(path), "version": version})
        self.num_updates += 1
        model = (await self._job.document()).models[MODEL]
        if model.weight_version != version:
            raise SoakError(f"after an update to {version!r} the model says {model}")

    async def _updates(self) -> None:
        await self.update()
        await self.update()

    async def _scale(self, replicas: int) -> None:
        self._note(f"scale to {replicas}")
        await self._job.ask(f"models/{MODEL}/scale", {"replicas": replicas})
        await self._job.ready(replicas)

    async def _kill(self, replicas: int) -> None:
        """kill -9 of the last engine; another generation takes its place."""
        victim = (await self._job.ready(replicas)).engines[-1]
        assert victim.base_url is not None
        self._note(f"kill {victim.engine_id}")
        with self._traffic.killing():
            self._job.kill_engine(victim.base_url)
            document = await self._job.document()
            while not _replaced(victim, document.models[MODEL].engines):
                document = await self._job.document(document.topology_revision)
        await self._job.ready(replicas)

    async def _turn(self, verb: str) -> None:
        """Out of service and back."""
        self._note(verb)
        replicas = len((await self._job.document()).models[MODEL].engines)
        await self._job.ask(verb)
        model = (await self._job.document()).models[MODEL]
        if any(engine.state == "ready" for engine in model.engines):
            raise SoakError(f"after {verb} an engine is still ready: {model}")
        self._note("activate")
        await self._job.ask("activate")
        await self._job.ready(replicas)


def _replaced(victim: JobEngine, engines: Sequence[JobEngine]) -> bool:
    return any(
        each.engine_id == victim.engine_id
        and each.generation > victim.generation
        and each.state == "ready"
        for each in engines
    )


def checkpoint_of(version: str) -> int:
    """0 or 1."""
    return int(version[1:]) % 2 if version.startswith("u") else 0


async def watch_revisions(job: SoakJob) -> None:
    """Follow the role until cancelled. Raises `SoakError` where its revision goes back."""
    seen = await job.document()
    while True:
        document = await job.document(seen.topology_revision)
        if document.registry_epoch != seen.registry_epoch:
            raise SoakError("the registry began a new epoch though its process lives")
        if document.topology_revision < seen.topology_revision:
            raise SoakError(
                f"the revision went from {seen.topology_revision} to {document.topology_revision}"
            )
        seen = document
        await asyncio.sleep(0)
