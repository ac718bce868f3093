"""Where a server is in its life, and how many requests it is answering.

starting -> ready -> draining; starting -> draining. Nothing leads back.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator
from contextlib import contextmanager


class Phase(enum.StrEnum):
    """`starting`: the model loads. `draining`: no new request is taken."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


_NEXT = {
    Phase.STARTING: (Phase.READY, Phase.DRAINING),
    Phase.READY: (Phase.DRAINING,),
    Phase.DRAINING: (),
}


class Lifecycle:
    """Belongs to the server's event loop."""

    def __init__(self, phase: Phase = Phase.STARTING) -> None:
        self._phase = phase
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._refusal: str | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def refusal(self) -> str | None:
        """Why requests for the model are refused though the server is ready."""
        return self._refusal

    @property
    def num_in_flight(self) -> int:
        """Requests for the model that have not been answered completely."""
        return self._num_in_flight

    def move(self, phase: Phase) -> None:
        """Go on to `phase`; staying where it is is allowed."""
        assert phase is self._phase or phase in _NEXT[self._phase]
        self._phase = phase
        if phase is Phase.DRAINING:
            # Whoever waits at the gate is to hear that nothing is taken any more.
            self._admitting.set()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """One request is being answered."""
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._idle.set()

    def admit(self, admitting: bool) -> None:
        """Let new requests in, or have them wait at the gate."""
        if admitting or self._phase is Phase.DRAINING:
            self._admitting.set()
        else:
            self._admitting.clear()

    def refuse(self, why: str | None) -> None:
        """Refuse requests for the model from now on, those at the gate too; None ends it."""
        self._refusal = why

    async def admitted(self) -> None:
        """Wait until new requests are let in."""
        await self._admitting.wait()

    async def idle(self, timeout_s: float | None) -> bool:
        """Wait until nothing is being answered; False where that takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
