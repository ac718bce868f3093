"""The `Engine`: one class to run a plugin and to send it requests.

Everything is checked before anything is loaded; a request is checked in its caller's thread
before it is queued, and each accepted one ends exactly once.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import uuid
import weakref
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self

from phalanx.clock import Clock, SystemClock
from phalanx.engine import registry
from phalanx.engine.async_streams import AsyncResponseStream, AsyncSink
from phalanx.engine.executors import create_executor
from phalanx.engine.mailbox import Mailbox
from phalanx.engine.registry import PluginClass
from phalanx.engine.requests import RequestTable
from phalanx.engine.sinks import FutureSink
from phalanx.engine.streams import ResponseStream, ThreadSink
from phalanx.engine_config import EngineArgs, EngineConfig, use_engine_config
from phalanx.errors import (
    ConfigurationError,
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidInputError,
    InvalidRequestError,
)
from phalanx.plugin import BatchingEntry, Entry
from phalanx.schema.control import ControlOp
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import EngineStatistics


class Engine:
    """Runs one plugin inline: in this process, without another process or a port.

    Built when the plugin is loaded. All methods may be called from any thread. A plain `Entry`
    answers one request at a time in order of arrival, a `BatchingEntry` many at once. What a
    plain `Entry` raises reaches the caller unchanged; a request that fails inside a
    `BatchingEntry` raises `RequestFailedError`; an engine that is closed or whose plugin broke
    raises `EngineUnavailableError`, and a new one can be created.
    """

    register = staticmethod(registry.register)
    """Class decorator that makes a plugin known by its `name`."""
    registered = staticmethod(registry.registered)
    """Names of the registered plugins, in order."""

    def __init__(self, args: EngineArgs, *, clock: Clock | None = None) -> None:
        self._plugin = _checked_plugin(args)
        self._args = args
        self._config = args.config if args.config is not None else EngineConfig.from_env()
        self._clock = clock if clock is not None else SystemClock()
        self._requests = RequestTable(self._clock, self._config.runtime)
        self._mailboxes: weakref.WeakValueDictionary[asyncio.AbstractEventLoop, Mailbox] = (
            weakref.WeakValueDictionary()
        )
        self._mailbox_lock = threading.Lock()
        self._closed = False
        self._executor = create_executor(
            self._plugin, args.plugin_args, self._config, self._requests, self._clock
        )
        # The loop thread must have left the plugin before the interpreter goes away.
        atexit.register(self.close)

    def step(self, request: Any, *, rid: str | None = None) -> Any:
        """The complete output of `request`; a plain `Entry` computes it in this thread."""
        checked_rid = self._check(request, rid)
        return self._executor.step(checked_rid, request)

    def submit(self, request: Any, *, rid: str | None = None) -> Future[Any]:
        """A future of the complete output.

        It can be cancelled until the request reaches the plugin. On a closed or failed engine
        it has failed already; a request that is refused for its own sake raises here.
        """
        checked_rid = self._check(request, rid)
        sink = FutureSink()
        try:
            live = self._requests.accept(checked_rid, sink)
        except EngineOverloadedError:
            raise
        except EngineUnavailableError as error:
            sink.future.set_exception(error)
            return sink.future
        self._executor.submit(live, request)
        return sink.future

    def stream(self, request: Any, *, rid: str | None = None) -> ResponseStream:
        """The output in parts, for a thread: deltas, then the complete output as last item."""
        checked_rid = self._check(request, rid)
        sink = ThreadSink(self._clock)
        live = self._requests.accept(checked_rid, sink)
        self._executor.submit(live, request)
        return ResponseStream(live, sink, partial(self._executor.cancel, live))

    def astream(self, request: Any, *, rid: str | None = None) -> AsyncResponseStream:
        """The output in parts, for a coroutine of the running event loop."""
        checked_rid = self._check(request, rid)
        sink = AsyncSink(self._mailbox(asyncio.get_running_loop()), self._clock)
        live = self._requests.accept(checked_rid, sink)
        self._executor.submit(live, request)
        return AsyncResponseStream(live, sink, partial(self._executor.cancel, live))

    def cancel(self, rid: str) -> bool:
        """End a request early; False where it is not live or can no longer be stopped.

        It still ends by itself: with what it has so far, as a cancelled output.
        """
        live = self._requests.find(rid)
        return live is not None and self._executor.cancel(live)

    def control(self, op: ControlOp) -> bool:
        """Apply `op` between two steps and return when it has been; False where it was refused.

        After `Pause(ABORT)` the aborted requests have ended.
        """
        return self._executor.control(op)

    def statistics(self) -> EngineStatistics:
        """Counts of requests and the loop's newest counters; never waits for a step."""
        return self._requests.statistics(self._executor.loop_statistics)

    def close(self) -> None:
        """End what is live and release the plugin; any number of times, from any thread.

        Queued futures become cancelled; what has started, and a waiting `step` or stream, ends
        with `EngineUnavailableError`, except that a plain `Entry`'s running step is waited for.
        """
        self._closed = True
        atexit.unregister(self.close)
        self._requests.refuse(EngineUnavailableError("the engine is closed"))
        self._executor.close()

    @property
    def mode(self) -> str:
        """Where the replica runs: `inline`."""
        return "inline"

    @property
    def plugin(self) -> PluginClass:
        """The plugin's class."""
        return self._plugin

    @property
    def entry(self) -> Entry | BatchingEntry:
        """The plugin's instance; a batching one belongs to the loop's thread."""
        return self._executor.entry

    @property
    def limits(self) -> Limits:
        """Bounds on requests, as the loaded plugin reported them."""
        return self._executor.limits

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def args(self) -> EngineArgs:
        return self._args

    @property
    def version(self) -> str:
        """Version of the weights that are served."""
        return "default"

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def failure(self) -> EngineUnavailableError | None:
        """Why nothing is accepted any more: a plugin that broke, or a close; None while it is."""
        return self._requests.refusal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, request: Any, rid: str | None) -> str:
        """Refuse what can never be served; returns the request's id."""
        plugin = self._plugin
        try:
            if rid is not None and not _is_name(rid):
                raise InvalidRequestError(
                    f"rid {rid!r} must be a non-empty string that UTF-8 can hold", field="rid"
                )
            if not isinstance(request, plugin.request_cls):
                raise InvalidRequestError(
                    f"plugin {plugin.name!r} takes {plugin.request_cls.__name__}, "
                    f"not {type(request).__name__}"
                )
            with use_engine_config(self._config):
                plugin.validate(request, self._executor.limits)
        except InvalidInputError:
            self._requests.count_refused()
            raise
        return rid if rid is not None else uuid.uuid4().hex

    def _mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        with self._mailbox_lock:
            mailbox = self._mailboxes.get(loop)
            if mailbox is None:
                mailbox = self._mailboxes[loop] = Mailbox(loop)
            return mailbox


def _checked_plugin(args: EngineArgs) -> PluginClass:
    if not isinstance(args, EngineArgs):
        raise ConfigurationError(f"args is {type(args).__name__}; it must be phalanx.EngineArgs")
    plugin = registry.plugin_class(args.plugin)
    if not isinstance(args.plugin_args, plugin.args_cls):
        raise ConfigurationError(
            f"plugin {plugin.name!r} takes plugin_args of type {plugin.args_cls.__name__}, "
            f"not {type(args.plugin_args).__name__}"
        )
    if args.config is not None and not isinstance(args.config, EngineConfig):
        raise ConfigurationError(
            f"config is {type(args.config).__name__}; it must be phalanx.EngineConfig or None"
        )
    return plugin


def _is_name(rid: object) -> bool:
    """Whether `rid` can name a request wherever it goes."""
    if not isinstance(rid, str) or not rid:
        return False
    try:
        rid.encode()
    except UnicodeEncodeError:
        return False
    return True
