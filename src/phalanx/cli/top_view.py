"""What `phalanx top` shows of one server, from one look to the next."""

from __future__ import annotations

import threading

from rich.console import Console, RenderableType
from rich.text import Text

from phalanx.cli.frames import frames
from phalanx.cli.replica_rates import load_between
from phalanx.cli.replica_table import replica_table
from phalanx.cli.server_snapshot import Absent, Snapshot, take_snapshot
from phalanx.errors import EngineUnavailableError


class TopView:
    """Looks at the server at `url`; keeps what it saw while the server is away."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self._url = url
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._seen: tuple[Snapshot, Snapshot | None] | None = None

    def once(self) -> RenderableType:
        """The load since the start. Raises where there is no server that is ready."""
        snapshot = self._take()
        if isinstance(snapshot, Absent):
            raise EngineUnavailableError(snapshot.reason)
        return self._table(snapshot, None)

    def first(self) -> RenderableType:
        """The first look. Raises where nothing answers: the address is wrong, most likely."""
        snapshot = self._take()
        if isinstance(snapshot, Absent) and not snapshot.answered:
            raise EngineUnavailableError(f"{snapshot.reason}; is `phalanx serve` running there?")
        return self._frame(snapshot)

    def next(self) -> RenderableType:
        """The load since the last look; the last one's, marked, while the server is away."""
        return self._frame(self._take())

    def watch(self, console: Console, interval_s: float) -> None:
        """Look every `interval_s` seconds until Ctrl-C."""
        pause = threading.Event()
        try:
            with frames(console) as show:
                show(self.first())
                while not pause.wait(interval_s):
                    show(self.next())
        except KeyboardInterrupt:
            return

    def _take(self) -> Snapshot | Absent:
        return take_snapshot(self._url, self._api_key, self._timeout_s)

    def _frame(self, snapshot: Snapshot | Absent) -> RenderableType:
        if isinstance(snapshot, Absent):
            reason = f"{snapshot.reason}; trying again"
            return Text(reason) if self._seen is None else self._table(*self._seen, absent=reason)
        before = None if self._seen is None else self._seen[0]
        self._seen = (snapshot, before)
        return self._table(snapshot, before)

    def _table(
        self, snapshot: Snapshot, before: Snapshot | None, absent: str | None = None
    ) -> RenderableType:
        title = f"{snapshot.model} ({snapshot.plugin}) at {self._url}"
        load = load_between(None if before is None else before.statistics, snapshot.statistics)
        return replica_table(title, load, absent)
