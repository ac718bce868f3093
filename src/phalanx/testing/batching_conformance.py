"""A check that any `BatchingEntry` keeps the contract which the engine's loop relies on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from phalanx.plugin import BatchingEntry, Delta, Failed, Final, Scheduled
from phalanx.schema.control import Continue, Flush, Pause, PauseMode
from phalanx.schema.limits import Limits
from phalanx.testing.conformance import ConformanceError, require

MAX_TICKS = 100_000


def check_batching_entry(
    entry_factory: Callable[[], BatchingEntry], requests: Sequence[Any]
) -> None:
    """Drive an entry through starts, ticks, cancels and controls, or raise `ConformanceError`.

    `entry_factory` returns an entry whose `setup` has run. `requests` are at least two that
    `validate` accepts; the first must need several ticks, so that it can be caught running.
    """
    require(len(requests) >= 2, "the check needs at least two requests")
    entry = entry_factory()
    drive = _Drive(entry)
    require(isinstance(entry.limits, Limits), "limits must be a phalanx Limits")
    for request in requests:
        entry.validate(request, entry.limits)
    try:
        _check_idle(drive)
        _check_together(drive, requests)
        _check_cancel(drive, requests)
        _check_reuse(drive, requests[0])
        if _has_control(entry):
            _check_control(drive, requests)
        _check_idle(drive)
    finally:
        entry.close()


class _Drive:
    """Calls an entry as the loop does and checks each event."""

    def __init__(self, entry: BatchingEntry) -> None:
        self.entry = entry
        self.live: dict[str, object] = {}
        self.scheduled: set[str] = set()
        self.with_deltas: set[str] = set()
        self.ended: dict[str, Final | Failed] = {}

    def start(self, rid: str, request: object) -> None:
        self.ended.pop(rid, None)
        self.live[rid] = request
        self.entry.start(rid, request)
        require(self.entry.busy, f"busy is False although {rid!r} was just started")

    def tick(self) -> int:
        """Run one tick; returns how many events it gave."""
        events = self.entry.tick()
        for event in events:
            self._see(event)
        return len(events)

    def finish(self) -> None:
        """Tick until all live requests have ended."""
        for _ in range(MAX_TICKS):
            if not self.live:
                break
            require(self.entry.busy, f"busy is False although {sorted(self.live)} have not ended")
            self.tick()
        require(not self.live, f"{sorted(self.live)} have not ended after {MAX_TICKS} ticks")

    def _see(self, event: object) -> None:
        if not isinstance(event, (Scheduled, Delta, Final, Failed)):
            raise ConformanceError(f"tick returned {event!r}, which is no event")
        rid = event.rid
        require(rid in self.live, f"{event!r} came for a request that is not live")
        match event:
            case Scheduled():
                require(rid not in self.scheduled, f"{rid!r} was reported scheduled twice")
                require(rid not in self.with_deltas, f"{rid!r} had a delta before Scheduled")
                self.scheduled.add(rid)
            case Delta():
                require(rid in self.scheduled, f"{rid!r} had a delta before Scheduled")
                self.with_deltas.add(rid)
            case Final() | Failed():
                self.ended[rid] = event
                del self.live[rid]
                self.scheduled.discard(rid)
                self.with_deltas.discard(rid)

    def require_output(self, rid: str, *, cancelled: bool | None = None) -> None:
        event = self.ended[rid]
        require(isinstance(event, Final), f"{rid!r} ended in {event!r} instead of a Final")
        assert isinstance(event, Final)
        require(
            isinstance(event.payload, self.entry.output_cls),
            f"{rid!r} ended in a {type(event.payload).__name__} instead of a "
            f"{self.entry.output_cls.__name__}",
        )
        if cancelled is not None:
            require(event.cancelled is cancelled, f"{rid!r} ended with cancelled={event.cancelled}")


def _check_idle(drive: _Drive) -> None:
    entry = drive.entry
    require(not entry.busy, "busy is True although no request is live")
    entry.cancel("never started")
    require(not entry.busy, "busy is True after the cancel of an unknown id")
    held = entry.statistics()
    require(
        held.num_running == held.num_waiting == held.pool_used_tokens == 0,
        f"no request is live, and yet statistics() says {held!r}",
    )


def _check_together(drive: _Drive, requests: Sequence[Any]) -> None:
    for index, request in enumerate(requests):
        drive.start(f"alone {index}", request)
        drive.finish()
        drive.require_output(f"alone {index}", cancelled=False)
    for index, request in enumerate(requests):
        drive.start(f"together {index}", request)
    drive.finish()
    for index in range(len(requests)):
        drive.require_output(f"together {index}", cancelled=False)


def _check_cancel(drive: _Drive, requests: Sequence[Any]) -> None:
    for rid, num_ticks in (("cancelled at once", 0), ("cancelled running", 1)):
        drive.start(rid, requests[0])
        drive.start("beside it", requests[1])
        for _ in range(num_ticks):
            drive.tick()
        require(rid in drive.live, "the first request must need several ticks")
        drive.entry.cancel(rid)
        drive.entry.cancel(rid)
        drive.finish()
        drive.require_output(rid, cancelled=True)
        drive.require_output("beside it", cancelled=False)
        drive.entry.cancel(rid)
        require(not drive.entry.busy, "busy is True after the cancel of an ended request")


def _check_reuse(drive: _Drive, request: object) -> None:
    for _ in range(2):
        drive.start("again", request)
        drive.finish()
        drive.require_output("again", cancelled=False)


def _has_control(entry: BatchingEntry) -> bool:
    try:
        return entry.control(Flush())
    except NotImplementedError:
        return False


def _check_control(drive: _Drive, requests: Sequence[Any]) -> None:
    entry = drive.entry
    for mode in (PauseMode.IN_PLACE, PauseMode.RETRACT):
        for index, request in enumerate(requests):
            drive.start(f"{mode} {index}", request)
        drive.tick()
        require(not entry.control(Flush()), "flush was applied while requests are live")
        require(entry.control(Pause(mode)), f"pause {mode} was refused")
        _let_settle(drive)
        require(f"{mode} 0" in drive.live, f"pause {mode} ended a request")
        entry.cancel(f"{mode} 1")
        _let_settle(drive)
        require(f"{mode} 1" not in drive.live, "a cancel waits for the end of a pause")
        require(entry.control(Continue()), "continue was refused")
        drive.finish()
        drive.require_output(f"{mode} 0", cancelled=False)
    for index, request in enumerate(requests):
        drive.start(f"aborted {index}", request)
    drive.tick()
    require(entry.control(Pause(PauseMode.ABORT)), "pause abort was refused")
    _let_settle(drive)
    require(not drive.live, f"pause abort left {sorted(drive.live)} live")
    require(entry.statistics().paused, "statistics().paused is False during a pause")
    entry.start("during the pause", requests[0])
    drive.live["during the pause"] = requests[0]
    _let_settle(drive)
    require("during the pause" in drive.live, "a request ran during a pause")
    require(entry.control(Continue()), "continue was refused")
    drive.finish()
    drive.require_output("during the pause", cancelled=False)
    require(entry.control(Flush()), "flush was refused although no request is live")


def _let_settle(drive: _Drive) -> None:
    """Tick while the paused entry has something to report."""
    for _ in range(MAX_TICKS):
        if not drive.entry.busy:
            return
        drive.tick()
    raise ConformanceError(f"a paused entry is still busy after {MAX_TICKS} ticks")
