"""From an observation to actions: what all robot protocols of one model server share.

It keeps nothing of a request, so that requests run at the same time and share the engine. Only
waiting happens in the event loop: observations are decoded and prepared, and actions finished and
encoded, on a few threads, so that a busy model or adapter never keeps the server from answering.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from phalanx.clock import Clock
from phalanx.engine.boundary import Raised, attempt
from phalanx.engine.engine import Engine
from phalanx.errors import (
    EngineAsleepError,
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    PhalanxError,
    UnknownModelError,
)
from phalanx.plugin import PolicyAdapter
from phalanx.schema.observation import Actions, Observation, PolicyInfo
from phalanx.schema.server_config import ServerConfig
from phalanx.server.lifecycle import Lifecycle, Phase
from phalanx.server.live import LiveRequests
from phalanx.server.metrics import Outcome, PolicyStage, ServerMetrics
from phalanx.server.policy.answer_check import check_actions
from phalanx.server.policy.failures import (
    NotReadyError,
    RequestAbortedError,
    policy_failure,
)
from phalanx.server.policy.running_request import RunningRequest

logger = logging.getLogger(__name__)

BROKEN = "the policy's engine can no longer serve; the log of its server tells why"

T = TypeVar("T")


@dataclass(frozen=True)
class Times:
    """How long an answer took in all so far, and how long the model alone, waiting included."""

    total_s: float
    compute_s: float


Encode = Callable[[Actions, Times], T]
Read = Callable[[], tuple[Observation, Encode[T]]]
"""Decodes a request, and says how its actions become the answer."""


@dataclass(frozen=True)
class ServiceParts:
    """What a policy's service shares with the rest of its server."""

    lifecycle: Lifecycle
    live: LiveRequests
    metrics: ServerMetrics
    clock: Clock


