"""How many requests each server has, and the choice of the one with the fewest.

Choosing and counting are one step, so that requests that arrive together spread; among servers with
equally many, the one that was chosen longest ago gets the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Generic, Protocol

import msgspec
from typing_extensions import TypeVar

from phalanx.clock import Clock
from phalanx.errors import NoServerError
from phalanx.routing.resolver import RETRY_AFTER_S
from phalanx.routing.snapshot import Server

LEFT = "CANCELLED"
"""What a request came to that has told nothing: its caller has left it."""


class Countable(Protocol):
    """What requests are sent to, and counted at by its `server_id`."""

    @property
    def server_id(self) -> str: ...


ServerT = TypeVar("ServerT", bound=Countable, default=Server)
ServerT_co = TypeVar("ServerT_co", bound=Countable, default=Server, covariant=True)


class ServerAccount:
    """The requests of one server. `turn`: when it was last chosen, in choices."""

    __slots__ = ("num_in_flight", "turn")

    def __init__(self, turn: int) -> None:
        self.num_in_flight = 0
        self.turn = turn


class Ticket(msgspec.Struct, Generic[ServerT_co], eq=False):
    """One request at one server, counted from `InFlight.acquire` to `release`.

    `account` counts it, `on_release` is told once; `code`, `served_s` and `message` are its outcome.
    """

    server: ServerT_co
    account: ServerAccount
    started_s: float
    on_release: Callable[[Ticket[ServerT_co]], None] | None
    code: str = LEFT
    served_s: float | None = None
    message: str = ""

    def outcome(self, code: str, *, served_s: float | None = None, message: str = "") -> None:
        """What the request came to: a gRPC status by name, or an HTTP status in digits.

        `served_s` is the time that the server says its model took. Without an outcome the request
        was left by its caller.
        """
        self.code, self.served_s, self.message = code, served_s, message

    def release(self) -> None:
        """The request has left the server, however it ended. Once is enough, twice is once."""
        on_release, self.on_release = self.on_release, None
        if on_release is not None:
            on_release(self)

    def __enter__(self) -> Ticket[ServerT_co]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class InFlight(Generic[ServerT]):
    """Counts by server id. Belongs to one thread, which alone acquires and releases.

    `on_idle` is called with the id of a server whose last request has left. `first_turn` puts
    servers that were never chosen in another order than they come in.
    """

    def __init__(
        self,
        clock: Clock,
        on_idle: Callable[[str], None],
        first_turn: Callable[[], int] = lambda: 0,
    ) -> None:
        self._clock = clock
        self._listeners: tuple[Callable[[Ticket[ServerT], float], None], ...] = ()
        self._accounts: dict[str, ServerAccount] = {}
        self._turns = itertools.count(1)
        self._on_idle = on_idle
        self._first_turn = first_turn

    def count(self, server_id: str) -> int:
        account = self._accounts.get(server_id)
        return 0 if account is None else account.num_in_flight

    @property
    def total(self) -> int:
        return sum(account.num_in_flight for account in self._accounts.values())

    @property
    def num_accounts(self) -> int:
        """Servers that are remembered, with requests or without."""
        return len(self._accounts)

    def acquire(
        self, candidates: Sequence[ServerT], exclude: frozenset[str] = frozenset()
    ) -> Ticket[ServerT]:
        """Count one more at the least busy candidate that is not excluded.

        Raises `NoServerError` where all are.
        """
        chosen: ServerT | None = None
        best: ServerAccount | None = None
        least = turn = 0
        accounts = self._accounts
        for server in candidates:
            server_id = server.server_id
            account = accounts.get(server_id)
            if account is None:
                account = accounts[server_id] = ServerAccount(self._first_turn())
            if exclude and server_id in exclude:
                continue
            num = account.num_in_flight
            if best is None or num < least or (num == least and account.turn < turn):
                chosen, best, least, turn = server, account, num, account.turn
        if chosen is None or best is None:
            raise NoServerError(
                "every server that could take this request has been tried; send it again later",
                retry_after_s=RETRY_AFTER_S,
            )
        best.num_in_flight += 1
        best.turn = next(self._turns)
        return Ticket(chosen, best, self._clock.monotonic_s(), self._released)

    def listen(self, listener: Callable[[Ticket[ServerT], float], None]) -> None:
        """Tell `listener` of each request that leaves, and how many seconds it was there."""
        self._listeners = (*self._listeners, listener)

    def forget(self, server_id: str) -> None:
        """Drop the account of a server that is gone; it must have no requests."""
        account = self._accounts.pop(server_id, None)
        assert account is None or account.num_in_flight == 0

    def _released(self, ticket: Ticket[ServerT]) -> None:
        if self._listeners:
            duration_s = self._clock.monotonic_s() - ticket.started_s
            for listener in self._listeners:
                listener(ticket, duration_s)
        account = ticket.account
        account.num_in_flight -= 1
        if account.num_in_flight == 0:
            self._on_idle(ticket.server.server_id)
