"""The slots of one node: equal sets of static buffers that its steps take in turn.

Plans of the next step go into one slot while the step before is still computed from the other.
"""

from __future__ import annotations

import threading

from phalanx.device.base import DeviceBackend, DeviceEvent


class NodeSlots:
    """See the module. One counter for all captures of a node, so that two steps in a row never have
    the same slot; slots are numbered from `first`, apart from every other node's.
    """

    def __init__(self, first: int, count: int, backend: DeviceBackend) -> None:
        self._numbers = range(first, first + count)
        self._backend = backend
        self._lock = threading.Lock()
        self._taken = 0
        self._replayed: dict[int, DeviceEvent] = {}

    @property
    def numbers(self) -> range:
        return self._numbers

    def take(self) -> int:
        """The next slot in turn."""
        with self._lock:
            number = self._numbers[self._taken % len(self._numbers)]
            self._taken += 1
            return number

    def replayed(self, slot: int) -> None:
        """A step that reads the slot has just been launched on the current stream."""
        self._replayed[slot] = self._backend.record_event()

    def await_free(self, slot: int) -> None:
        """Let the current stream wait until no launched step reads the slot."""
        event = self._replayed.get(slot)
        if event is not None:
            self._backend.wait_event(event)
