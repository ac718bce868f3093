"""Which robot a call is from.

LeRobot's client names itself nowhere, and never sends its settings again when its connection breaks.
So a session belongs to a connection, and a new connection that did not begin with `Ready` takes over
what a robot asked for whose connection went away, of the same address and from the same machine; of
what that robot sent or was to be answered, nothing. Where several could be meant and they differ in
what they asked for, none is taken.

Clients of one process may share one connection. Nothing tells their calls apart, so the second one
is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from phalanx.clock import Clock
from phalanx.errors import InvalidRequestError, PhalanxError
from phalanx.gateway.lerobot.caller import Caller
from phalanx.gateway.lerobot.robots_file import SavedRobot
from phalanx.gateway.lerobot.session import Session
from phalanx.gateway.lerobot.settings import LeRobotSettings
from phalanx.wire.lerobot import decode_policy_instructions

AWAY_S = 0.5
"""How long a session must have had no call before another connection may take it over."""
LIVE_S = 2.0
"""How long a robot that runs may be without a call: its client asks for actions all the time."""
FOLLOWED_S = 60.0
"""After how long a session that is away is taken for that of a client which was started anew since."""
RETURN_S = 3.0
"""How long a returning robot waits for its former connection to be known as gone."""


SHARED = (
    "another robot's client uses this connection already, so their calls cannot be told apart: clients "
    "of one process share it. Give each robot a port of its own (--lerobot-port) or an x-session-id, "
    "or its own process; to start the same robot anew, wait {:g} s"
)


@dataclass
class _Entry:
    """`instructed`: since it began. `followed`: another robot began on its machine while it was away.
    `former`: whose it was before it was taken over.
    """

    session: Session
    caller: Caller
    seen_s: float
    num_calls: int = 0
    instructed: bool = False
    followed: bool = False
    former: Caller | None = None

    def is_away(self, now_s: float) -> bool:
        return not self.num_calls and now_s - self.seen_s >= AWAY_S

    def check_alone(self, now_s: float) -> None:
        """Raises `InvalidRequestError` for a beginning on the connection of a robot that runs."""
        recent = self.instructed and now_s - self.seen_s < LIVE_S
        if self.caller.session_id is None and (self.num_calls or recent):
            raise InvalidRequestError(SHARED.format(LIVE_S))


class Sessions:
    """Belongs to the gateway's event loop."""

    def __init__(
        self, make: Callable[[str], Session], settings: LeRobotSettings, clock: Clock
    ) -> None:
        self._make = make
        self._settings = settings
        self._clock = clock
        self._entries: list[_Entry] = []
        self._left = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    def all(self) -> list[tuple[Session, Caller]]:
        return [(entry.session, entry.caller) for entry in self._entries]

    def saved(self) -> list[SavedRobot]:
        """What to `restore` after a restart."""
        monotonic_s, wall_s = self._clock.monotonic_s(), self._clock.wall_s()
        return [
            SavedRobot(
                entry.caller.address,
                entry.caller.host,
                entry.caller.session_id,
                wall_s if entry.num_calls else wall_s - (monotonic_s - entry.seen_s),
                entry.session.instructions_data,
            )
            for entry in self._entries
            if entry.session.instructions is not None
        ]

    def restore(self, robot: SavedRobot) -> None:
        """Know a robot of before as one whose connection went away.

        Raises `MalformedRequestError` where its settings cannot be read.
        """
        instructions = decode_policy_instructions(robot.instructions)
        age_s = max(self._clock.wall_s() - robot.seen_wall_s, AWAY_S)
        caller = Caller(f"{robot.host}:", robot.address, robot.session_id)
        session = self._make(robot.session_id or f"{robot.host} at {robot.address}")
        session.instruct(instructions, robot.instructions)
        self._entries.append(_Entry(session, caller, self._clock.monotonic_s() - age_s))
        self._expire()

    def begin(self, caller: Caller) -> Session:
        """The session of a robot that says that it begins; of no other. Raises `InvalidRequestError`
        where another robot runs on its connection.
        """
        self._expire()
        now_s = self._clock.monotonic_s()
        entry = self._own(caller)
        if entry is None:
            for away in self._away(caller):
                away.followed = True
            entry = self._add(caller)
        else:
            entry.check_alone(now_s)
        entry.session.reset()
        entry.seen_s, entry.instructed = now_s, False
        self._place(entry, caller)
        return entry.session

    def find(self, caller: Caller) -> Session:
        """Raises `InvalidRequestError` where the caller has no session, in words for its operator."""
        entry = self._own(caller) or self._deprived(caller) or self._returning(caller)
        if entry is None:
            raise InvalidRequestError(
                "the gateway does not know this robot: it was restarted, or has not heard of it for "
                f"{self._settings.expiry_s:g} s; restart the robot's client"
            )
        self._place(entry, caller)
        return entry.session

    @contextmanager
    def instructing(self, caller: Caller) -> Iterator[Session]:
        """As `find` and `calling`, while a robot says what it asks for: once after it began."""
        own = self._own(caller)
        if own is not None:
            own.check_alone(self._clock.monotonic_s())
        session = self.find(caller)
        with self.calling(session):
            yield session
        entry = self._entry_of(session)
        if entry is not None:
            entry.instructed = True

    def tell(self, caller: Caller, error: PhalanxError) -> None:
        """Have the caller's operator told with its next call, if the caller is known."""
        entry = self._own(caller)
        if entry is not None:
            entry.session.faults.record(error)

    async def returned(self, caller: Caller) -> Session:
        """As `find`; gives the former connection some time to be known as gone."""
        end_s = self._clock.monotonic_s() + RETURN_S
        while True:
            left = self._left
            try:
                return self.find(caller)
            except InvalidRequestError:
                if self._clock.monotonic_s() >= end_s:
                    raise
            loop = asyncio.get_running_loop()
            timer = loop.call_later(RETURN_S, self._tell_left)
            try:
                await left.wait()
            finally:
                timer.cancel()

    @contextmanager
    def calling(self, session: Session) -> Iterator[None]:
        """While a call of this session runs, no other connection takes it over."""
        entry = self._entry_of(session)
        if entry is None:
            yield
            return
        entry.num_calls += 1
        entry.followed = False
        try:
            yield
        finally:
            entry.num_calls -= 1
            entry.seen_s = self._clock.monotonic_s()
            if not entry.num_calls:
                # A little later, since timers may be early by this clock.
                asyncio.get_running_loop().call_later(AWAY_S * 1.1, self._tell_left)

    async def close(self) -> None:
        entries, self._entries = self._entries, []
        await asyncio.gather(*(entry.session.close() for entry in entries), *self._closing)

    def _entry_of(self, session: Session) -> _Entry | None:
        return next((entry for entry in self._entries if entry.session is session), None)

    def _own(self, caller: Caller) -> _Entry | None:
        for entry in self._entries:
            if caller.session_id is not None:
                if entry.caller.session_id == caller.session_id:
                    return entry
            elif entry.caller == caller:
                return entry
        return None

    def _deprived(self, caller: Caller) -> _Entry | None:
        """A session like the one that another connection took over, though this one was not gone."""
        for entry in self._entries:
            if entry.former == caller and entry.session.instructions is not None:
                entry.former = None
                again = self._add(caller)
                again.session.instruct(entry.session.instructions, entry.session.instructions_data)
                return again
        return None

    def _returning(self, caller: Caller) -> _Entry | None:
        """The session that a new connection takes over, if there is one."""
        self._expire()
        away = self._away(caller)
        if not away:
            return None
        if any(other.session.instructions != away[0].session.instructions for other in away):
            raise InvalidRequestError(
                f"{len(away)} robots of {caller.address} lost their connections, and it cannot be "
                "told which one this is; restart its client, and give each robot a port "
                "(--lerobot-port) or a host name of its own"
            )
        latest = max(away, key=lambda entry: entry.seen_s)
        latest.former, latest.followed = latest.caller, False
        latest.session.reset()
        return latest

    def _away(self, caller: Caller) -> list[_Entry]:
        """Those whose connection went away and whose robot this may be."""
        if caller.session_id is not None:
            return []
        now_s = self._clock.monotonic_s()
        return [
            entry
            for entry in self._entries
            if entry.is_away(now_s)
            and entry.caller.session_id is None
            and (entry.caller.address, entry.caller.host) == (caller.address, caller.host)
        ]

    def _place(self, entry: _Entry, caller: Caller) -> None:
        """The entry's robot is at that connection now."""
        entry.caller = caller
        entry.session.pace(caller.fps)

    def _add(self, caller: Caller) -> _Entry:
        if len(self._entries) >= self._settings.max_sessions:
            raise InvalidRequestError(
                f"{len(self._entries)} robots are connected, and no more are taken"
            )
        session = self._make(caller.session_id or f"{caller.peer} at {caller.address}")
        entry = _Entry(session, caller, self._clock.monotonic_s())
        self._entries.append(entry)
        return entry

    def _expire(self) -> None:
        now_s = self._clock.monotonic_s()
        for entry in list(self._entries):
            longest_s = FOLLOWED_S if entry.followed else self._settings.expiry_s
            if not entry.num_calls and now_s - entry.seen_s > longest_s:
                self._remove(entry)

    def _remove(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        closing = asyncio.get_running_loop().create_task(entry.session.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _tell_left(self) -> None:
        left, self._left = self._left, asyncio.Event()
        left.set()
