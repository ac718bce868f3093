"""One rank of an engine inside a worker process: a plugin, fed by commands of the parent."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from phalanx import log
from phalanx.clock import Clock, SystemClock
from phalanx.engine import registry
from phalanx.engine.boundary import Raised, attempt
from phalanx.engine.core import EngineCore
from phalanx.engine.executors.batching import BatchingExecutor
from phalanx.engine.ranks import Rank, RankPlace
from phalanx.engine.refusals import Refusal
from phalanx.engine.registry import PluginClass
from phalanx.engine.requests import LiveRequest, RequestTable
from phalanx.engine.sinks import Output, Wakeable
from phalanx.engine.workers.crashes import crash
from phalanx.engine.workers.messages import (
    Answer,
    Apply,
    Cancel,
    Finished,
    Shutdown,
    Start,
)
from phalanx.engine.workers.payload import encode
from phalanx.engine.workers.pickled import Pickled
from phalanx.engine.workers.portable_errors import portable
from phalanx.engine.workers.runtime import DuringRequestError, WorkerChannel, WorkerRuntime
from phalanx.engine_config import EngineConfig, EntryArgs
from phalanx.errors import PhalanxError
from phalanx.log import LogSetup
from phalanx.plugin import BatchingEntry, Entry, PluginRef
from phalanx.schema.control import ControlAnswer, ReplaceWeights
from phalanx.schema.events import Event, Failed, Scheduled
from phalanx.schema.limits import Limits
from phalanx.schema.placement import WorkerPlacement
from phalanx.schema.statistics import LoopStatistics


@dataclass(frozen=True)
class EngineWorkerConfig:
    """What a worker builds its rank from; `config` names the device it was placed on.

    `plugin_args` are pickled already where several workers are given the same ones. `log` is what
    the parent's log goes to, and the worker's too.
    """

    plugin: PluginRef
    plugin_args: EntryArgs | Pickled[EntryArgs]
    config: EngineConfig
    place: RankPlace
    placement: WorkerPlacement
    log: LogSetup | None


def engine_worker_factory(config: EngineWorkerConfig) -> WorkerRuntime:
    """Join the other ranks of the replica and load the plugin."""
    if config.log is not None:
        placement = config.placement
        log.configure(
            config.log.level,
            json=config.log.json,
            file=config.log.file,
            worker=f"replica {placement.replica_id} rank {placement.replica_rank}",
        )
    plugin = _import(config.plugin)
    rank = Rank(config.config, config.place)
    if issubclass(plugin, BatchingEntry):
        return BatchingRuntime(plugin, config, rank)
    return EntryRuntime(plugin, config, rank)


class EntryRuntime:
    """A plain plugin: one request at a time, in the order in which they were sent."""

    statistics: LoopStatistics | None = None

    def __init__(self, plugin: type[Entry], config: EngineWorkerConfig, rank: Rank) -> None:
        self._config = config
        self._rank = rank
        self._clock: Clock = SystemClock()
        with rank.activated():
            self._core = EngineCore(plugin, _plugin_args(config), config.config, self._clock)

    @property
    def limits(self) -> Limits:
        return self._core.limits

    def metadata(self) -> Mapping[str, str | int | dict[str, int]]:
        return _metadata(self._config)

    def serve(self, channel: WorkerChannel) -> None:
        with self._rank.activated():
            while self._serve_next(channel):
                pass

    def _serve_next(self, channel: WorkerChannel) -> bool:
        """Execute a command, of which nothing is kept; False where it was the last."""
        received = channel.receive()
        if received is None:
            return False
        command, request = received
        match command:
            case Start(number=number):
                outcome = attempt(partial(self._execute, channel, number, request))
                if isinstance(outcome, Raised):
                    raise DuringRequestError(number, outcome.error) from outcome.error
            case Shutdown():
                return False
            case Cancel() | Apply():
                raise PhalanxError(f"a plain plugin was sent {command!r}")
        return True

    def close(self) -> None:
        with self._rank.activated():
            self._core.close()
        self._rank.close()

    def _execute(self, channel: WorkerChannel, number: int, request: Any) -> None:
        began_s = self._clock.monotonic_s()
        output = self._core.entry.step(request)
        self._rank.synchronize()
        execution_s = self._clock.monotonic_s() - began_s
        if self._config.place.is_leader:
            channel.send_events([(number, output)], execution_s, None)
        else:
            channel.send(Finished(number))


class BatchingRuntime:
    """A batching plugin: its loop runs on a thread of its own, this one reads commands."""

    def __init__(self, plugin: type[BatchingEntry], config: EngineWorkerConfig, rank: Rank) -> None:
        self._config = config
        self._channel: WorkerChannel | None = None
        self._outbox: Outbox | None = None
        on_cpu = config.config.device.target.partition(":")[0] == "cpu"
        self._on_device = None if on_cpu else rank
        clock = SystemClock()
        self._requests = RequestTable(clock, config.config.runtime)
        self._executor = BatchingExecutor(
            plugin, _plugin_args(config), rank, self._requests, clock, self._failed
        )

    @property
    def limits(self) -> Limits:
        return self._executor.limits

    @property
    def statistics(self) -> LoopStatistics | None:
        return self._executor.loop_statistics

    def metadata(self) -> Mapping[str, str | int | dict[str, int]]:
        return _metadata(self._config)

    def serve(self, channel: WorkerChannel) -> None:
        self._channel = channel
        live_requests: weakref.WeakValueDictionary[int, LiveRequest] = weakref.WeakValueDictionary()
        if self._config.place.is_leader:
            self._outbox = Outbox(channel, self._executor, self._on_device)
        while (received := channel.receive()) is not None:
            command, request = received
            match command:
                case Start(number=number, rid=rid):
                    sink = ForwardingSink(number, rid, self._outbox)
                    live = self._requests.accept(rid, sink)
                    live_requests[number] = live
                    self._executor.submit(live, request)
                case Cancel(number=number):
                    found = live_requests.get(number)
                    if found is not None:
                        self._executor.cancel(found)
                case Apply(number=number, op=op):
                    if isinstance(op, ReplaceWeights):
                        op = msgspec.structs.replace(op, tensors=request)
                    answered = self._executor.control(op)
                    if self._outbox is not None:
                        answered.add_done_callback(partial(self._outbox.answer, number))
                case Shutdown():
                    return

    def close(self) -> None:
        if self._outbox is not None:
            self._outbox.close()  # the parent has ended its requests itself
        self._executor.close()

    def _failed(self, cause: BaseException) -> None:
        """The loop has ended; the parent hears why and ends this process."""
        if self._channel is not None:
            self._channel.send(crash("executing", cause))


class Device(Protocol):
    """What a rank computes on."""

    def synchronize(self) -> None:
        """Return when everything submitted has finished."""
        ...


class Outbox:
    """Collects a step's events for the parent, who gets them in one message.

    `device`, where there is one, has finished what it was given before they are sent: the parent
    may read its memory.
    """

    def __init__(
        self, channel: WorkerChannel, executor: BatchingExecutor, device: Device | None
    ) -> None:
        self._channel = channel
        self._executor = executor
        self._device = device
        self._events: list[tuple[int, Event]] = []
        self._closed = False

    def add(self, number: int, event: Event) -> None:
        if self._closed:
            return
        if isinstance(event, Failed):
            event = Failed(event.rid, portable(event.error))
        self._events.append((number, event))

    def close(self) -> None:
        """Send nothing from now on."""
        self._closed = True

    def wake(self) -> bool:
        """Send what was collected."""
        events, self._events = self._events, []
        if not events:
            return True
        if self._device is not None:
            self._device.synchronize()
        statistics = self._executor.loop_statistics
        outcome = attempt(partial(self._channel.send_events, events, None, statistics))
        if isinstance(outcome, Raised):
            number = _unpicklable(events)
            if number is None:
                raise outcome.error
            raise DuringRequestError(number, outcome.error) from outcome.error
        return True

    def answer(self, number: int, answered: Future[ControlAnswer]) -> None:
        """Say what became of an operation, and what it left behind."""
        error = answered.exception()
        if self._closed:
            return
        self._channel.send_events([], None, self._executor.loop_statistics)
        if error is None:
            self._channel.send(Answer(number, answered.result()))
            return
        refusal = Refusal.of(error)
        if refusal is not None:
            self._channel.send(Answer(number, False, refusal))


def _unpicklable(events: list[tuple[int, Event]]) -> int | None:
    """The first request an event of which cannot be sent."""
    for number, event in events:
        if isinstance(attempt(partial(encode, event)), Raised):
            return number
    return None


class ForwardingSink:
    """Passes a request's events on to the parent, or drops them on a rank that does not answer."""

    waiting_since_s: float | None = None

    def __init__(self, number: int, rid: str, outbox: Outbox | None) -> None:
        self._number = number
        self._rid = rid
        self._outbox = outbox
        self.mailbox: Wakeable | None = outbox

    def claim(self) -> bool:
        return True

    def schedule(self, now_s: float) -> None:
        self._forward(Scheduled(self._rid))

    def put(self, event: Output, now_s: float) -> None:
        self._forward(event)

    def withdraw(self, error: PhalanxError, now_s: float) -> None:
        pass  # only where this process is being closed

    def _forward(self, event: Event) -> None:
        if self._outbox is not None:
            self._outbox.add(self._number, event)


def _import(ref: PluginRef) -> PluginClass:
    module, _, name = ref.target.partition(":")
    plugin: Any = importlib.import_module(module)
    for part in name.split("."):
        plugin = getattr(plugin, part)
    checked: PluginClass = registry.register(plugin)
    return checked


def _plugin_args(config: EngineWorkerConfig) -> EntryArgs:
    args = config.plugin_args
    return args.load() if isinstance(args, Pickled) else args


def _metadata(config: EngineWorkerConfig) -> dict[str, str | int | dict[str, int]]:
    placement = config.placement
    return {
        "plugin": config.plugin.name,
        "worker_id": placement.worker_id,
        "replica_id": placement.replica_id,
        "replica_rank": placement.replica_rank,
        "replica_world_size": config.place.world,
        "group_ranks": dict(placement.group_ranks),
        "device": config.config.device.target,
    }
