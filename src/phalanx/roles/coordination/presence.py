"""Waits for roles of a phase that take no turns: they start with the job, and come back after a death
by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from phalanx.errors import RoleOperationFailedError
from phalanx.roles.coordination.moves import Tell
from phalanx.roles.coordination.tenants import Tenant
from phalanx.roles.events import EventKind
from phalanx.roles.outlook import Absence
from phalanx.schema.job_placement import PhaseSpec

LOOK_S = 1.0
"""What is to become of a role may change without its publication."""


class Presence:
    """Of `roles` by name. One `wait` at a time."""

    def __init__(self, roles: Mapping[str, Tenant], tell: Tell) -> None:
        self._roles = roles
        self._tell = tell
        self._given_up: asyncio.Future[str] | None = None

    def check(self, phase: PhaseSpec) -> dict[str, Absence]:
        """Those of the phase that do not serve yet.

        Raises `RoleOperationFailedError` where one of them cannot come by itself.
        """
        absent = {
            name: absence
            for name in phase.roles
            if name in self._roles and (absence := self._roles[name].absence()) is not None
        }
        stuck = [
            f"{_of(name, each)}; {each.remedy}" for name, each in absent.items() if each.remedy
        ]
        if stuck:
            raise _failed(phase, stuck)
        return absent

    async def wait(self, phase: PhaseSpec, show: Callable[[str], None]) -> None:
        """Until all of its roles serve. `show` is told of what is waited for.

        Raises `RoleOperationFailedError` as `check`, where one takes longer than its start may, and
        where it is given up.
        """
        loop = asyncio.get_running_loop()
        began_s, told = loop.time(), ""
        self._given_up = loop.create_future()
        try:
            while absent := self.check(phase):
                left_s = self._left_s(phase, absent, loop.time() - began_s)
                words = "; ".join(_of(name, each) for name, each in absent.items())
                if words != told:
                    told = words
                    show(f"waits until they serve: {words}")
                    for name, each in absent.items():
                        detail = f"phase {phase.name!r} waits until it serves: {each.words}"
                        self._tell(name, EventKind.WAITING, detail)
                await self._change(absent, min(left_s, LOOK_S))
                if self._given_up.done():
                    raise _failed(phase, [f"the job was asked to {self._given_up.result()}"])
        finally:
            self._given_up = None

    def give_up(self, meaning: str) -> bool:
        """End the wait, as the job is asked for something else; False where there is none."""
        if self._given_up is None:
            return False
        if not self._given_up.done():
            self._given_up.set_result(meaning)
        return True

    def _left_s(self, phase: PhaseSpec, absent: Mapping[str, Absence], waited_s: float) -> float:
        late = [
            f"{_of(name, each)}, and did not serve within {limit_s:g} s (deployment.startup_timeout_s);"
            f" `phalanx status` and its log say why, `phalanx phase enter` waits again"
            for name, each in absent.items()
            if waited_s >= (limit_s := self._roles[name].startup_timeout_s)
        ]
        if late:
            raise _failed(phase, late)
        return min(self._roles[name].startup_timeout_s for name in absent) - waited_s

    async def _change(self, names: Iterable[str], timeout_s: float) -> None:
        """Of one of them, or the end of the wait."""
        assert self._given_up is not None
        changes = [asyncio.create_task(self._roles[name].changed(timeout_s)) for name in names]
        try:
            ends: list[asyncio.Future[str] | asyncio.Task[None]] = [self._given_up, *changes]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for change in changes:
                change.cancel()
            await asyncio.gather(*changes, return_exceptions=True)


def _of(name: str, absence: Absence) -> str:
    return f"role {name!r}: {absence.words}"


def _failed(phase: PhaseSpec, why: Iterable[str]) -> RoleOperationFailedError:
    return RoleOperationFailedError(f"phase {phase.name!r} has not begun: {'; '.join(why)}")
