"""Follows the control process of a job: its roles, their snapshots and their events.

While it cannot be reached the last snapshots stay, and requests go on to the engines that they show.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections import deque
from collections.abc import Callable
from urllib.parse import quote

from phalanx.clock import Clock
from phalanx.errors import InvalidInputError, MalformedRequestError
from phalanx.gateway.alarm import Alarm
from phalanx.gateway.gateway_url import GatewayUrl
from phalanx.gateway.http_get import get
from phalanx.gateway.roles.control_answers import Events, RoleNames, ToldEvent, decoded
from phalanx.routing.roles.documents import snapshot_of
from phalanx.routing.roles.mirror import RoleMirror
from phalanx.routing.roles.snapshot import RoleSnapshot
from phalanx.wire.discovery import decode_internal
from phalanx.wire.phases import PhasesDocument

logger = logging.getLogger(__name__)
POLL_S = 20.0
GRACE_S = 5.0
RETRY_S = 0.25
MAX_RETRY_S = 2.0
NUM_EVENTS = 500
_FAULTS = (OSError, TimeoutError, InvalidInputError)


class ControlFollower:
    """`run` goes on until it is cancelled. `on_role` is told of each role once its first snapshot
    has come. `phases` is the last that was told of the job's, None for one that has not.
    """

    def __init__(
        self,
        control: GatewayUrl,
        key: str | None,
        clock: Clock,
        on_role: Callable[[str, RoleMirror], None],
    ) -> None:
        self._control = control
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._tls = ssl.create_default_context() if control.tls else None
        self._clock = clock
        self._on_role = on_role
        self._mirrors: dict[str, RoleMirror] = {}
        self._lost: dict[str, str] = {}
        self._names: tuple[str, ...] | None = None
        self._names_fault = "it has not answered yet"
        self._names_wanted = Alarm(clock)
        self._events: deque[ToldEvent] = deque(maxlen=NUM_EVENTS)
        self.phases: PhasesDocument | None = None
        self._address = f"{control.host}:{control.port}"
        self._name = secrets.token_hex(8)

    @property
    def events(self) -> tuple[ToldEvent, ...]:
        """The latest ones, the newest last."""
        return tuple(self._events)

    def lost(self, role: str) -> str:
        """Why nothing new comes of the role, in words, or nothing."""
        why = self._lost.get(role, "")
        return why and f"the control process at {self._address} is not heard: {why}"

    def unheard(self, role: str) -> str:
        """Why a role of that name may yet come, in words, or nothing."""
        if self._names is not None and role not in self._names:
            return ""
        why = self._names_fault if self._names is None else self._lost.get(role, "it begins")
        return f"nothing is known of role {role!r} yet: the control process has not told ({why})"

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_events())
            group.create_task(self._follow_phases())
            retry_s = RETRY_S
            while True:
                try:
                    names = decoded(await self._ask("/v1/roles"), RoleNames).roles
                except _FAULTS as error:
                    if _words(error) != self._names_fault and self._names is None:
                        logger.warning("no role is known: %s", _words(error))
                    self._names_fault = _words(error)
                    self._names_wanted.wake()
                    retry_s = min(retry_s * 2, MAX_RETRY_S)
                else:
                    retry_s = RETRY_S
                    for name in names:
                        if name not in self._lost:
                            self._lost[name] = "it has not answered yet"
                            group.create_task(self._follow(name))
                    self._names = names
                    await self._names_wanted.wait(None)
                await self._pause(retry_s)

    async def _follow(self, role: str) -> None:
        seen: RoleSnapshot | None = None
        retry_s = RETRY_S
        while True:
            try:
                snapshot = await self._poll(role, seen)
            except _FAULTS as error:
                seen = None  # the next answer is not waited for
                self._note(role, _words(error))
                self._names_wanted.wake()
                await self._pause(retry_s)
                retry_s = min(retry_s * 2, MAX_RETRY_S)
            else:
                seen = snapshot
                retry_s = RETRY_S
                self._take(role, snapshot)
                self._note(role, "")

    async def _poll(self, role: str, seen: RoleSnapshot | None) -> RoleSnapshot:
        target = f"/v1/roles/{quote(role, safe='')}?follower={self._name}"
        if seen is not None:
            epoch = quote(seen.epoch, safe="")
            target += f"&epoch={epoch}&after={seen.revision}&wait_s={POLL_S:g}"
        snapshot = snapshot_of(decode_internal(await self._ask(target)))
        if snapshot.role != role:
            raise MalformedRequestError(f"it told of role {snapshot.role!r} instead of {role!r}")
        return snapshot

    def _take(self, role: str, snapshot: RoleSnapshot) -> None:
        mirror = self._mirrors.get(role)
        if mirror is not None:
            mirror.put(snapshot)
            return
        mirror = self._mirrors[role] = RoleMirror(snapshot)
        self._on_role(role, mirror)

    async def _follow_events(self) -> None:
        epoch, last = "", 0
        retry_s = RETRY_S
        while True:
            try:
                told = decoded(
                    await self._ask(f"/v1/events?after={last}&wait_s={POLL_S:g}"), Events
                )
            except _FAULTS:
                last = 0  # another process may answer next, which counts anew
                await self._pause(retry_s)
                retry_s = min(retry_s * 2, MAX_RETRY_S)
                continue
            retry_s = RETRY_S
            known = max((event.number for event in self._events), default=0)
            if told.epoch != epoch:
                epoch, known = told.epoch, 0
                if last:
                    last = 0  # it is another process that counts anew
                    continue
            self._events.extend(event for event in told.events if event.number > known)
            last = told.last

    async def _follow_phases(self) -> None:
        query = ""
        while True:
            try:
                self.phases = decoded(await self._ask(f"/v1/phases{query}"), PhasesDocument)
            except _FAULTS:
                query = ""  # the next answer is not waited for
                await self._pause(MAX_RETRY_S)
            else:
                query = f"?after={self.phases.number}&wait_s={POLL_S:g}"

    async def _ask(self, target: str) -> bytes:
        control = self._control
        async with asyncio.timeout(POLL_S + GRACE_S):
            status, body = await get(
                control.host, control.port, target, headers=self._headers, tls=self._tls
            )
        if status == 401:
            raise MalformedRequestError("it refuses the key; give its own as --roles-key")
        if status != 200:
            raise MalformedRequestError(f"GET {target.partition('?')[0]} answered {status}")
        return body

    async def _pause(self, seconds: float) -> None:
        await Alarm(self._clock).wait(self._clock.monotonic_s() + seconds)

    def _note(self, role: str, why: str) -> None:
        known = self._lost[role]
        if why and why != known:
            stays = "its last snapshot stays" if role in self._mirrors else "nothing is known of it"
            logger.warning("role %s: %s; %s", role, why, stays)
        elif known and not why:
            logger.info("following role %s of %s", role, self._address)
        self._lost[role] = why


def _words(error: BaseException) -> str:
    return str(error) or "it does not answer"
