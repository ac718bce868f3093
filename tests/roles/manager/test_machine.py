"""Any course of operations, concurrent and cancelled, with faults at every await: no snapshot lies,
no engine is asked for what would crash it, and everything ends once faults do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from phalanx.errors import PhalanxError
from phalanx.roles.contracts import ALL_TAGS
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.schema.roles import WeightSource
from phalanx.testing.role_fakes import FakeRequest, FakeRoleWorld
from phalanx.testing.role_faults import Fault
from phalanx.testing.virtual_time import VirtualTimeLoop
from tests.roles.manager.case import Case, model

POINTS = [
    "*",
    "launch",
    "healthy",
    "ready",
    "pause",
    "go_on",
    "abort_all",
    "is_idle",
    "release",
    "resume",
    "resident",
    "weight_version",
    "waits_for_weights",
    "load_weights",
    "stop",
    "router.open",
    "router.add",
    "router.remove",
]
TAGS = st.sampled_from([None, ["weights"], ["kv_cache", "cuda_graph"]])
ENGINES = st.sampled_from(["m/0", "m/1", "m/2"])
NOT_ENGINES = frozenset({"launch", "stop", "router.open", "router.add", "router.remove"})
LONG_S = 20000.0


class ManagerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.operations: list[asyncio.Task] = []
        self.requests: list[FakeRequest] = []
        self.version = 0
        self.disturbed = False

    def go(self, act: Coroutine) -> object:
        return self.loop.run_until_complete(act)

    @initialize(
        source=st.sampled_from(WeightSource),
        router=st.booleans(),
        lasting=st.booleans(),
        says=st.booleans(),
        keeps=st.booleans(),
        asleep=st.booleans(),
    )
    def begin(self, source, router, lasting, says, keeps, asleep):
        keeps = keeps or source is WeightSource.STATIC

        async def make():
            self.world = FakeRoleWorld(says=says, keeps_weights=keeps)
            spec = model(
                replicas=2,
                weight_source=source,
                router=router,
                fault_tolerance_enabled=lasting,
                elastic_enabled=True,
            )
            self.case = Case(spec, world=self.world, start_asleep=asleep)
            self.manager = self.case.manager
            self.source = source
            await self.manager.start()

        self.go(make())

    def ask(self, operation: Coroutine) -> None:
        async def begin():
            self.operations.append(asyncio.create_task(operation))
            await asyncio.sleep(0)

        self.go(begin())

    @rule(tags=TAGS)
    def activate(self, tags):
        self.ask(self.manager.activate(tags))

    @rule()
    def drain(self):
        self.ask(self.manager.drain())

    @rule()
    def deactivate(self):
        self.ask(self.manager.deactivate())

    @rule(count=st.integers(1, 3))
    def scale(self, count):
        self.ask(self.manager.scale("m", count))

    @rule(engine_id=ENGINES)
    def recover(self, engine_id):
        self.ask(self.manager.recover(engine_id))

    @rule(engine_id=ENGINES, says=st.booleans())
    def unblock(self, engine_id, says):
        # An operator looks first, and says how it is.
        shown = self.case.shown(engine_id)
        if shown is not None and shown.blocked:
            holds = sorted(self.world.by_url(shown.base_url).held) if says else None
            self.ask(self.manager.unblock(engine_id, holds))

    @rule()
    def update(self):
        if self.source in (WeightSource.LOCAL, WeightSource.DCS):
            self.version += 1
            self.ask(self.manager.update_weights("m", f"/v/{self.version}", str(self.version)))

    @rule(all_of_them=st.booleans(), tells=st.booleans())
    def train(self, all_of_them, tells):
        if self.source is not WeightSource.ACTOR:
            return
        self.version += 1
        for engine in self.world.running[: None if all_of_them else 1]:
            if "weights" in engine.held:
                engine.put_weights(str(self.version))
        if tells:
            self.ask(self.manager.confirm_weights("m", str(self.version)))

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, 10.0, 100.0]))
    def pass_time(self, seconds):
        self.go(asyncio.sleep(seconds))

    @rule(data=st.data())
    def cancel_a_caller(self, data):
        if self.operations:
            data.draw(st.sampled_from(self.operations)).cancel()
            self.go(asyncio.sleep(0))

    @rule(point=st.sampled_from(POINTS), faults=st.lists(st.sampled_from(Fault), max_size=3))
    def fault(self, point, faults):
        self.disturbed = True
        self.world.faults.next(point, faults)

    @rule(point=st.sampled_from(POINTS), fault=st.sampled_from([*Fault, None]))
    def lasting_fault(self, point, fault):
        self.disturbed = True
        self.world.faults.always(point, fault)

    @rule()
    def faults_end(self):
        self.world.faults.stop()

    @rule(engine_id=ENGINES)
    def crash(self, engine_id):
        self.disturbed = True
        shown = self.case.shown(engine_id)
        if shown is not None:
            self.world.by_url(shown.base_url).crash()

    @rule(duration_s=st.sampled_from([0.1, 5.0, 500.0]))
    def request(self, duration_s):
        async def send():
            for replica in self.case.registry.snapshot.content.models[0].serving:
                engine = self.world.by_url(replica.base_url)
                request = engine.send(duration_s)
                assert request.started or not engine.is_up
                self.requests.append(request)

        self.go(send())

    @precondition(lambda self: not self.disturbed and not self.pending())
    @rule(
        name=st.sampled_from(["activate", "drain", "deactivate"]),
    )
    def once_more(self, name):
        async def twice():
            try:
                await getattr(self.manager, name)()
            except PhalanxError:
                return
            before = self.calls(), self.case.revision
            await getattr(self.manager, name)()
            assert (self.calls(), self.case.revision) == before

        self.go(twice())

    def calls(self) -> list[list[str]]:
        return [list(engine.log) for engine in self.world.engines.values()]

    def pending(self) -> list[asyncio.Task]:
        return [task for task in self.operations if not task.done()]

    @invariant()
    def nothing_is_wrong(self):
        if not hasattr(self, "case"):
            return
        case = self.case
        assert not case.violations
        assert not self.world.misused
        running = [engine.launch.engine_id for engine in self.world.running]
        assert len(running) == len(set(running)), "two generations at once"
        revisions = [snapshot.revision for snapshot in case.snapshots]
        assert revisions == list(range(len(revisions)))
        for before, after in zip(case.snapshots, case.snapshots[1:], strict=False):
            assert before.content != after.content
        for task in self.operations:
            if task.done() and not task.cancelled() and task.exception() is not None:
                assert isinstance(task.exception(), PhalanxError), task.exception()

    def teardown(self):
        try:
            if hasattr(self, "case"):
                self.go(self.end())
            self.nothing_is_wrong()
        finally:
            # Also where a failed test has left things half done.
            while tasks := asyncio.all_tasks(self.loop):
                for task in tasks:
                    task.cancel()
                self.go(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.close()

    async def end(self) -> None:
        """Faults stop; all ends, and what is blocked can be brought back."""
        self.world.faults.stop()
        async with asyncio.timeout(LONG_S):
            await asyncio.gather(*self.operations, return_exceptions=True)
            await asyncio.sleep(1000.0)
            await self.bring_back()
            self.check_awake()
            await self.manager.deactivate()
            assert all(held == frozenset() for held in self.manager.residency().values())
            assert all(not engine.held for engine in self.world.running)
            await self.manager.activate()
            await self.manager.shutdown()
        assert not self.world.running
        assert all(not router.workers for router in self.world.routers.values())
        await asyncio.sleep(1000.0)
        assert not self.world.running
        assert all(request.ended for request in self.requests)

    async def bring_back(self) -> None:
        await self._quietly(self.manager.activate())
        for slot in range(3):
            shown = self.case.shown(f"m/{slot}")
            if shown is not None and (shown.blocked or shown.state is ReplicaState.DEAD):
                await self._quietly(self.manager.recover(shown.engine_id))
        await self.manager.activate()
        self.version += 1
        if self.source in (WeightSource.LOCAL, WeightSource.DCS):
            await self.manager.update_weights("m", f"/v/{self.version}", str(self.version))
        elif self.source is WeightSource.ACTOR:
            for engine in self.world.running:
                engine.put_weights(str(self.version))
            await self.manager.confirm_weights("m", str(self.version))
        await self.manager.activate()

    async def _quietly(self, operation: Coroutine) -> None:
        try:
            await operation
        except PhalanxError:
            pass

    def check_awake(self) -> None:
        content = self.case.registry.snapshot.content
        assert content.models[0].state is ReplicaState.READY
        assert {replica.state for replica in content.models[0].replicas} == {ReplicaState.READY}
        assert set(self.manager.residency().values()) == {ALL_TAGS}


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)


class LongManagerMachine(ManagerMachine):
    """The same for longer."""


TestManagerAtLength = pytest.mark.long(LongManagerMachine.TestCase)
TestManagerAtLength.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
