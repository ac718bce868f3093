"""`POST /v1/videos/generations`: a video by one request, whole or with its progress as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from phalanx.schema.videos import DenoiseProgress, VideoFile
from phalanx.server.answering import Answering
from phalanx.server.dialects import OPENAI, Refusals
from phalanx.server.event_stream import EventStream
from phalanx.server.routes.models import ModelRoutes
from phalanx.server.served_models import ServedModels
from phalanx.server.video_service import PreparedVideo, VideoService
from phalanx.wire.videos import answer_body, completed_event, progress_event

VIDEOS_PATH = "/v1/videos/generations"
JOB_PATHS = ("/v1/videos", "/v1/videos/{rest:path}")


class _Tell(Protocol):
    def __call__(self, file: VideoFile, *, id: str, model: str, created: int) -> bytes: ...


class VideoRoute:
    """One video a request."""

    def __init__(self, service: VideoService, models: ServedModels, answering: Answering) -> None:
        self._service = service
        self._models = models
        self._answering = answering

    async def __call__(self, request: Request) -> Response:
        return await self._answering.model(request, OPENAI, self._generate)

    async def _generate(self, body: bytes) -> Response:
        call = await self._service.parse(body)
        self._models.check(call.model)
        video = await self._service.prepare(call)
        if call.stream:
            return await self._stream(video)
        file = await self._service.file(video)
        if not call.as_json:
            return Response(file.data, media_type=file.media_type)
        return Response(await self._told(answer_body, file, video), media_type="application/json")

    async def _stream(self, video: PreparedVideo) -> Response:
        events = self._events(video)
        return EventStream(
            await anext(events),
            events,
            render_error=OPENAI.stream_error,
            write_timeout_s=self._service.stall_timeout_s,
        )

    async def _events(self, video: PreparedVideo) -> AsyncGenerator[bytes]:
        async with aclosing(self._service.items(video)) as items:
            async for item in items:
                match item:
                    case VideoFile():
                        yield await self._told(completed_event, item, video)
                    case DenoiseProgress():
                        yield progress_event(item)

    async def _told(self, tell: _Tell, file: VideoFile, video: PreparedVideo) -> bytes:
        """The file as text, which may be much: written on a thread."""
        created = int(self._service.clock.wall_s())
        name = self._models.name
        return await asyncio.to_thread(tell, file, id=video.rid, model=name, created=created)


def video_routes(
    service: VideoService, models: ServedModels, answering: Answering, refusals: Refusals
) -> list[BaseRoute]:
    """What a plugin that makes videos adds to the routes that every plugin has."""
    listing = ModelRoutes(models, refusals, created=int(service.clock.wall_s()), max_len=None)

    async def no_jobs(request: Request) -> Response:
        message = (
            f"{request.url.path}: this server keeps no video jobs and no files; POST {VIDEOS_PATH} "
            "answers with the video itself, and with its progress as events for stream=true"
        )
        return refusals.turned_away(request.url.path, message, 404, "not_served")

    methods = ["GET", "POST", "PUT", "DELETE"]
    return [
        Route(VIDEOS_PATH, VideoRoute(service, models, answering).__call__, methods=["POST"]),
        *(Route(path, no_jobs, methods=methods) for path in JOB_PATHS),
        Route("/v1/models", listing.index),
        Route("/v1/models/{name:path}", listing.one),
    ]
