"""Engines, launchers and routers of a role without processes, for driving its manager in a test.

A fake engine is as easily broken as SGLang's: a release while something runs, a second release, a
resume of what is held, or a generated token without memory end its process, and are noted as
`misused`. Everything is logged, and every call can meet a scripted fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.roles.contracts import ALL_TAGS, Backends, EngineCallError, ReplicaLaunch, Tag
from phalanx.schema.roles import EngineKind, InferenceModelSpec
from phalanx.testing.role_fake_router import FakeRouter
from phalanx.testing.role_faults import Faults

LOAD_S = 2.0
"""How long a started engine takes to be healthy."""


@dataclass(eq=False)
class FakeRequest:
    """`ended` is empty, or says how it did: finished, aborted, lost or refused."""

    duration_s: float
    started: bool = False
    ended: str = ""


class _CallOrder:
    """Calls have the order in which they were asked for, whenever they arrive."""

    def __init__(self) -> None:
        self._num_asked = self._num_done = 0

    def of(self, act: Callable[[], None], *, late: bool) -> Callable[[], None]:
        """`act`, which does nothing after a later one unless `late` ones are done as well."""
        self._num_asked += 1
        number = self._num_asked

        def ordered() -> None:
            if number >= self._num_done or late:
                self._num_done = number
                act()

        return ordered


@dataclass(eq=False)
class FakeEngine:
    """One process with its engine. `says`: whether it tells what it holds, and then takes repeated
    calls for done, as Phalanx's does. `keeps_weights`: whether released weights come back.
    `num_deaf`: so many times it does not abort what it is told to.
    """

    world: FakeRoleWorld
    launch: ReplicaLaunch
    url: str
    says: bool = True
    keeps_weights: bool = False
    held: frozenset[Tag] = ALL_TAGS
    version: str = "default"
    lost_weights: bool = False
    paused: bool = False
    is_loaded: bool = False
    is_up: bool = True
    misused: str = ""
    num_deaf: int = 0
    bootstrap_port: int | None = None
    requests: list[FakeRequest] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    pushed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._exit: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._loading = asyncio.create_task(self._load())
        self._runs: set[asyncio.Task[None]] = set()
        self._order = _CallOrder()
        self.world.took(self)

    # What the manager has of the process.

    async def exited(self) -> str:
        reason = await asyncio.shield(self._exit)
        if self.launch.group.engine is EngineKind.EXTERNAL:
            await asyncio.get_running_loop().create_future()  # nobody here would know
        return reason

    async def stop(self, grace_s: float) -> None:
        self.log.append("stop")
        if self.launch.group.engine is EngineKind.EXTERNAL:
            return
        await self.world.faults.strike("stop", self.end, crash=self.crash)
        if self.is_up:
            raise EngineCallError("it does not end", uncertain=True)

    def crash(self) -> None:
        """End by itself, which is told; an end that was asked for is not."""
        if self.is_up:
            self.end()
            self._exit.set_result("it crashed")

    def end(self) -> None:
        self.is_up = False
        self._loading.cancel()
        for request in self.requests:
            self._end(request, "lost" if request.started else "refused")

    # What the manager asks of the engine.

    async def healthy(self) -> bool:
        self._listening()
        answer = False

        def act() -> None:
            nonlocal answer
            answer = self.is_up and self.is_loaded

        await self._call("healthy", act, logged=False)
        return answer

    async def ready(self) -> bool:
        await self._call("ready", self._generate)
        return True

    async def pause(self) -> None:
        def act() -> None:
            self.paused = True
            self._abort()

        await self._call("pause", act)

    async def go_on(self) -> None:
        def act() -> None:
            self.paused = False
            for request in list(self.requests):
                self._begin(request)

        await self._call("go_on", act)

    async def abort_all(self) -> None:
        await self._call("abort_all", self._abort)

    async def is_idle(self) -> bool:
        idle = False

        def act() -> None:
            nonlocal idle
            if Tag.KV_CACHE not in self.held:
                self._misuse("asked to flush the cache that it does not hold")
            idle = not self.requests

        await self._call("is_idle", act, logged=False)
        return idle

    async def num_requests(self) -> int | None:
        await self._call("num_requests", lambda: None, logged=False)
        return len(self.requests) if self.says else None

    async def release(self, tags: frozenset[Tag]) -> None:
        act = self._order.of(lambda: self._release(tags), late=not self.says)
        await self._call("release", act, what=_names(tags))

    async def resume(self, tags: frozenset[Tag]) -> None:
        act = self._order.of(lambda: self._resume(tags), late=not self.says)
        await self._call("resume", act, what=_names(tags))

    async def resident(self) -> frozenset[Tag] | None:
        await self._call("resident", lambda: None, logged=False)
        return self.held if self.says else None

    async def weight_version(self) -> str:
        await self._call("weight_version", lambda: None, logged=False)
        return self.version

    async def waits_for_weights(self) -> bool | None:
        await self._call("waits_for_weights", lambda: None, logged=False)
        return self.lost_weights if self.says else None

    async def load_weights(self, path: str, version: str) -> None:
        self.loads.append(version)

        def act() -> None:
            if Tag.WEIGHTS not in self.held:
                self._misuse("asked to load weights without memory for them")
            self.version, self.lost_weights = version, False

        await self._call("load_weights", act, what=f"{version} {path}")

    async def close(self) -> None:
        self.log.append("close")

    # What a test does to it.

    def put_weights(self, version: str) -> None:
        """As a trainer does, on its own connection."""
        self.version, self.lost_weights = version, False
        self.pushed.append(version)

    def send(self, duration_s: float) -> FakeRequest:
        """A client's request, which takes that long."""
        request = FakeRequest(duration_s)
        if not self.is_up:
            request.ended = "refused"
            return request
        if self.held != ALL_TAGS and not self.paused:
            self._misuse("a request ran without memory")
            request.ended = "lost"
            return request
        self.requests.append(request)
        self._begin(request)
        return request

    @property
    def serves(self) -> bool:
        return self.is_up and self.held == ALL_TAGS and not self.paused and not self.lost_weights

    def _generate(self) -> None:
        if self.held != ALL_TAGS:
            self._misuse("asked for a token without memory")
        if self.lost_weights or self.paused or not self.is_loaded:
            raise EngineCallError("503: no token", uncertain=False)

    def _release(self, tags: frozenset[Tag]) -> None:
        if self.says and not tags & self.held:
            return
        if any(request.started for request in self.requests) or not self.paused:
            self._misuse("memory released while it may be used")
        if not self.says and not tags <= self.held:
            self._misuse("memory released twice")
        self.held -= tags
        if Tag.WEIGHTS in tags and not self.keeps_weights:
            self.lost_weights = True

    def _resume(self, tags: frozenset[Tag]) -> None:
        if not self.says and tags & self.held:
            self._misuse("memory resumed that it holds")
        self.held |= tags
        self.world.took(self)

    def _abort(self) -> None:
        if self.num_deaf > 0:
            self.num_deaf -= 1
            return
        for request in list(self.requests):
            self._end(request, "aborted")

    def _begin(self, request: FakeRequest) -> None:
        if not self.paused and not request.started:
            request.started = True
            task = asyncio.create_task(self._run(request))
            self._runs.add(task)
            task.add_done_callback(self._runs.discard)

    async def _run(self, request: FakeRequest) -> None:
        await asyncio.sleep(request.duration_s)
        self._end(request, "finished")

    def _end(self, request: FakeRequest, how: str) -> None:
        if not request.ended:
            request.ended = how
            self.requests = [other for other in self.requests if other is not request]

    async def _load(self) -> None:
        await asyncio.sleep(self.world.load_s)
        self.is_loaded = True

    def _listening(self) -> None:
        if not self.is_up:
            raise EngineCallError(f"{self.url}: connection refused", uncertain=False, gone=True)

    async def _call(self, point: str, act: object, *, what: str = "", logged: bool = True) -> None:
        assert callable(act)
        if logged:
            self.log.append(f"{point} {what}".rstrip())
        self._listening()

        def alive() -> None:
            if self.is_up:
                act()

        await self.world.faults.strike(point, alive, crash=self.crash)
        if not self.is_up:
            raise EngineCallError(f"{point}: the connection was lost", uncertain=True)

    def _misuse(self, what: str) -> None:
        self.misused = what
        self.crash()


