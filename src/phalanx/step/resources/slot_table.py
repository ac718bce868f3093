"""Which slot every (request, label) holds, and what a step reserves of the slots.

Plain bookkeeping on the host, without a lock of its own: its owner holds one around every call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from phalanx.step.outcomes import AllocationFailed, RequestOffloading
from phalanx.step.resources.slot_storage import SINK_SLOT, Contents

StreamKey = tuple[str, str]
"""(request, label)."""


@dataclass(eq=False)
class SlotStream:
    """The state of one (request, label): in a slot, or (`away`) copied to the host.

    `has_state` is False until a first step has been committed: the slot is cleared before it.
    """

    slot: int = SINK_SLOT
    has_state: bool = False
    step_in_flight: bool = False
    away: Contents | None = None


@dataclass(eq=False)
class SlotReservation:
    """What one step took: the streams it touches, which of them are new, and, once the step has
    begun, what those that held something held before.
    """

    touched: list[SlotStream] = field(default_factory=list)
    invented: list[StreamKey] = field(default_factory=list)
    begun: bool = False
    saved: tuple[list[SlotStream], Contents] | None = None


class SlotTable:
    """Slots 1 to `max_slots`; the sink is never handed out."""

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.streams: dict[str, dict[str, SlotStream]] = {}
        self._free = list(range(max_slots, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def of(self, rid: str) -> Mapping[str, SlotStream]:
        """A request's streams by label; empty for an unknown one."""
        return self.streams.get(rid, {})

    def held(self, rid: str) -> list[SlotStream]:
        """A request's streams that hold a slot."""
        return [stream for stream in self.of(rid).values() if stream.slot != SINK_SLOT]

    def refusal(self, touched: Iterable[StreamKey]) -> AllocationFailed | RequestOffloading | None:
        """Why a step on these streams cannot be reserved now, or None."""
        missing: list[StreamKey] = []
        for rid, label in touched:
            stream = self.streams[rid].get(label)
            if stream is None:
                missing.append((rid, label))
            elif stream.away is not None:
                return RequestOffloading("its state is on the host", rid, label)
        short = len(missing) - self.num_free
        if short <= 0:
            return None
        rid, label = missing[-1]
        message = f"{len(missing)} slots wanted, {self.num_free} of {self.max_slots} free"
        return AllocationFailed(message, short, rid, label)

    def reserve(self, touched: Collection[StreamKey]) -> SlotReservation:
        """Take the slots that a step needs, of which there are enough, and mark its streams."""
        reservation = SlotReservation()
        for rid, label in touched:
            stream = self.streams[rid].get(label)
            if stream is None:
                stream = self.streams[rid][label] = SlotStream(self._free.pop())
                reservation.invented.append((rid, label))
            stream.step_in_flight = True
            reservation.touched.append(stream)
        return reservation

    def undo(self, reservation: SlotReservation) -> None:
        """Give back what `reserve` took."""
        for stream in reservation.touched:
            stream.step_in_flight = False
        for rid, label in reservation.invented:
            found = self.of(rid).get(label)
            # The request may have been removed, and added again, meanwhile.
            if found is not None and found in reservation.touched:
                del self.streams[rid][label]
                self.vacate(found)

    def vacate(self, stream: SlotStream) -> None:
        """Free a stream's slot, if it has one."""
        if stream.slot != SINK_SLOT:
            self._free.append(stream.slot)
            stream.slot = SINK_SLOT

    def occupy(self, stream: SlotStream) -> int:
        """A slot for a stream without one; the caller has checked that one is free."""
        stream.slot = self._free.pop()
        return stream.slot
