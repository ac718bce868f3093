"""What models that generate text have no answer for, with words that say what to ask instead."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phalanx.server.dialects import Refusals

PATHS = (
    "/classify",
    "/encode",
    "/rerank",
    "/v1/classify",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
)


def absent_routes(refusals: Refusals) -> list[Route]:
    """They answer 404, as what is not there does."""

    async def absent(request: Request) -> Response:
        path = request.url.path
        message = (
            f"{path}: this server's model generates text and has no classes, scores or embeddings; "
            "ask it to judge by /v1/chat/completions, or for log-probabilities by /generate with "
            "return_logprob and max_new_tokens 0. A reward model is served elsewhere, and may be a "
            "role's engine by its URL (engine: external)"
        )
        return refusals.turned_away(path, message, 404, "not_served")

    return [Route(path, absent, methods=["GET", "POST", "PUT"]) for path in PATHS]
