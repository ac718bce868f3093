"""What can go wrong with a call of an engine, a router or a launcher, by a script."""

from __future__ import annotations

import asyncio
import enum
from collections import Counter, deque
from collections.abc import Callable, Iterable

from phalanx.roles.contracts import EngineCallError


class Fault(enum.StrEnum):
    """`refused`: not done, and said so. `no_room`: so, for want of device memory. `taken_over`: so,
    since somebody else manages the engine. `unsent` and
    `unanswered`: an error that leaves it open, of a call that was not done, or that was. `hang` and
    `hang_done`: no answer until it is cancelled. `crash`: the process ends during the call. `slow`:
    it takes its time.
    """

    REFUSED = "refused"
    NO_ROOM = "no_room"
    TAKEN_OVER = "taken_over"
    UNSENT = "unsent"
    UNANSWERED = "unanswered"
    HANG = "hang"
    HANG_DONE = "hang_done"
    CRASH = "crash"
    SLOW = "slow"


SLOW_S = 3.0


class Faults:
    """Scripted by the point where they strike, such as `release` or `router.add`; `*` is any point.

    `asked` counts the calls of each point.
    """

    def __init__(self) -> None:
        self._scripts: dict[str, deque[Fault | None]] = {}
        self._always: dict[str, Fault] = {}
        self.asked: Counter[str] = Counter()

    def next(self, point: str, faults: Iterable[Fault | None]) -> None:
        """The next calls of `point` meet these, one each; None is none."""
        self._scripts.setdefault(point, deque()).extend(faults)

    def always(self, point: str, fault: Fault | None) -> None:
        """Every call of `point` that meets none of `next`; None ends that."""
        if fault is None:
            self._always.pop(point, None)
        else:
            self._always[point] = fault

    def stop(self) -> None:
        """From now on everything works."""
        self._scripts.clear()
        self._always.clear()

    def take(self, point: str) -> Fault | None:
        self.asked[point] += 1
        for name in (point, "*"):
            script = self._scripts.get(name)
            if script:
                return script.popleft()
        return self._always.get(point) or self._always.get("*")

    async def strike(
        self,
        point: str,
        act: Callable[[], None],
        *,
        crash: Callable[[], None],
        latency_s: float = 0.01,
    ) -> None:
        """Do `act`, a while later, or what the script says instead."""
        fault = self.take(point)
        await asyncio.sleep(SLOW_S if fault is Fault.SLOW else latency_s)
        if fault is Fault.REFUSED:
            raise EngineCallError(f"{point}: 400 refused", uncertain=False)
        if fault is Fault.NO_ROOM:
            raise EngineCallError(f"{point}: 507 no room", uncertain=False, out_of_memory=True)
        if fault is Fault.TAKEN_OVER:
            raise EngineCallError(f"{point}: 400 not yours", uncertain=False, taken_over=True)
        if fault is Fault.CRASH:
            crash()
            raise EngineCallError(f"{point}: connection lost", uncertain=True)
        if fault not in (Fault.UNSENT, Fault.HANG):
            act()
        if fault in (Fault.UNSENT, Fault.UNANSWERED):
            raise EngineCallError(f"{point}: 502 bad gateway", uncertain=True)
        if fault in (Fault.HANG, Fault.HANG_DONE):
            await asyncio.get_running_loop().create_future()
