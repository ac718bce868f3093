"""A transfer over sockets: shared memory between processes of one machine, TCP across machines.

Nothing runs before the first hold or read.
"""

from __future__ import annotations

import logging
import secrets
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from phalanx.clock import Clock, SystemClock
from phalanx.errors import ConfigurationError, RequestFailedError
from phalanx.schema.handoff import Handle, Source
from phalanx.step.transfer import client
from phalanx.step.transfer.base import TAKEN, Ending, HeldState, PageRead, Sink
from phalanx.step.transfer.channels import Channel, SharedMemory, Tcp
from phalanx.step.transfer.doorkeeper import Doorkeeper
from phalanx.step.transfer.holds import Holds

logger = logging.getLogger(__name__)

NUM_READERS = 4
NUM_RELEASERS = 2
HOLD_TTL_S = 120.0
SCHEMES = ("shm", "tcp")


class SocketTransfer:
    """See the module. Safe to share between threads."""

    def __init__(
        self, channel: Channel, *, ttl_s: float = HOLD_TTL_S, clock: Clock | None = None
    ) -> None:
        self._channel = channel
        self._clock = clock if clock is not None else SystemClock()
        self.holds = Holds(self._clock, ttl_s)
        self._lock = threading.Lock()
        self._door: tuple[Doorkeeper, Source] | None = None
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="phalanx-kv-read")
        # Apart, so that no read waits behind an engine that does not answer.
        self._releasers = ThreadPoolExecutor(NUM_RELEASERS, thread_name_prefix="phalanx-kv-release")
        self._closed = False

    @property
    def source(self) -> Source:
        return self._opened()[1]

    def hold(self, state: HeldState) -> Handle:
        door, source = self._opened()
        handle = Handle(source, self.holds.add(state))
        door.wake()
        return handle

    def take_back(self, handle: Handle) -> HeldState | None:
        return self.holds.take_back(handle.hold) if self._own(handle) else None

    def read(self, handle: Handle, read: PageRead, sink: Sink) -> Future[None]:
        with self._lock:
            self._check_open()
            return self._readers.submit(client.read, handle, read, sink, self._clock)

    def release(self, handle: Handle, ending: Ending = TAKEN) -> None:
        if self._own(handle):
            self.holds.end(handle.hold, ending)
            return
        with self._lock:
            if not self._closed:
                self._releasers.submit(_released, handle, ending)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            door, self._door = self._door, None
        self._readers.shutdown()
        # What nobody releases is freed by its holder, when its time is over.
        self._releasers.shutdown(cancel_futures=True)
        if door is not None:
            door[0].close()
        self.holds.close()

    def _own(self, handle: Handle) -> bool:
        door = self._door
        return door is not None and handle.source == door[1]

    def _opened(self) -> tuple[Doorkeeper, Source]:
        with self._lock:
            self._check_open()
            if self._door is None:
                token = secrets.token_hex(16)
                listener, source = self._channel.listen(token)
                self._door = (
                    Doorkeeper(listener, token, self._channel, self.holds, self._clock),
                    source,
                )
            return self._door

    def _check_open(self) -> None:
        if self._closed:
            raise RequestFailedError("the transfer is closed")


def _released(handle: Handle, ending: Ending) -> None:
    try:
        client.release(handle, ending)
    except RequestFailedError as error:
        logger.debug("the holder frees it when its time is over: %s", error)


def create_transfer(
    scheme: str, host: str = "", *, ttl_s: float = HOLD_TTL_S, clock: Clock | None = None
) -> SocketTransfer:
    """A transfer whose holds are read over shared memory, or over TCP at an address of `host`."""
    if scheme not in SCHEMES:
        raise ConfigurationError(f"transfer={scheme!r} is not known; allowed: {', '.join(SCHEMES)}")
    channel: Channel = SharedMemory() if scheme == "shm" else Tcp(host)
    return SocketTransfer(channel, ttl_s=ttl_s, clock=clock)
