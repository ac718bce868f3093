"""The `Engine`: one class to run a plugin and to send it requests.

Everything is checked before anything is loaded; a request is checked in its caller's thread
before it is queued, and each accepted one ends exactly once.
"""

from __future__ import annotations

import asyncio
import atexit
import sys
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Self

from phalanx import settings
from phalanx.clock import Clock, SystemClock
from phalanx.engine import registry
from phalanx.engine.async_streams import AsyncResponseStream, AsyncSink
from phalanx.engine.checks import check_request, check_rollout, checked_deployment, checked_plugin
from phalanx.engine.deployments import create_deployment
from phalanx.engine.device_use import create_device_use
from phalanx.engine.dispatcher import RequestDispatcher
from phalanx.engine.mailbox import Mailboxes
from phalanx.engine.registry import PluginClass
from phalanx.engine.requests import RequestTable
from phalanx.engine.sinks import CallerSink, FutureSink
from phalanx.engine.startup import Startup
from phalanx.engine.streams import ResponseStream, ThreadSink
from phalanx.engine.training import Training, not_here
from phalanx.engine.weight_update import WeightUpdate
from phalanx.engine_config import EngineArgs, EngineConfig, RuntimeConfig, use_engine_config
from phalanx.errors import (
    EngineAsleepError,
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidInputError,
)
from phalanx.plugin import BatchingEntry, Entry
from phalanx.schema.deployment import DeploymentConfig
from phalanx.schema.launch import Mode, choose_mode
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import EngineStatistics


