"""The control process over HTTP: what a gateway follows, and what operators and trainers ask for.

Every operation is answered when it has ended. It goes on where its caller leaves, and asking for it
again joins it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phalanx.errors import (
    EngineUnavailableError,
    InvalidInputError,
    PhalanxError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)
from phalanx.roles.control_guard import JSON, ControlGuard, error_answer
from phalanx.roles.control_messages import (
    Activate,
    Broadcast,
    ConfirmWeights,
    EngineName,
    Job,
    Phase,
    Scale,
    Shutdown,
    Unblock,
    UpdateWeights,
)
from phalanx.roles.control_requests import json_answer, json_body, waiting_s, whole_number
from phalanx.roles.coordination.coordinator import LifecycleCoordinator
from phalanx.roles.coordination.phase_operations import PhaseBusyError
from phalanx.roles.coordination.routes import PhaseRoutes
from phalanx.roles.events import EventKind, EventLog
from phalanx.roles.followers import NOTHING
from phalanx.roles.manager import InferenceManager
from phalanx.routing.roles.encoded import EncodedDocuments

logger = logging.getLogger(__name__)


class NotFoundError(InvalidInputError):
    """The job has no role, or the role no model, of that name."""


class ControlApi:
    """Its routes. `epoch` is that of the roles' registries. `describe` tells of the job, `stop` begins its end, in a hurry or not."""

    def __init__(
        self,
        managers: Mapping[str, InferenceManager],
        coordinator: LifecycleCoordinator,
        events: EventLog,
        *,
        epoch: str,
        describe: Callable[[], Awaitable[Job]],
        stop: Callable[[bool], None],
        key: str | None = None,
    ) -> None:
        self._managers = managers
        self._coordinator = coordinator
        self._events = events
        self._epoch = epoch
        self._describe = describe
        self._stop = stop
        self._key = key
        self._documents = {name: EncodedDocuments() for name in managers}
        self._closed = False

    def close(self) -> None:
        """Answer everybody who waits for a change, and let nobody wait any longer."""
        self._closed = True
        self._events.add("", EventKind.OPERATION, detail="everything has stopped")
        for manager in self._managers.values():
            manager.registry.close()

    def app(self) -> Starlette:
        role, model = "/v1/roles/{role}", "/v1/roles/{role}/models/{model}"
        routes = [
            Route("/health", self.health, methods=["GET"]),
            Route("/v1/job", self.job, methods=["GET"]),
            Route("/v1/roles", self.roles, methods=["GET"]),
            Route("/v1/events", self.events, methods=["GET"]),
            Route("/v1/shutdown", self.shutdown, methods=["POST"]),
            Route(role, self.document, methods=["GET"]),
            Route(f"{role}/activate", self.activate, methods=["POST"]),
            Route(f"{role}/drain", self.drain, methods=["POST"]),
            Route(f"{role}/deactivate", self.deactivate, methods=["POST"]),
            Route(f"{role}/recover", self.recover, methods=["POST"]),
            Route(f"{role}/unblock", self.unblock, methods=["POST"]),
            Route(f"{role}/phase", self.phase, methods=["POST"]),
            Route(f"{model}/scale", self.scale, methods=["POST"]),
            Route(f"{model}/weights", self.weights, methods=["POST"]),
            Route(f"{model}/weights/confirm", self.confirm, methods=["POST"]),
            Route(f"{model}/broadcasts", self.broadcasts, methods=["POST"]),
            *PhaseRoutes(self._coordinator).routes(),
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(ControlGuard, key=self._key)],
            exception_handlers={
                HTTPException: _http_refusal,
                PhalanxError: _refusal,
                Exception: _broken,
            },
        )

    async def health(self, request: Request) -> Response:
        return json_answer({"status": "ok"})

    async def job(self, request: Request) -> Response:
        """The job as a whole: each role's document, and what its engines hold."""
        return json_answer(await self._describe())

    async def roles(self, request: Request) -> Response:
        return json_answer({"roles": list(self._managers), "epoch": self._epoch})

    async def document(self, request: Request) -> Response:
        """The internal document; with `?after=REVISION&epoch=&wait_s=` once it is another one. What
        drains waits for a `follower`, by a name of its own, to have come so far.
        """
        manager, after = self._manager(request), whole_number(request, "after")
        wait_s, registry = waiting_s(request), manager.registry
        epoch = request.query_params.get("epoch", self._epoch)
        follower = request.query_params.get("follower")
        with contextlib.ExitStack() as asking:
            if follower is not None:
                seen = NOTHING if after is None or epoch != self._epoch else after
                asking.enter_context(manager.followers.asking(follower, seen))
            if after is None or self._closed:
                snapshot = registry.snapshot
            else:
                snapshot = await registry.wait(after, wait_s, epoch)
        body = self._documents[manager.spec.role].of(snapshot).internal
        return Response(body, media_type=JSON)

    async def events(self, request: Request) -> Response:
        """Those after the number `?after=`, waiting for one up to `wait_s`."""
        after, wait_s = whole_number(request, "after"), waiting_s(request)
        log = self._events
        waits = wait_s > 0 and not self._closed
        found = await log.wait(after or 0, wait_s) if waits else log.after(after or 0)
        return json_answer({"epoch": self._epoch, "last": log.last_number, "events": found})

    async def shutdown(self, request: Request) -> Response:
        """Begins the end of the job, and does not wait for it."""
        asked = await json_body(request, Shutdown)
        self._stop(asked.now)
        return Response(b'{"status":"stopping"}', 202, media_type=JSON)

    async def activate(self, request: Request) -> Response:
        manager, asked = self._movable(request, "wake it"), await json_body(request, Activate)
        return await self._done(manager, manager.activate(asked.tags))

    async def drain(self, request: Request) -> Response:
        manager = self._movable(request, "drain it")
        return await self._done(manager, manager.drain())

    async def deactivate(self, request: Request) -> Response:
        manager = self._movable(request, "put it to sleep")
        return await self._done(manager, manager.deactivate())

    async def recover(self, request: Request) -> Response:
        manager, asked = self._manager(request), await json_body(request, EngineName)
        return await self._done(manager, self._then_look(manager.recover(asked.engine_id)))

    async def unblock(self, request: Request) -> Response:
        manager, asked = self._manager(request), await json_body(request, Unblock)
        operation = manager.unblock(asked.engine_id, asked.holds)
        return await self._done(manager, self._then_look(operation))

    async def phase(self, request: Request) -> Response:
        manager = self._movable(request, "publish its phase")
        asked = await json_body(request, Phase)
        manager.set_phase(asked.phase)
        return self._document(manager)

    async def scale(self, request: Request) -> Response:
        manager, model = self._model(request)
        asked = await json_body(request, Scale)
        if asked.replicas == 0:
            # Who is in a phase serves in it, and none but a role that serves is scaled up again.
            self._coordinator.check_operator(manager.spec.role, "have it serve nothing")
        return await self._done(manager, manager.scale(model, asked.replicas))

    async def weights(self, request: Request) -> Response:
        manager, model = self._model(request)
        asked = await json_body(request, UpdateWeights)
        return await self._done(manager, manager.update_weights(model, asked.path, asked.version))

    async def confirm(self, request: Request) -> Response:
        manager, model = self._model(request)
        asked = await json_body(request, ConfirmWeights)
        return await self._done(manager, manager.confirm_weights(model, asked.version))

    async def broadcasts(self, request: Request) -> Response:
        """Register the model; with a path and a version, bring it that version too."""
        manager, model = self._model(request)
        asked = await json_body(request, Broadcast)
        version = await manager.register_broadcast(model)
        if asked.path is not None and asked.version is not None:
            await manager.broadcast(model, asked.path, asked.version)
            version = asked.version
        return json_answer({"model": model, "version": version})

    async def _done(self, manager: InferenceManager, operation: Awaitable[None]) -> Response:
        await operation
        return self._document(manager)

    async def _then_look(self, operation: Awaitable[None]) -> None:
        try:
            await operation
        finally:
            self._coordinator.look_again()

    def _document(self, manager: InferenceManager) -> Response:
        encoded = self._documents[manager.spec.role].of(manager.registry.snapshot)
        return Response(encoded.internal, media_type=JSON)

    def _manager(self, request: Request) -> InferenceManager:
        role: str = request.path_params["role"]
        if role not in self._managers:
            raise NotFoundError(f"there is no role {role!r}; roles: {', '.join(self._managers)}")
        return self._managers[role]

    def _movable(self, request: Request, what: str) -> InferenceManager:
        """That of a role which does not take turns with others."""
        manager = self._manager(request)
        self._coordinator.check_operator(manager.spec.role, what)
        return manager

    def _model(self, request: Request) -> tuple[InferenceManager, str]:
        manager, model = self._manager(request), str(request.path_params["model"])
        names = [each.name for each in manager.spec.models]
        if model not in names:
            raise NotFoundError(
                f"role {manager.spec.role!r} has no model {model!r}; models: {', '.join(names)}"
            )
        return manager, model


async def _refusal(request: Request, error: Exception) -> Response:
    match error:
        case NotFoundError():
            return error_answer(404, "not_found", str(error))
        case InvalidInputError():
            return error_answer(400, "invalid_request", str(error))
        case PhaseBusyError():
            return error_answer(409, "busy", str(error))
        case RoleOperationRefusedError():
            return error_answer(409, "refused", str(error))
        case RoleOperationFailedError():
            return error_answer(503, "failed", str(error))
        case EngineUnavailableError():
            return error_answer(503, "unavailable", str(error))
    return error_answer(500, "failed", str(error))


async def _http_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = error_answer(error.status_code, "http", f"{request.url.path}: {error.detail}")
    answer.headers.update(error.headers or {})
    return answer


async def _broken(request: Request, error: Exception) -> Response:
    logger.error("%s failed", request.url.path, exc_info=error)
    return error_answer(500, "internal", f"{type(error).__name__}: {error}")
