"""Calls that change something, in the order in which their caller made them: one that arrives after a
later one of the same caller is refused, however long it was under way.
"""

from __future__ import annotations

from phalanx.errors import InvalidRequestError
from phalanx.wire.call_order import HEADER, CallNumber

_MAX_CALLERS = 64


class CallOrder:
    """Callers follow one another: with the first call of a new one, all others are late."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._now: str | None = None

    def check(self, header: str | None) -> None:
        """Of a call that has arrived, with what its header says; None: its caller keeps no order.

        Raises `InvalidRequestError` for one that is late.
        """
        if header is None:
            return
        call = CallNumber.parse(header)
        known = self._last.get(call.caller)
        if known is not None and (call.caller != self._now or call.number < known):
            raise InvalidRequestError(
                f"{HEADER}={header} comes after a later call, which was done; nothing has changed",
                field=HEADER,
            )
        self._last[call.caller] = call.number
        self._now = call.caller
        while len(self._last) > _MAX_CALLERS:
            del self._last[next(iter(self._last))]
