"""Watches a job: which phase it is in, and who holds how many bytes of which device."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

from phalanx.client import PhaseClient
from phalanx.device_ledger import DeviceLedger
from phalanx.errors import PhalanxError

_LOOK_S = 0.1
"""Between two looks at the ledger: what is held for less is not in the picture, but in the peaks."""


@dataclass(frozen=True)
class Span:
    """A phase of a batch, from when it could be worked in to the beginning of the next change."""

    phase: str
    batch: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Change:
    """From then on the device's memory is held like this, by role."""

    at_s: float
    device: int
    held: dict[str, int]


@dataclass
class Timeline:
    """What was seen, in seconds since the start."""

    num_devices: int
    budget_bytes: int
    spans: list[Span] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    peaks: tuple[int, ...] = ()
    end_s: float = 0.0

    def switches(self) -> list[tuple[str, float]]:
        """How long it took from each phase's end to the next one's beginning, by its name."""
        following = zip(self.spans, self.spans[1:], strict=False)
        return [(after.phase, after.start_s - before.end_s) for before, after in following]


class Watcher:
    """Fills a timeline until it is closed."""

    def __init__(self, control_url: str, ledger: DeviceLedger) -> None:
        self.timeline = Timeline(ledger.num_devices, ledger.budget_bytes)
        self._ledger = ledger
        self._start_s = time.monotonic()
        self._end = threading.Event()
        self._client = PhaseClient(control_url)
        self._threads = [
            threading.Thread(target=self._watch_memory),
            threading.Thread(target=self._watch_phases),
        ]

    def __enter__(self) -> Timeline:
        for thread in self._threads:
            thread.start()
        return self.timeline

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._client.close()
        for thread in self._threads:
            thread.join()
        self.timeline.end_s = self._now_s()

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _watch_memory(self) -> None:
        before: dict[int, dict[str, int]] = {}
        while not self._end.wait(_LOOK_S):
            for device in self._ledger.devices():
                held: dict[str, int] = defaultdict(int)
                for one in device.held:
                    held[one.owner.partition("/")[0]] += one.num_bytes
                if before.get(device.device) != held:
                    before[device.device] = held
                    change = Change(self._now_s(), device.device, dict(held))
                    self.timeline.changes.append(change)
            self.timeline.peaks = self._ledger.peaks()

    def _watch_phases(self) -> None:
        number: int | None = None
        phase, batch, start_s = "", "", 0.0
        while not self._end.is_set():
            try:
                document = self._client.phases() if number is None else self._client.wait(number)
            except PhalanxError:
                # The job has ended, or this was closed.
                break
            number = document.number
            now = (document.phase or "", document.batch or "")
            if document.transition is not None:
                now = ("", "")
            if now != (phase, batch):
                if phase:
                    self.timeline.spans.append(Span(phase, batch, start_s, self._now_s()))
                phase, batch, start_s = *now, self._now_s()
        if phase:
            self.timeline.spans.append(Span(phase, batch, start_s, self._now_s()))
