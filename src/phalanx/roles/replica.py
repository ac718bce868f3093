"""One generation of a replica, from its start to its end, as its manager knows it.

Every change of state goes through `move`; whoever waits for its engine waits inside `living`, which
ends at once when the replica does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager

from phalanx.errors import RoleOperationFailedError
from phalanx.roles.contracts import EngineControl, LaunchedReplica, ReplicaLaunch
from phalanx.roles.events import EventKind
from phalanx.roles.residency import Residency
from phalanx.roles.states import check_transition
from phalanx.routing.roles.snapshot import ReplicaState, RoleReplica
from phalanx.schema.roles import EngineKind


class ReplicaLostError(RoleOperationFailedError):
    """The replica died; its manager has taken it out already."""


class Replica:
    """`weights` is the version that it holds for certain, None where nobody knows or none is there;
    `num_losses`: how often they were given back.

    `waits`: everything else is done, and a trainer's weights are missing. `runs`: whether the engine
    computes what arrives, None where nobody knows; `drained`: nothing ran when it was last asked.
    `chased`: a call that takes memory was given up, and may be under way yet. `routed`: its router may have it. `busy`: it is asked for something that may keep it from
    answering its health check. `tells`: whether it can say what it holds; `names_weights`: it has
    said that it has the version in `weights`, or one before. `blocked` says why nobody may touch it
    but `unblock` and `recover`. `is_stopped`: none of its processes is left. `written_off`: on
    somebody's word those that may be left hold nothing.
    """

    def __init__(
        self,
        launch: ReplicaLaunch,
        handle: LaunchedReplica,
        engine: EngineControl,
        tell: Callable[[EventKind, str], None],
    ) -> None:
        self.launch = launch
        self.handle = handle
        self.engine = engine
        self.state = ReplicaState.STARTING
        self.residency = Residency()
        self.weights: str | None = None
        self.lost_weights: str | None = None
        self.num_losses = 0
        self.waits = False
        self.runs: bool | None = True
        self.drained = False
        self._num_awaited = 0
        self.chased = False
        self.routed = False
        self.busy = False
        self.tells = True
        self.names_weights = False
        self.blocked = ""
        self.detail = ""
        self.is_stopped = False
        self.written_off = False
        self.tasks: set[asyncio.Task[None]] = set()
        self._tell = tell
        self._guards: set[asyncio.Timeout] = set()
        self._shown: tuple[Hashable, RoleReplica] | None = None

    @property
    def engine_id(self) -> str:
        return self.launch.engine_id

    @property
    def is_external(self) -> bool:
        return self.launch.group.engine is EngineKind.EXTERNAL

    @property
    def is_dynamic(self) -> bool:
        return self.launch.model.needs_weight_update

    @property
    def is_alive(self) -> bool:
        return self.state is not ReplicaState.DEAD

    @property
    def is_gone(self) -> bool:
        """Whether nothing is left of it, neither a process nor an entry in a router."""
        return self.is_stopped and not self.routed

    @property
    def is_asked(self) -> bool:
        """Whether operations may ask its engine for anything."""
        return self.is_alive and not self.blocked

    def move(self, after: ReplicaState, detail: str = "", told: str | None = None) -> None:
        """`told` is the event's word for it, where that is another one.

        Raises `IllegalTransitionError` where the table has no such edge, and changes nothing.
        """
        check_transition(self.state, after)
        self.state = after
        self.detail = detail
        if after is ReplicaState.READY:
            self.drained = False
        self._num_awaited = 0
        if told is None:
            told = f"{after.value}: {detail}" if detail else after.value
        self._tell(EventKind.STATE, told)

    def advance(self, after: ReplicaState, detail: str = "") -> None:
        """As `move`, for a course of steps in which the replica may have died since the last."""
        self.check_alive()
        self.move(after, detail)

    def check_alive(self) -> None:
        if not self.is_alive:
            raise ReplicaLostError(f"{self.engine_id} died: {self.detail}")

    def retire(self, reason: str) -> None:
        """As `lose`, on somebody's word: there is nothing to be alarmed at."""
        self.lose(reason, told=reason)

    def lose(self, reason: str, *, told: str | None = None) -> None:
        """It is dead: whoever waits for it waits no longer."""
        self.move(ReplicaState.DEAD, reason, told)
        self.waits = False
        self.weights = None
        now_s = asyncio.get_running_loop().time()
        for guard in self._guards:
            if not guard.expired():
                guard.reschedule(now_s)

    def block(self, reason: str) -> None:
        """It gets no requests already."""
        assert self.state is not ReplicaState.READY
        self.blocked = reason
        self._tell(EventKind.BLOCKED, reason)

    def unblock(self) -> None:
        if self.blocked:
            self._tell(EventKind.UNBLOCKED, self.blocked)
        self.blocked = ""

    def wait_for_requests(self, count: int) -> None:
        """Tell how many have yet to end: of many, each time that half of them have."""
        if count > 0 and (self._num_awaited == 0 or 2 * count <= self._num_awaited):
            self._num_awaited = count
            ends = "1 request ends" if count == 1 else f"{count} requests end"
            self._tell(EventKind.WAITING, f"until {ends}")

    def wait_for_weights(self, which: str) -> None:
        if not self.waits:
            self._tell(EventKind.WAITING, f"for {which}")
        self.waits, self.detail = True, f"it waits for {which}"

    def has_weights(self, version: str, detail: str = "") -> None:
        """It holds this version now, for certain."""
        if self.weights != version:
            self._tell(EventKind.WEIGHTS, version)
        self.weights, self.lost_weights = version, None
        if self.waits:
            self.waits, self.detail = False, detail

    def lose_weights(self) -> None:
        """Its weights were given back, and whatever it says of their version means nothing."""
        if self.weights is not None:
            self.lost_weights = self.weights
        self.weights = None
        self.num_losses += 1

    @asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        """What waits inside ends with `ReplicaLostError` as soon as the replica has died."""
        self.check_alive()
        guard = asyncio.timeout(None)
        self._guards.add(guard)
        try:
            async with guard:
                yield
        except TimeoutError:
            if guard.expired():
                self.check_alive()
            raise
        finally:
            self._guards.discard(guard)

    def shown(self, *, exposed: bool) -> RoleReplica:
        """What a snapshot says of it: the same object for as long as it says the same."""
        says = (self.state, self.weights, self.blocked or self.detail, bool(self.blocked), exposed)
        if self._shown is None or self._shown[0] != says:
            self._shown = says, self._show(exposed)
        return self._shown[1]

    def _show(self, exposed: bool) -> RoleReplica:
        return RoleReplica(
            engine_id=self.engine_id,
            base_url=self.handle.url,
            state=self.state,
            generation=self.launch.generation,
            worker_type=self.launch.group.worker_type,
            exposed=exposed,
            weight_version=self.weights if self.is_dynamic else None,
            detail=self.blocked or self.detail,
            blocked=bool(self.blocked),
        )
