"""The routes for whoever operates a server, in SGLang's names and in vLLM's."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from phalanx.server.answering import Answering
from phalanx.server.operations.parts import Operations
from phalanx.server.routes.control import ControlRoutes
from phalanx.server.routes.memory import MemoryRoutes
from phalanx.server.routes.vllm import VllmRoutes
from phalanx.server.routes.weights import WeightRoutes

GET_POST = ["GET", "POST"]


def operating_routes(
    operations: Operations, answering: Answering, bulky: Answering
) -> list[BaseRoute]:
    """`bulky` reads the bodies that bring weights."""
    control = ControlRoutes(operations.generation, answering)
    memory = MemoryRoutes(operations.memory, answering)
    weights = WeightRoutes(operations.weights, answering, bulky)
    vllm = VllmRoutes(operations.generation, operations.memory, operations.weights, answering)
    posts = {**weights.endpoints(), **vllm.posts()}
    return [
        Route("/abort_request", control.abort, methods=["POST"]),
        Route("/pause_generation", control.pause, methods=["POST"]),
        Route("/continue_generation", control.go_on, methods=["POST"]),
        Route("/flush_cache", control.flush, methods=GET_POST),
        Route("/release_memory_occupation", memory.release, methods=GET_POST),
        Route("/resume_memory_occupation", memory.resume, methods=GET_POST),
        Route("/update_weights_from_tensor", weights.from_tensor, methods=["POST"]),
        Route("/get_weights_by_name", weights.by_name, methods=GET_POST),
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
        *(Route(path, endpoint) for path, endpoint in vllm.gets().items()),
    ]
