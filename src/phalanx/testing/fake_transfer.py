"""A transfer without sockets or threads: reads land or fail when a test says so."""

from __future__ import annotations

from concurrent.futures import Future

from phalanx.errors import RequestFailedError
from phalanx.schema.handoff import Handle, Source
from phalanx.step.transfer.base import TAKEN, Ending, HeldState, PageRead, Sink
from phalanx.step.transfer.holds import Holds
from phalanx.testing.clock import ManualClock


class FakeNetwork:
    """Where fakes find one another, with one clock for all."""

    def __init__(self, ttl_s: float = 120.0) -> None:
        self.clock = ManualClock()
        self.ttl_s = ttl_s
        self.members: dict[str, FakeTransfer] = {}


class PendingRead:
    """A read that has begun: `land` it or `fail` it."""

    def __init__(self, holds: Holds, handle: Handle, read: PageRead, sink: Sink) -> None:
        self.read = read
        self.future: Future[None] = Future()
        self._holds = holds
        self._hold = handle.hold
        self._sink = sink

    def land(self) -> None:
        """Copy what is held and complete the read; a hold that is gone fails it."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            with self._holds.reading(self._hold, self.read) as content:
                for index in range(content.num_chunks):
                    self._sink.write(index, memoryview(bytearray(content.chunk(index))))
                self._sink.finish()
        except RequestFailedError as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(None)

    def fail(self, message: str) -> None:
        """The read fails with this message."""
        self.future.set_exception(RequestFailedError(message))


class FakeTransfer:
    """One engine's end on a `FakeNetwork`. `pending` are its own reads that have not ended."""

    def __init__(self, network: FakeNetwork, name: str) -> None:
        self.holds = Holds(network.clock, network.ttl_s)
        self.reads: list[PendingRead] = []
        self.released: list[Ending] = []
        self._network = network
        self._source = Source("fake", name, 0, "")
        network.members[name] = self

    @property
    def source(self) -> Source:
        return self._source

    @property
    def pending(self) -> list[PendingRead]:
        return [one for one in self.reads if not one.future.done()]

    def hold(self, state: HeldState) -> Handle:
        return Handle(self._source, self.holds.add(state))

    def take_back(self, handle: Handle) -> HeldState | None:
        return self.holds.take_back(handle.hold) if handle.source == self._source else None

    def read(self, handle: Handle, read: PageRead, sink: Sink) -> Future[None]:
        holder = self._network.members[handle.source.host]
        self.reads.append(PendingRead(holder.holds, handle, read, sink))
        return self.reads[-1].future

    def release(self, handle: Handle, ending: Ending = TAKEN) -> None:
        self.released.append(ending)
        self._network.members[handle.source.host].holds.end(handle.hold, ending)

    def close(self) -> None:
        self.holds.close()