class PolicyService:
    """Serves the policy `adapter` on `engine` under `name`; belongs to one event loop."""

    def __init__(
        self,
        engine: Engine,
        adapter: PolicyAdapter,
        name: str,
        config: ServerConfig,
        parts: ServiceParts,
    ) -> None:
        self.name = name
        self.engine = engine
        self.metrics = parts.metrics
        self._adapter = adapter
        self._lifecycle, self._live, self._clock = parts.lifecycle, parts.live, parts.clock
        self._max_pending = engine.config.runtime.max_pending_requests
        self._turns = asyncio.Lock() if config.exclusive else None
        self._pool = ThreadPoolExecutor(config.workers, thread_name_prefix="phalanx-policy")
        self._broken = False
        self._num_pending = 0

    @property
    def info(self) -> PolicyInfo:
        return self._adapter.info

    @property
    def failure(self) -> PhalanxError | None:
        """Why requests are not taken; None where they are."""
        memory = self.engine.memory
        return self._fault or (None if memory.ready else memory.refusal())

    @property
    def _fault(self) -> PhalanxError | None:
        """The same, but for an engine that sleeps, which refuses each request itself. A broken one
        stays broken.
        """
        if self._lifecycle.phase is not Phase.READY:
            return NotReadyError(
                f"the server is {self._lifecycle.phase}; try again later or elsewhere"
            )
        if not self._broken and self.engine.failure is None:
            return None
        return EngineUnavailableError(BROKEN)

    def check_model(self, name: str) -> None:
        """Refuse a name that is not served; an empty one means the one model."""
        if name and name != self.name:
            raise UnknownModelError(
                f"the model {name!r} is not served here; this server has {self.name!r}",
                field="model_name",
            )

    async def infer(self, observation: Observation) -> Actions:
        """The actions for `observation`."""
        return await self.answer(lambda: (observation, _as_they_are))

    async def answer(self, read: Read[T]) -> T:
        """The answer to what `read` decodes; it runs on a thread, as what it gives to encode does.

        Raises what `read` raises, `InvalidRequestError` for an observation that the policy cannot
        use, `NotReadyError` and `EngineOverloadedError` where the request never started, and the
        errors of `failures`. Cancelling it cancels the request in the engine.
        """
        started_s = self._clock.monotonic_s()
        try:
            self._refuse_unless_ready()
            with self._lifecycle.answering():
                result = await self._one(read)
        except asyncio.CancelledError:
            self.metrics.ended(Outcome.DISCONNECTED)
            raise
        except PhalanxError as error:
            self.metrics.ended(_outcome(error))
            raise
        self.metrics.ended(Outcome.COMPLETED, self._clock.monotonic_s() - started_s)
        return result

    async def warm_up(self, observation: Observation) -> None:
        """One request before any is taken, so that no robot waits for what is done once."""
        await self._one(lambda: (observation, _as_they_are))

    def close(self) -> None:
        """End the threads; what they are at is waited for."""
        self._pool.shutdown(cancel_futures=True)

    def _refuse_unless_ready(self) -> None:
        fault = self._fault
        if fault is not None:
            raise NotReadyError(str(fault))
        if self._num_pending >= self._max_pending:
            raise EngineOverloadedError(
                f"{self._num_pending} requests are pending, as many as "
                f"max_pending_requests={self._max_pending} allows; try again later"
            )

    async def _one(self, read: Read[T]) -> T:
        running = RunningRequest(uuid.uuid4().hex)
        self._live.add(running.rid, running.abort)
        self._num_pending += 1
        try:
            async with self._turn(running):
                return await self._stages(running, read)
        finally:
            self._num_pending -= 1
            self._live.discard(running.rid)

    @asynccontextmanager
    async def _turn(self, running: RunningRequest) -> AsyncIterator[None]:
        """A request that has the server for itself keeps it until all of its work has ended, also
        where it was cancelled before."""
        if self._turns is None:
            yield
            return
        async with self._turns:
            try:
                yield
            finally:
                await running.over()

    async def _stages(self, running: RunningRequest, read: Read[T]) -> T:
        begun_s = self._clock.monotonic_s()
        prepare = partial(self._prepare, running, read)
        observation, encode, future = await self._on_thread(running, PolicyStage.PREPARE, prepare)
        submitted_s = self._clock.monotonic_s()
        output = await self._computed(running, future)
        computed_s = self._clock.monotonic_s()
        self.metrics.policy_stage(PolicyStage.COMPUTE, computed_s - submitted_s)

        def finish() -> T:
            actions = self._adapter.actions(output, observation)
            check_actions(actions, observation)
            total_s = self._clock.monotonic_s() - begun_s
            return encode(actions, Times(total_s, computed_s - submitted_s))

        return await self._on_thread(running, PolicyStage.FINISH, finish)

    def _prepare(
        self, running: RunningRequest, read: Read[T]
    ) -> tuple[Observation, Encode[T], Future[Any]]:
        """On a thread, submitting included: it copies the request's tensors."""
        observation, encode = read()
        request = self._adapter.request(observation)
        future = self.engine.submit(request, rid=running.rid)
        running.work.append(future)
        return observation, encode, future

    async def _on_thread(
        self, running: RunningRequest, stage: PolicyStage, work: Callable[[], T]
    ) -> T:
        future = self._pool.submit(self._timed, stage, partial(attempt, work))
        running.work.append(future)

        def cancel() -> None:
            if not future.cancel():
                # What it submits is not wanted any more.
                future.add_done_callback(lambda _: self.engine.cancel(running.rid))

        await running.until_done(future, cancel)
        outcome = future.result()
        if isinstance(outcome, Raised):
            raise self._reported(outcome)
        return outcome

    def _timed(self, stage: PolicyStage, work: Callable[[], T]) -> T:
        begun_s = self._clock.monotonic_s()
        outcome = work()
        self.metrics.policy_stage(stage, self._clock.monotonic_s() - begun_s)
        return outcome

    async def _computed(self, running: RunningRequest, future: Future[Any]) -> Any:  # noqa: ANN401
        """The plugin's own output."""
        await running.until_done(future, partial(self.engine.cancel, running.rid))
        if future.cancelled():
            raise EngineUnavailableError("the engine was closed before the request started")
        error = future.exception()
        if error is not None:
            raise self._reported(Raised(error))
        return future.result()

    def _reported(self, raised: Raised) -> Exception:
        """The error to raise; noted where it is not the caller's."""
        error = policy_failure(raised)
        if isinstance(error, InvalidRequestError | EngineOverloadedError | EngineAsleepError):
            return error
        logger.error("a request failed: %s", error, exc_info=error)
        if not isinstance(error, EngineUnavailableError):
            return error
        self._broken = True
        broken = EngineUnavailableError(BROKEN)
        broken.__cause__ = error
        return broken


def _as_they_are(actions: Actions, times: Times) -> Actions:
    return actions


def _outcome(error: PhalanxError) -> Outcome:
    match error:
        case EngineOverloadedError():
            return Outcome.OVERLOADED
        case InvalidRequestError() | NotReadyError() | EngineAsleepError():
            return Outcome.REFUSED
        case RequestAbortedError():
            return Outcome.ABORTED
    return Outcome.FAILED