class FakeRoleWorld:
    """A launcher, its engines, their control calls and the models' routers: `backends` has them all.

    `engines` has every process that was ever started, by engine id and generation. `took` is told of
    each engine that has taken memory, when it has.
    """

    def __init__(
        self,
        *,
        says: bool = True,
        keeps_weights: bool = False,
        load_s: float = LOAD_S,
        faults: Faults | None = None,
        took: Callable[[FakeEngine], None] = lambda engine: None,
    ) -> None:
        self.says = says
        self.load_s = load_s
        self.keeps_weights = keeps_weights
        self.faults = faults or Faults()
        self.took = took
        self.engines: dict[tuple[str, int], FakeEngine] = {}
        self.routers: dict[str, FakeRouter] = {}
        self._by_url: dict[str, FakeEngine] = {}

    @property
    def backends(self) -> Backends:
        return Backends(self, self.connect, self.open_router)

    async def launch(self, launch: ReplicaLaunch) -> FakeEngine:
        made: list[FakeEngine] = []
        try:
            await self.faults.strike(
                "launch", lambda: made.append(self._start(launch)), crash=lambda: None
            )
        except BaseException:
            for engine in made:
                engine.end()
            raise
        return made[0]

    def _start(self, launch: ReplicaLaunch) -> FakeEngine:
        number = len(self.engines)
        url = f"http://10.0.0.{number // 1000}:{10000 + number % 1000}"
        engine = FakeEngine(self, launch, url, self.says, self.keeps_weights)
        if launch.group.engine is EngineKind.EXTERNAL:
            engine = self._external(engine)
        self.engines[launch.engine_id, launch.generation] = engine
        self._by_url[engine.url] = engine
        return engine

    def _external(self, fresh: FakeEngine) -> FakeEngine:
        """The same server again, whatever the generation, where it still runs."""
        for (engine_id, _), engine in self.engines.items():
            if engine_id == fresh.launch.engine_id and engine.is_up:
                fresh.end()
                return engine
        return fresh

    async def close(self) -> None:
        for engine in self.engines.values():
            engine.end()

    def connect(self, url: str) -> FakeEngine:
        return self._by_url[url]

    async def open_router(self, role: str, model: InferenceModelSpec) -> FakeRouter:
        def act() -> None:
            name = f"{role}/{model.name}"
            self.routers[model.name] = FakeRouter(self.faults, f"http://router/{name}")

        await self.faults.strike("router.open", act, crash=lambda: None)
        return self.routers[model.name]

    def engine(self, engine_id: str, generation: int | None = None) -> FakeEngine:
        """That generation, or the newest."""
        if generation is None:
            generation = max(g for name, g in self.engines if name == engine_id)
        return self.engines[engine_id, generation]

    def by_url(self, url: str) -> FakeEngine:
        return self._by_url[url]

    @property
    def running(self) -> tuple[FakeEngine, ...]:
        """The processes that have not ended."""
        return tuple(engine for engine in self.engines.values() if engine.is_up)

    @property
    def misused(self) -> list[str]:
        """What would have crashed an engine of SGLang's."""
        return [
            f"{engine.launch.engine_id}: {engine.misused}"
            for engine in self.engines.values()
            if engine.misused
        ]


def _names(tags: frozenset[Tag]) -> str:
    return ",".join(sorted(tags))
