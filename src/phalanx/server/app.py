"""Builds the ASGI application of a model server."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from phalanx.clock import Clock, SystemClock
from phalanx.engine.engine import Engine
from phalanx.plugin import ServingAdapter, VideoAdapter
from phalanx.schema.server_config import ServerConfig
from phalanx.server.answering import Answering
from phalanx.server.dialects import Refusals
from phalanx.server.gate import Gate
from phalanx.server.handover.base import Both, Role
from phalanx.server.lifecycle import Lifecycle, Phase
from phalanx.server.live import LiveRequests
from phalanx.server.metrics import ServerMetrics
from phalanx.server.operations.parts import create_operations
from phalanx.server.routes.absent import absent_routes
from phalanx.server.routes.chat import ChatRoute
from phalanx.server.routes.completions import CompletionRoute
from phalanx.server.routes.generate import GenerateRoute
from phalanx.server.routes.health_generate import HealthGenerateRoute
from phalanx.server.routes.infer import InferRoute
from phalanx.server.routes.info import HealthRoutes, InfoRoutes
from phalanx.server.routes.models import ModelRoutes
from phalanx.server.routes.operating import operating_routes
from phalanx.server.routes.trainer_text import trainer_text_routes
from phalanx.server.routes.videos import video_routes
from phalanx.server.served_models import ServedModels
from phalanx.server.text_service import TextService
from phalanx.server.video_service import VideoService

logger = logging.getLogger(__name__)
GET_POST = ["GET", "POST"]
TEXT_PATHS = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/models")


@dataclass(frozen=True)
class ServerParts:
    """What the application shares with whoever runs it."""

    lifecycle: Lifecycle
    live: LiveRequests
    clock: Clock
    role: Role = field(default_factory=Both)
    metrics: ServerMetrics | None = None


def create_app(
    engine: Engine,
    serving: ServingAdapter | None,
    config: ServerConfig,
    parts: ServerParts | None = None,
    more_routes: Sequence[BaseRoute] = (),
    videos: VideoAdapter | None = None,
) -> Starlette:
    """The application that serves `engine`; call it in the event loop that will run it.

    The text protocols exist where `serving` is given, those of videos where `videos` is;
    `more_routes` go before all others.
    """
    if parts is None:
        clock = SystemClock()
        parts = ServerParts(Lifecycle(Phase.READY), LiveRequests(engine.cancel), clock)
    refusals = Refusals(config.retry_after_s)
    metrics = ServerMetrics(engine.statistics) if parts.metrics is None else parts.metrics
    answering = Answering(config.max_request_bytes, refusals, metrics)
    adapter = serving if serving is not None else videos
    model_info = {} if adapter is None else adapter.model_info
    checkpoint = str(model_info.get("model_path", engine.plugin.name))
    models = ServedModels(config.public_name, checkpoint)
    operations = create_operations(engine, parts.live, parts.lifecycle, config)
    bulky = Answering(config.max_weights_bytes, refusals, metrics, key="max_weights_bytes")
    info = InfoRoutes(engine, config, models, model_info, metrics)
    infer = InferRoute(engine, parts.live, answering)
    routes: list[BaseRoute] = [
        *more_routes,
        *_health_routes(HealthRoutes(parts.lifecycle, engine)),
        Route("/infer", infer.__call__, methods=["POST"]),
        *operating_routes(operations, answering, bulky),
        Route("/model_info", info.model_info),
        Route("/get_model_info", info.model_info),
        Route("/server_info", info.server_info),
        Route("/get_server_info", info.server_info),
        Route("/get_weight_version", info.weight_version, methods=GET_POST),
        Route("/v1/loads", info.loads),
        Route("/get_load", info.load),
        Route("/metrics", info.metrics),
    ]
    if videos is not None:
        video = VideoService(engine, videos, parts.live, metrics, parts.clock)
        routes += video_routes(video, models, answering, refusals)
    if serving is None:
        routes += _without_text(engine, refusals)
    else:
        parts.role.bind(parts.live, engine.cancel)
        service = TextService(
            engine, serving.tokenizer, parts.live, metrics, parts.clock, parts.role
        )
        routes += _text_routes(service, models, parts.live, answering, refusals, config)
        routes += trainer_text_routes(service, models, operations, answering)
    return _application(routes, config, parts.lifecycle, parts.clock)


def create_starting_app(config: ServerConfig, lifecycle: Lifecycle, clock: Clock) -> Starlette:
    """What answers while the model loads: health as 503, and 503 for everything else."""
    refusals = Refusals(config.retry_after_s)

    async def starting(request: Request) -> Response:
        message = f"the server is {lifecycle.phase}; try again later or elsewhere"
        return refusals.turned_away(request.url.path, message, 503, lifecycle.phase)

    methods = ["GET", "POST", "PUT", "DELETE"]
    routes: list[BaseRoute] = [
        *_health_routes(HealthRoutes(lifecycle)),
        Route("/{path:path}", starting, methods=methods),
    ]
    return _application(routes, config, lifecycle, clock)


def _application(
    routes: list[BaseRoute], config: ServerConfig, lifecycle: Lifecycle, clock: Clock
) -> Starlette:
    refusals = Refusals(config.retry_after_s)

    async def not_routed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        message = f"{request.method} {path}: {error.detail}"
        response = refusals.turned_away(path, message, error.status_code, "not_found")
        response.headers.update(error.headers or {})
        return response

    async def broken(request: Request, error: Exception) -> Response:
        # The exception goes on to the HTTP server's log; its text is not for the client.
        message = "the server failed; its log tells why"
        return refusals.turned_away(request.url.path, message, 500, "internal_error")

    return Starlette(
        routes=routes,
        middleware=[Middleware(Gate, config=config, lifecycle=lifecycle, clock=clock)],
        exception_handlers={HTTPException: not_routed, Exception: broken},
    )


def _health_routes(health: HealthRoutes) -> list[BaseRoute]:
    return [
        Route("/health", health.health),
        Route("/ready", health.ready),
        Route("/ping", health.ping),
    ]


def _text_routes(
    service: TextService,
    models: ServedModels,
    live: LiveRequests,
    answering: Answering,
    refusals: Refusals,
    config: ServerConfig,
) -> list[BaseRoute]:
    generate = GenerateRoute(
        service, models, live, answering, incremental=config.incremental_streaming_output
    )
    chat = ChatRoute(service, models, answering)
    completions = CompletionRoute(service, models, answering)
    listing = ModelRoutes(
        models,
        refusals,
        created=int(service.clock.wall_s()),
        max_len=service.engine.limits.context_length,
    )
    probe = HealthGenerateRoute(service, config.health_generate_timeout_s)
    return [
        Route("/generate", generate.__call__, methods=["POST", "PUT"]),
        Route("/v1/chat/completions", chat.__call__, methods=["POST"]),
        Route("/v1/completions", completions.__call__, methods=["POST"]),
        Route("/v1/models", listing.index),
        Route("/v1/models/{name:path}", listing.one),
        Route("/health_generate", probe.__call__),
        *absent_routes(refusals),
    ]


def _without_text(engine: Engine, refusals: Refusals) -> list[BaseRoute]:
    """The text routes of a plugin that has none: 404 that says so."""

    async def absent(request: Request) -> Response:
        message = (
            f"the plugin {engine.plugin.name!r} does not serve text; send its own request to "
            "POST /infer"
        )
        return refusals.turned_away(request.url.path, message, 404, "no_text_protocol")

    health = HealthRoutes(Lifecycle(Phase.READY), engine)
    routes: list[BaseRoute] = [
        Route(path, absent, methods=["GET", "POST", "PUT"]) for path in TEXT_PATHS
    ]
    return [*routes, Route("/health_generate", health.health)]
