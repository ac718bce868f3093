"""How many requests each server has, and the choice of the one with the fewest.

Choosing and counting are one step, so that requests that arrive together spread; among servers with
equally many, the one that was chosen longest ago gets the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import TracebackType

from phalanx.errors import NoServerError
from phalanx.routing.resolver import RETRY_AFTER_S
from phalanx.routing.snapshot import Server

Release = Callable[["Ticket"], None]


class _Account:
    """The requests of one server. `turn`: when it was last chosen, in choices."""

    __slots__ = ("num_in_flight", "turn")

    def __init__(self) -> None:
        self.num_in_flight = 0
        self.turn = 0


class Ticket:
    """One request at one server, counted from `InFlight.acquire` to `release`."""

    __slots__ = ("_release", "server")

    def __init__(self, server: Server, release: Release) -> None:
        self.server = server
        self._release: Release | None = release

    def release(self) -> None:
        """The request has left the server, however it ended. Once is enough, twice is once."""
        release, self._release = self._release, None
        if release is not None:
            release(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class InFlight:
    """Counts by server id. Belongs to one thread, which alone acquires and releases.

    `on_idle` is called with the id of a server whose last request has left.
    """

    def __init__(self, on_idle: Callable[[str], None]) -> None:
        self._accounts: dict[str, _Account] = {}
        self._turns = itertools.count(1)
        self._on_idle = on_idle

    def count(self, server_id: str) -> int:
        account = self._accounts.get(server_id)
        return 0 if account is None else account.num_in_flight

    @property
    def total(self) -> int:
        return sum(account.num_in_flight for account in self._accounts.values())

    def acquire(
        self, candidates: Sequence[Server], exclude: frozenset[str] = frozenset()
    ) -> Ticket:
        """Count one more at the least busy candidate that is not excluded.

        Raises `NoServerError` where all are.
        """
        chosen: Server | None = None
        best: _Account | None = None
        accounts = self._accounts
        for server in candidates:
            account = accounts.get(server.server_id)
            if account is None:
                account = accounts[server.server_id] = _Account()
            if server.server_id in exclude:
                continue
            if (
                best is None
                or account.num_in_flight < best.num_in_flight
                or (account.num_in_flight == best.num_in_flight and account.turn < best.turn)
            ):
                chosen, best = server, account
        if chosen is None or best is None:
            raise NoServerError(
                "every server that could take this request has been tried; send it again later",
                retry_after_s=RETRY_AFTER_S,
            )
        best.num_in_flight += 1
        best.turn = next(self._turns)
        return Ticket(chosen, self._released)

    def forget(self, server_id: str) -> None:
        """Drop the account of a server that is gone; it must have no requests."""
        account = self._accounts.pop(server_id, None)
        assert account is None or account.num_in_flight == 0

    def _released(self, ticket: Ticket) -> None:
        server_id = ticket.server.server_id
        account = self._accounts[server_id]
        account.num_in_flight -= 1
        if account.num_in_flight == 0:
            self._on_idle(server_id)
