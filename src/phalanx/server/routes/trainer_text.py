"""What trainers ask of a language model's server beside SGLang's and OpenAI's routes for text."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from phalanx.server.answering import Answering
from phalanx.server.operations.parts import Operations
from phalanx.server.routes.tokens import TokenRoutes
from phalanx.server.routes.trl import TrlRoutes
from phalanx.server.served_models import ServedModels
from phalanx.server.text_service import TextService


def trainer_text_routes(
    service: TextService, models: ServedModels, operations: Operations, answering: Answering
) -> list[BaseRoute]:
    """The tokenizer alone, and TRL's own server."""
    tokens = TokenRoutes(service, models, answering)
    trl = TrlRoutes(service, operations, answering)
    return [
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/health/", trl.health),
        Route("/get_world_size/", trl.world_size),
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in trl.posts().items()),
    ]
