"""Finds out that a peer is gone without a word."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from phalanx.gateway.http.deadline import Deadline


class Keepalive:
    """Where nothing was heard for `quiet_s`, `ping` is called; where nothing comes for `answer_s`
    then, `lost`. Nobody is asked while `wanted` says no.
    """

    def __init__(
        self,
        quiet_s: float,
        answer_s: float,
        *,
        wanted: Callable[[], bool],
        ping: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        self._quiet_s, self._answer_s = quiet_s, answer_s
        self._wanted, self._ping, self._lost = wanted, ping, lost
        self._asked = False
        self._deadline = Deadline(asyncio.get_running_loop(), self._passed)
        self._deadline.set(quiet_s)

    def heard(self) -> None:
        self._asked = False
        self._deadline.set(self._quiet_s)

    def close(self) -> None:
        self._deadline.close()

    def _passed(self) -> None:
        if self._asked:
            self._lost()
        elif self._wanted():
            self._asked = True
            self._deadline.set(self._answer_s)
            self._ping()
        else:
            self._deadline.set(self._quiet_s)
