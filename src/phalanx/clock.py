"""The clock interface: whoever needs the time takes a `Clock`, so that tests can drive it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds for durations and deadlines, wall seconds for time stamps."""

    def monotonic_s(self) -> float: ...

    def wall_s(self) -> float: ...


class SystemClock:
    """The machine's clock."""

    # Asked several times a request, so that a call less of Python counts.
    monotonic_s = staticmethod(time.monotonic)

    def wall_s(self) -> float:
        return time.time()  # noqa: TID251
