"""Calls that change something, in the order in which their caller made them: one that arrives after a
later one of the same caller is refused, however long it was under way.
"""

from __future__ import annotations

from phalanx.errors import InvalidRequestError
from phalanx.wire.call_order import HEADER, CallNumber

_MAX_CALLERS = 64


class CallOrder:
    """Callers follow one another: the first call of a new one takes the engine over, and all others
    are refused from then on, for what they have under way must not be done afterwards.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._now: str | None = None
        self._place = ""

    def check(self, header: str | None, host: str | None = None) -> None:
        """Of a call that has arrived from `host`, with what its header says; None: its caller keeps
        no order.

        Raises `InvalidRequestError` for one that is late, or whose caller is not the last one.
        """
        if header is None:
            return
        call = CallNumber.parse(header)
        known = self._last.get(call.caller)
        if known is not None and call.caller != self._now:
            raise InvalidRequestError(
                f"{HEADER}={header} is refused, and nothing has changed: caller {self._now!r}"
                f"{self._place} has taken this engine's memory over since, and one manager at a time"
                " may move it. Have only one, and have that one connect anew, as `phalanx recover"
                " ROLE/MODEL/N` does",
                field=HEADER,
            )
        if known is not None and call.number < known:
            raise InvalidRequestError(
                f"{HEADER}={header} comes after a later call, which was done; nothing has changed",
                field=HEADER,
            )
        self._last[call.caller] = call.number
        self._now, self._place = call.caller, "" if host is None else f" at {host}"
        while len(self._last) > _MAX_CALLERS:
            del self._last[next(iter(self._last))]
