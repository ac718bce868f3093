"""A trainer's process that trains through all phases of a world's job, and ends at any call of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from phalanx.client import AsyncPhaseClient
from phalanx.client.roles.settings import RoleClientSettings
from phalanx.distill import (
    AskingSettings,
    Checkpoint,
    DistillLoop,
    LoopParts,
    LoopPlan,
    MemoryStore,
    Prompt,
    RolloutSettings,
    RolloutWorkload,
    ScorerSettings,
    Scoring,
    Stage,
    TeacherRequest,
    TeacherScorer,
)
from phalanx.distill.checking import check_scores
from phalanx.errors import PhalanxError, RequestFailedError, SampleStoreError
from phalanx.testing.job_world import JobWorld
from phalanx.testing.job_world_faults import Life, ProcessEndedError, WorldFault
from phalanx.testing.job_world_network import Network
from tests.distill.toy_role import ToyEngine

URL = "http://127.0.0.1:1"
ASKING = AskingSettings(max_concurrency=2, resends=0, ready_timeout_s=5)
SETTINGS = RoleClientSettings(timeout_s=300.0, retry_s=1.0)
NOT_DONE = (WorldFault.FAILS, WorldFault.LOST, WorldFault.HANGS, WorldFault.LATE, WorldFault.DIES)
DONE_UNHEARD = (WorldFault.UNHEARD, WorldFault.HANGS_DONE)
EXIT_S = 3.0
TRAIN_S = 20.0


class SlowThreads(ThreadPoolExecutor):
    """What blocks is done at once, and answered `delay_s` later, without a thread."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self.delay_s = 0.01

    def submit(self, act, /, *arguments, **named) -> Future:
        done: Future = Future()
        done.set_running_or_notify_cancel()
        self.delay_s = 0.01
        loop = asyncio.get_running_loop()
        try:
            value = act(*arguments, **named)
        except BaseException as error:
            loop.call_later(self.delay_s, done.set_exception, error)
        else:
            loop.call_later(self.delay_s, done.set_result, value)
        return done


