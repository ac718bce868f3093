"""`GET /v1/models` and one model of it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from phalanx.errors import UnknownModelError
from phalanx.server.dialects import OPENAI, Refusals
from phalanx.server.served_models import ServedModels
from phalanx.wire.openai import model_body, models_body


class ModelRoutes:
    """`created` is when this server started, in seconds; `max_len` the context length."""

    def __init__(
        self, models: ServedModels, refusals: Refusals, *, created: int, max_len: int | None
    ) -> None:
        self._models = models
        self._refusals = refusals
        self._created = created
        self._max_len = max_len

    async def index(self, request: Request) -> Response:
        models = self._models
        body = models_body(
            models.listed, created=self._created, root=models.checkpoint, max_len=self._max_len
        )
        return Response(body, media_type="application/json")

    async def one(self, request: Request) -> Response:
        name: str = request.path_params["name"]
        try:
            self._models.check(name)
        except UnknownModelError as error:
            return self._refusals.of(error, OPENAI)
        body = model_body(
            name, created=self._created, root=self._models.checkpoint, max_len=self._max_len
        )
        return Response(body, media_type="application/json")
