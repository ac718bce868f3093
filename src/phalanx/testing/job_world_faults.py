"""What can go wrong anywhere in a job, by a script: at a call, to a message, to a whole process."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence

from phalanx.roles.contracts import EngineCallError
from phalanx.testing.role_faults import SLOW_S, Faults

LATE_S = 45.0
"""Longer than anybody in a job of these waits for one call."""
AGAIN_S = 7.0


class WorldFault(enum.StrEnum):
    """`fails`: not done, and said so. `lost` and `unheard`: an error that leaves it open, of what was
    not done, or was. `hangs` and `hangs_done`: no answer ever. `late`: no answer, and done long
    afterwards. `twice`: done, and once more later. `slow`: it takes its time. `dies`: who is called
    ends. The rest end the control process or the trainer's, before it was done or after.
    """

    FAILS = "fails"
    LOST = "lost"
    UNHEARD = "unheard"
    HANGS = "hangs"
    HANGS_DONE = "hangs_done"
    LATE = "late"
    TWICE = "twice"
    SLOW = "slow"
    DIES = "dies"
    CONTROL_ENDS = "control_ends"
    CONTROL_ENDS_AFTER = "control_ends_after"
    DRIVER_ENDS = "driver_ends"
    DRIVER_ENDS_AFTER = "driver_ends_after"


class ProcessEndedError(BaseException):
    """The process that does this was killed: nothing of it has any effect from here on."""


class Life:
    """Of a process, which can end between any two steps of it."""

    def __init__(self) -> None:
        self.is_alive = True
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        if self.is_alive:
            self.is_alive = False
            self.ended.set_result(None)

    async def wait(self) -> None:
        """Until it ends. Whoever waits may be cancelled."""
        await asyncio.shield(self.ended)

    def check(self) -> None:
        """Raises `ProcessEndedError` in a process that was killed."""
        if not self.is_alive:
            raise ProcessEndedError


class Script:
    """`faults` are pairs: after so many calls without one, this one. `points` are all the calls there
    were; `ended` is true once no fault is left. `looks` are called at every call.
    """

    def __init__(self, faults: Sequence[tuple[int, WorldFault]] = ()) -> None:
        self._left = list(faults)
        self._gap = self._left[0][0] if self._left else 0
        self.points: list[str] = []
        self.struck: list[tuple[str, WorldFault]] = []
        self.looks: list[Callable[[], None]] = []

    @property
    def ended(self) -> bool:
        return not self._left

    def stop(self) -> None:
        """From now on everything works."""
        self._left.clear()

    def take(self, point: str) -> WorldFault | None:
        self.points.append(point)
        for look in self.looks:
            look()
        if not self._left:
            return None
        if self._gap > 0:
            self._gap -= 1
            return None
        _, fault = self._left.pop(0)
        self._gap = self._left[0][0] if self._left else 0
        self.struck.append((point, fault))
        return fault


QUIET = frozenset({"healthy", "num_requests", "weight_version", "waits_for_weights"})
"""Calls that only look, and are not counted."""
_STARTS = frozenset({"launch", "stop", "router.open", "router.add", "router.remove"})


class EngineFaults(Faults):
    """Those of one control process's calls of its engines, after `script`."""

    def __init__(
        self,
        script: Script,
        life: Life,
        end_control: Callable[[], None],
        end_driver: Callable[[], None],
        *,
        repeats: bool = True,
    ) -> None:
        """`repeats`: calls may be done twice."""
        super().__init__()
        self._repeats = repeats
        self._script = script
        self._life = life
        self._end_control = end_control
        self._end_driver = end_driver

    async def strike(
        self,
        point: str,
        act: Callable[[], None],
        *,
        crash: Callable[[], None],
        latency_s: float = 0.01,
    ) -> None:
        self._life.check()
        self.asked[point] += 1
        fault = None if point in QUIET else self._script.take(point)
        await asyncio.sleep(SLOW_S if fault is WorldFault.SLOW else latency_s)
        await self._before(point, fault, act, crash)
        if fault is not WorldFault.CONTROL_ENDS:
            act()
        await self._after(point, fault, act)

    async def _before(
        self,
        point: str,
        fault: WorldFault | None,
        act: Callable[[], None],
        crash: Callable[[], None],
    ) -> None:
        """What keeps it from being done, or from being done now."""
        match fault:
            case WorldFault.FAILS:
                raise EngineCallError(f"{point}: 400 refused", uncertain=False)
            case WorldFault.LOST:
                raise EngineCallError(f"{point}: 502 bad gateway", uncertain=True)
            case WorldFault.HANGS:
                await self._silence()
            case WorldFault.LATE:
                self._later(point, act, LATE_S)
                await self._silence()
            case WorldFault.DIES:
                crash()
                raise EngineCallError(f"{point}: connection lost", uncertain=True)
            case WorldFault.CONTROL_ENDS:
                self._end_control()
            case WorldFault.DRIVER_ENDS | WorldFault.DRIVER_ENDS_AFTER:
                self._end_driver()

    async def _after(self, point: str, fault: WorldFault | None, act: Callable[[], None]) -> None:
        """What becomes of its answer."""
        if fault is WorldFault.TWICE and self._repeats:
            self._later(point, act, AGAIN_S)
        if fault is WorldFault.CONTROL_ENDS_AFTER:
            self._end_control()
        self._life.check()
        if fault is WorldFault.UNHEARD:
            raise EngineCallError(f"{point}: 502 bad gateway", uncertain=True)
        if fault is WorldFault.HANGS_DONE:
            await self._silence()

    def _later(self, point: str, act: Callable[[], None], after_s: float) -> None:
        """A process is started and stopped once: nothing carries these but a call in this one."""
        if point not in _STARTS:
            asyncio.get_running_loop().call_later(after_s, act)

    async def _silence(self) -> None:
        await self._life.wait()
        self._life.check()
