"""A plugin that something outside makes busy is asked again, without a message to its engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx import Engine
from phalanx.engine_config import EngineArgs, EntryArgs
from phalanx.plugin import BatchingEntry, Event, Final


@dataclass(frozen=True)
class WaitArgs(EntryArgs):
    """`outside` is called on another thread with what wakes the plugin."""

    outside: Callable[[Callable[[], None]], None]


class Waits(BatchingEntry):
    """Answers a request when it was woken; has nothing to do before."""

    name = "waits"
    args_cls = WaitArgs
    request_cls = int
    output_cls = int

    def setup(self, args: WaitArgs) -> None:
        self.outside = args.outside
        self.woken = threading.Event()
        self.live: dict[str, int] = {}

    def wake_with(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def start(self, rid: str, request: int) -> None:
        self.live[rid] = request

        def come() -> None:
            self.woken.set()
            self.wake()

        self.outside(come)

    def cancel(self, rid: str) -> None:
        raise AssertionError("nobody cancels")

    @property
    def busy(self) -> bool:
        return self.woken.is_set() and bool(self.live)

    def tick(self) -> Sequence[Event]:
        events = [Final(rid, value) for rid, value in self.live.items()]
        self.live.clear()
        return events


def test_a_sleeping_loop_is_woken():
    if Waits.name not in Engine.registered():
        Engine.register(Waits)
    calls: list[Callable[[], None]] = []
    started = threading.Event()

    def outside(call: Callable[[], None]) -> None:
        calls.append(call)
        started.set()

    with Engine(EngineArgs("waits", WaitArgs(outside))) as engine:
        future = engine.submit(7)
        started.wait()
        assert not future.done()
        threading.Thread(target=calls[0]).start()
        assert future.result() == 7