class Outlasting:
    """What is there after every end of a process: samples, and checkpoints by their number of steps."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.num_steps = 0
        self.saved: list[int] = []
        self.published: list[str] = []


class Driver:
    """One process. `ends_by_itself` is called where it is killed; its memory goes a while later."""

    def __init__(self, world: JobWorld, outlasting: Outlasting, threads: SlowThreads) -> None:
        self.world = world
        self.outlasting = outlasting
        self.threads = threads
        self.life = Life()
        self.pid = world.machine.start()

    async def run(self, num_steps: int, *, elsewhere: bool = False) -> None:
        network = Network(
            self.world.script,
            self.life,
            lambda: self.world.control,
            self.world.end_control,
            self.end,
            self.world.operations.answered,
        )
        async with AsyncPhaseClient(URL, settings=SETTINGS, transport=network) as client:
            student, teacher = (RoleLink(self, role) for role in ("rollout", "teacher"))
            settings = RolloutSettings(num_samples=2, max_new_tokens=2, asking=ASKING)
            parts = LoopParts(
                phases=DriverPhases(client, None if elsewhere else self.pid),
                store=DriverStore(self),
                workload=RolloutWorkload(student, settings),
                trainer=DriverTrainer(self),
                prompts=lambda step: [Prompt("g", (3, 1 + step), teacher=TeacherRequest())],
                teacher=TeacherScorer(teacher, ScorerSettings(ASKING)),
            )
            plan = LoopPlan(scoring={Scoring.TEACHER: "teacher"}, attempts=2)
            await DistillLoop(parts, plan).run(num_steps)

    def end(self) -> None:
        """As `kill -9` does; its memory goes, and then the process."""
        if self.life.is_alive:
            self.life.end()
            loop = asyncio.get_running_loop()
            loop.call_later(EXIT_S, self.world.devices.trainer_gave, self.pid)
            loop.call_later(EXIT_S + 0.1, self.world.machine.end, self.pid)

    def through(self, point: str, act: Callable[[], object], error: type[PhalanxError]) -> object:
        """`act`, or what the script says instead."""
        self.life.check()
        fault = self.world.script.take(point)
        if fault is WorldFault.CONTROL_ENDS or fault is WorldFault.CONTROL_ENDS_AFTER:
            self.world.end_control()
        if fault is WorldFault.DRIVER_ENDS:
            self.end()
        self.life.check()
        if fault in NOT_DONE:
            raise error(f"{point}: it failed")
        value = act()
        if fault is WorldFault.DRIVER_ENDS_AFTER:
            self.end()
        self.life.check()
        if fault in DONE_UNHEARD:
            raise error(f"{point}: nobody knows")
        return value


class DriverPhases:
    def __init__(self, client: AsyncPhaseClient, pid: int | None) -> None:
        self._client = client
        self._pid = pid

    async def enter(self, phase: str, batch: str, /) -> object:
        return await self._client.enter(phase, batch)

    async def leave(self) -> object:
        return await self._client.leave()

    async def attach(self, trainer_id: str, /) -> object:
        return await self._client.attach(trainer_id, pid=self._pid, elsewhere=self._pid is None)

    async def release(self, trainer_id: str, /) -> object:
        return await self._client.release(trainer_id)


class DriverTrainer:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._kept = driver.outlasting

    def last(self) -> Checkpoint | None:
        self._driver.life.check()
        return _checkpoint(self._kept.num_steps) if self._kept.num_steps else None

    def load(self) -> None:
        devices, pid = self._driver.world.devices, self._driver.pid
        self._act("load", lambda: devices.trainer_took(pid))

    def train(self, samples, step: int) -> dict[str, float]:
        driver = self._driver
        assert driver.world.devices.trainer_holds(driver.pid)
        self._check(samples, step)
        self._act("train", lambda: None)
        driver.threads.delay_s = TRAIN_S
        return {"loss": 1.0}

    def save(self, step: int) -> Checkpoint:
        def act() -> None:
            self._kept.saved.append(step)
            self._kept.num_steps = step

        self._act("save", act)
        return _checkpoint(step)

    def offload(self) -> None:
        self._driver.life.check()
        self._driver.world.devices.trainer_gave(self._driver.pid)

    def _act(self, name: str, act: Callable[[], object]) -> None:
        self._driver.through(f"trainer {name}", act, RequestFailedError)

    def _check(self, samples, step: int) -> None:
        """Of what the trainer gets: everything is there, belongs together, and is published."""
        world = self._driver.world
        if step != self._kept.num_steps:
            world.note(f"step {step} is trained after {self._kept.num_steps} steps")
        if self._kept.store.stages().get(f"step-{step}") is not Stage.PUBLISHED:
            world.note(f"step {step} is trained on a batch that is not published")
        if [one.index for one in samples] != [0, 1]:
            world.note(f"step {step} is trained on {len(samples)} samples")
        for one in samples:
            try:
                check_scores(one)
            except PhalanxError as error:
                world.note(f"step {step} is trained without its teacher: {error}")


class DriverStore:
    """The store of `outlasting`, each call of which can fail, and the process end in it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._store = driver.outlasting.store

    def stages(self):
        return self._act("stages", self._store.stages)

    def load(self, batch_id):
        return self._act("load", lambda: self._store.load(batch_id))

    def save(self, batch):
        return self._act("save", lambda: self._store.save(batch))

    def note(self, batch_id, samples):
        return self._act("note", lambda: self._store.note(batch_id, samples))

    def publish(self, batch_id):
        def act() -> bool:
            is_first = self._store.publish(batch_id)
            if is_first:
                self._driver.outlasting.published.append(batch_id)
            return is_first

        return self._act("publish", act)

    def consume(self, batch_id):
        return self._act("consume", lambda: self._store.consume(batch_id))

    def _act(self, name: str, act: Callable[[], object]):
        return self._driver.through(f"store {name}", act, SampleStoreError)


class RoleLink:
    """As `AsyncRoleClient` at a role's engines, by its last snapshot."""

    is_engine = True
    mode = "direct"
    snapshot = None

    def __init__(self, driver: Driver, role: str) -> None:
        self._driver = driver
        self._role = role
        self._toy = ToyEngine(role)

    async def generate(self, payload, *, model, route_key, affinity, timeout_s):
        engine = self._engine()
        request = engine.send(0.3)
        while not request.ended:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.1)
        self._driver.life.check()
        if request.ended != "finished":
            raise RequestFailedError(f"the request was {request.ended}")
        self._toy.version = engine.version
        scores = payload["sampling_params"]["max_new_tokens"] == 0
        return (self._toy._scored if scores else self._toy._sampled)(payload)

    def _engine(self):
        def choose():
            control = self._driver.world.control
            if control is None:
                raise RequestFailedError("503: nothing runs")
            (shown,) = control.managers[self._role].registry.snapshot.content.models
            for replica in shown.serving:
                return control.engines[self._role].by_url(replica.base_url)
            raise RequestFailedError(f"503: {self._role} is {shown.state}")

        return self._driver.through(f"request {self._role}", choose, RequestFailedError)


def _checkpoint(step: int) -> Checkpoint:
    return Checkpoint(step, Path("/c"), str(step))


def was_killed(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(was_killed(one) for one in error.exceptions)
    return isinstance(error, ProcessEndedError)
