"""The thread that answers who asks for what is held: readers, releases, and those who watch."""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from phalanx.clock import Clock
from phalanx.errors import RequestFailedError
from phalanx.step.attempt import attempt
from phalanx.step.transfer.base import Ending, Reason
from phalanx.step.transfer.channels import Channel
from phalanx.step.transfer.frames import (
    MAX_CALL_BYTES,
    Answer,
    Call,
    CallBuffer,
    Ended,
    FrameError,
    Header,
    Read,
    Refused,
    Release,
    Watch,
    encoded,
)
from phalanx.step.transfer.holds import Holds

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
NUM_SENDERS = 4
CALL_TIMEOUT_S = 10.0
"""How long a connection may take to say what it wants."""
ACCEPT_PAUSE_S = 0.1
"""How long nobody is let in after the system could not give a connection, as without descriptors."""
SEND_TIMEOUT_S = 30.0
"""How long a reader may take nothing."""


class _Caller:
    """A connection that has not been answered yet."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self.connection = connection
        self.buffer = CallBuffer()
        self.deadline_s: float | None = deadline_s


class Doorkeeper:
    """Serves `holds` on `listener` until `close`."""

    def __init__(
        self, listener: socket.socket, token: str, channel: Channel, holds: Holds, clock: Clock
    ) -> None:
        self._listener = listener
        self._token = token.encode()
        self._channel = channel
        self._holds = holds
        self._clock = clock
        self._callers: dict[int, _Caller] = {}
        self._todo: deque[Callable[[], None]] = deque()
        self._closing = False
        self._closed_until_s: float | None = None
        self._senders = ThreadPoolExecutor(NUM_SENDERS, thread_name_prefix="phalanx-kv-send")
        self._waker, self._woken = socket.socketpair()
        for one in (listener, self._waker, self._woken):
            one.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="phalanx-kv-door", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look at what is held again; from any thread."""
        # Full, so that it wakes anyway, or closed.
        with suppress(OSError):
            self._waker.send(b"\0")

    def close(self) -> None:
        """Answer what is being read and everyone who watches; then end."""
        self._closing = True
        self.wake()
        self._thread.join()
        self._senders.shutdown()

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(self._patience_s()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._drain_wakes()
                else:
                    self._attend(self._callers[key.fd])
            self._do_all()
            self._drop_silent()
            self._open_again()
        self._holds.close()
        self._do_all()
        for caller in list(self._callers.values()):
            self._forget(caller).close()
        self._selector.close()
        for one in (self._listener, self._waker, self._woken):
            one.close()

    def _patience_s(self) -> float | None:
        """How long nothing is due; None for ever."""
        next_s = self._holds.expire()
        if self._todo:
            return 0.0
        now_s = self._clock.monotonic_s()
        deadlines = [one.deadline_s for one in self._callers.values()]
        deadlines.append(self._closed_until_s)
        waits = [deadline_s - now_s for deadline_s in deadlines if deadline_s is not None]
        waits += [] if next_s is None else [next_s]
        return max(0.0, min(waits)) if waits else None

    def _drain_wakes(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)

    def _do_all(self) -> None:
        while self._todo:
            self._todo.popleft()()

    def _drop_silent(self) -> None:
        now_s = self._clock.monotonic_s()
        for caller in list(self._callers.values()):
            if caller.deadline_s is not None and caller.deadline_s <= now_s:
                self._forget(caller).close()

    def _open_again(self) -> None:
        until_s = self._closed_until_s
        if until_s is not None and until_s <= self._clock.monotonic_s():
            self._closed_until_s = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            # Who knocks stays where they are: asked again at once the answer would be the same.
            logger.warning("nobody is let in for %g s: %s", ACCEPT_PAUSE_S, error)
            self._selector.unregister(self._listener)
            self._closed_until_s = self._clock.monotonic_s() + ACCEPT_PAUSE_S
            return
        if len(self._callers) >= MAX_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        caller = _Caller(connection, self._clock.monotonic_s() + CALL_TIMEOUT_S)
        self._callers[connection.fileno()] = caller
        self._selector.register(connection, selectors.EVENT_READ)

    def _attend(self, caller: _Caller) -> None:
        """Hear a caller; whatever goes wrong over it costs this connection and no other."""
        error = attempt(partial(self._hear, caller)).error
        if error is not None:
            logger.warning("a caller is dropped, who asked for what is held: %r", error)
            if self._callers.get(caller.connection.fileno()) is caller:
                self._forget(caller)
            caller.connection.close()

    def _hear(self, caller: _Caller) -> None:
        try:
            data = caller.connection.recv(MAX_CALL_BYTES)
            call = caller.buffer.feed(data) if data else None
        except BlockingIOError:
            return
        except FrameError as error:
            self._answer(self._forget(caller), Refused(str(error)))
            return
        except OSError:
            data, call = b"", None
        if not data:
            self._forget(caller).close()
        elif call is not None:
            self._handle(caller, call)

    def _handle(self, caller: _Caller, call: Call) -> None:
        if not hmac.compare_digest(call.token.encode(), self._token):
            self._answer(self._forget(caller), Refused("the token is not this engine's"))
            return
        match call:
            case Read():
                self._senders.submit(self._send, self._forget(caller), call)
            case Release(hold=hold, ending=ending):
                self._holds.end(hold, ending)
                self._answer(self._forget(caller), Ended(ending))
            case Watch(hold=hold):
                caller.deadline_s = None
                self._holds.watch(hold, partial(self._ended, caller))

    def _ended(self, caller: _Caller, ending: Ending) -> None:
        """A hold has ended, which this thread or another one noticed."""

        def tell() -> None:
            if self._callers.get(caller.connection.fileno()) is caller:
                self._answer(self._forget(caller), Ended(ending))

        self._todo.append(tell)
        self.wake()

    def _forget(self, caller: _Caller) -> socket.socket:
        connection = caller.connection
        self._selector.unregister(connection)
        del self._callers[connection.fileno()]
        return connection

    def _answer(self, connection: socket.socket, answer: Answer) -> None:
        """Answers are small: they fit what the system buffers for a connection."""
        # Where nobody is there any more, the hold is bounded by time.
        with connection, suppress(OSError):
            connection.send(encoded(answer))

    def _send(self, connection: socket.socket, call: Read) -> None:
        """Send what is held; a reader that breaks off has dropped it."""
        with connection:
            connection.settimeout(SEND_TIMEOUT_S)
            try:
                with self._holds.reading(call.hold, call.read) as content:
                    header = Header(content.num_chunks, content.chunk_bytes)
                    connection.sendall(encoded(header))
                    self._channel.send(connection, content)
            except RequestFailedError as error:
                connection.settimeout(CALL_TIMEOUT_S)
                self._answer(connection, Refused(str(error)))
            except OSError as error:
                message = f"its reader broke off: {error}"
                self._holds.end(call.hold, Ending(Reason.DROPPED, message))