class Engine(Training):
    """Runs one plugin: in this process, as replicas in local workers, or as a launcher's rank.

    `deployment` says where (`DeploymentConfig()`, the default, keeps a single rank of a single
    replica in this process); what can be refused is refused before anything is started. Built when
    every replica is loaded, or without `auto_start` at once. All methods may be called from any
    thread. In this process a plain `Entry` answers one request at a time in order of arrival, and
    what it raises reaches the caller unchanged; in workers that fails the engine. A request that
    fails inside a `BatchingEntry` raises `RequestFailedError`; an engine that is closed or whose
    plugin or workers broke raises `EngineUnavailableError`, and a new one can be created.

    Workers start with Python's spawn, which imports the main module anew: build the engine under
    `if __name__ == "__main__":`.
    """

    register = staticmethod(registry.register)
    """Class decorator that makes a plugin known by its `name`."""
    registered = staticmethod(registry.registered)
    """Names of the registered plugins, in order."""

    def __init__(
        self,
        args: EngineArgs,
        *,
        deployment: DeploymentConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._plugin = checked_plugin(args)
        self._args = args
        self._config = args.config if args.config is not None else EngineConfig.from_env()
        self._deployment = checked_deployment(deployment)
        self._plugin.validate_parallel(self._config.parallel)
        self._plugin.validate_args(args.plugin_args, self._config.parallel)
        world = self._config.parallel.infer_replica_world_size()
        self._mode = choose_mode(self._deployment, world, settings.launcher())
        self._clock = clock if clock is not None else SystemClock()
        self._requests = RequestTable(
            self._clock, self._admission(world), self._deployment.replica_count
        )
        self._mailboxes = Mailboxes()
        self._weight_update = WeightUpdate(self._clock)
        self._closed = False
        running = create_deployment(
            self._mode,
            self._plugin,
            args.plugin_args,
            self._config,
            self._deployment,
            self._requests,
            self._clock,
        )
        self._device_use = create_device_use(self._mode, self._config, self._deployment)
        # A launcher's ranks of one replica each have an engine, which see requests at other times.
        guarded = self._mode is not Mode.EXTERNAL or world == 1
        dispatch = partial(
            RequestDispatcher, requests=self._requests, num_ranks=world, guarded=guarded
        )
        self._startup = Startup(running, self._requests, dispatch)
        # Loop threads and workers must have ended before the interpreter goes away.
        atexit.register(self.close)
        if self._deployment.auto_start:
            self.setup()

    def setup(self) -> None:
        """Start and load every replica, unless that has been done; the first request does so too.

        A start that fails closes the engine.
        """
        self._started()

    def step(self, request: Any, *, rid: str | None = None) -> Any:
        """The complete output of `request`; a plain `Entry` computes it in this thread."""
        checked_rid, dispatcher = self._check(request, rid)
        return dispatcher.step(checked_rid, request, CallerSink())

    def submit(self, request: Any, *, rid: str | None = None) -> Future[Any]:
        """A future of the complete output.

        It can be cancelled until the request reaches the plugin, in workers not at all. Its
        callbacks run on a thread of the engine and must not wait for anything. On a closed or failed engine
        it has failed already; a request that is refused for its own sake, or by an engine that is
        full or asleep, raises here.
        """
        sink = FutureSink()
        try:
            checked_rid, dispatcher = self._check(request, rid)
            dispatcher.submit(checked_rid, request, sink)
        except (EngineAsleepError, EngineOverloadedError):
            raise
        except EngineUnavailableError as error:
            sink.future.set_exception(error)
        return sink.future

    def stream(self, request: Any, *, rid: str | None = None) -> ResponseStream:
        """The output in parts, for a thread: deltas, then the complete output as last item."""
        checked_rid, dispatcher = self._check(request, rid)
        sink = ThreadSink(self._clock)
        live = dispatcher.submit(checked_rid, request, sink)
        return ResponseStream(live, sink, partial(dispatcher.cancel, live))

    def astream(self, request: Any, *, rid: str | None = None) -> AsyncResponseStream:
        """The output in parts, for a coroutine of the running event loop."""
        checked_rid, dispatcher = self._check(request, rid)
        sink = AsyncSink(self._mailboxes.of(asyncio.get_running_loop()), self._clock)
        live = dispatcher.submit(checked_rid, request, sink)
        return AsyncResponseStream(live, sink, partial(dispatcher.cancel, live))

    def cancel(self, rid: str) -> bool:
        """End a request early; False where it is not live or can no longer be stopped.

        It still ends by itself: with what it has so far, as a cancelled output.
        """
        live, dispatcher = self._requests.find(rid), self._startup.current
        return live is not None and dispatcher is not None and dispatcher.cancel(live)

    def statistics(self) -> EngineStatistics:
        """Counts of requests, in all and by replica, and loops' newest counters; never waits."""
        dispatcher = self._startup.current
        if dispatcher is None:
            return self._requests.statistics([None] * self._deployment.replica_count)
        return self._device_use.measured(dispatcher.statistics())

    def close(self) -> None:
        """End what is live and release the replicas; any number of times, from any thread.

        In this process queued futures become cancelled; what has started, and a waiting `step` or
        stream, ends with `EngineUnavailableError`, except that a plain `Entry`'s running step is
        waited for. Requests in workers end with `EngineUnavailableError`, and the workers stop.
        """
        self._closed = True
        atexit.unregister(self.close)
        self._requests.refuse(EngineUnavailableError("the engine is closed"))
        self._startup.close()

    @property
    def mode(self) -> str:
        """Where replicas run: `inline`, `local` or `external`."""
        return self._mode.value

    @property
    def plugin(self) -> PluginClass:
        """The plugin's class."""
        return self._plugin

    @property
    def entry(self) -> Entry | BatchingEntry | None:
        """The plugin's instance in this process; a batching one belongs to the loop's thread.

        None where the replicas run in workers.
        """
        return self._started().entry

    @property
    def limits(self) -> Limits:
        """Bounds on requests, as the loaded plugin reported them."""
        return self._started().limits

    @property
    def deployment(self) -> DeploymentConfig:
        return self._deployment

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def args(self) -> EngineArgs:
        return self._args

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

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _admission(self, world: int) -> RuntimeConfig:
        """A launcher's ranks must all accept the same requests, however fast each of them is."""
        runtime = self._config.runtime
        if self._mode is Mode.EXTERNAL and world > 1:
            return replace(runtime, max_pending_requests=sys.maxsize)
        return runtime

    def _started(self) -> RequestDispatcher:
        try:
            return self._startup.dispatcher()
        finally:
            if self._startup.current is None:  # nothing to close, and nothing ever will be
                atexit.unregister(self.close)

    def _current(self) -> RequestDispatcher | None:
        return self._startup.current

    def _single_core(self, verb: str) -> RequestDispatcher:
        if self._mode is Mode.LOCAL:
            raise not_here(verb, "this engine's replicas run in workers")
        if self._config.parallel.infer_replica_world_size() > 1:
            raise not_here(verb, "this engine's replica has several ranks")
        return self._started()

    def _step_rollout(self, dispatcher: RequestDispatcher, request: Any) -> Any:
        try:
            with use_engine_config(self._config):
                check_rollout(self._plugin, dispatcher.limits, request)
        except InvalidInputError:
            self._requests.count_refused()
            raise
        return dispatcher.step(self._requests.fresh_rid(), request, CallerSink())

    def _check(self, request: Any, rid: str | None) -> tuple[str, RequestDispatcher]:
        """Refuse what can never be served; returns the request's id and who takes it."""
        dispatcher = self._started()
        try:
            with use_engine_config(self._config):
                check_request(self._plugin, dispatcher.limits, request, rid)
        except InvalidInputError:
            self._requests.count_refused()
            raise
        return rid if rid is not None else self._requests.fresh_rid(), dispatcher
