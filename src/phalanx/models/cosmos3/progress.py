"""Generating with a callback at each denoise step, for callers that read no stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from phalanx.models.cosmos3.request import (
    Cosmos3Action,
    Cosmos3ActionRequest,
    Cosmos3T2VRequest,
    Cosmos3Video,
)
from phalanx.schema.videos import DenoiseProgress

OnStep = Callable[[DenoiseProgress], None]


class Items(Iterator[Any], AbstractContextManager[Any], Protocol):
    """Deltas, and the output as last item; closing it cancels what has not ended."""


class Streaming(Protocol):
    """An `Engine`."""

    def stream(self, request: Any, *, rid: str | None = None) -> Items: ...  # noqa: ANN401


def generate(
    engine: Streaming,
    request: Cosmos3T2VRequest | Cosmos3ActionRequest,
    on_step: OnStep,
    *,
    rid: str | None = None,
) -> Cosmos3Video | Cosmos3Action:
    """The answer to `request`; `on_step` is called in this thread for the steps that are done.

    Steps that end while it runs are told as one, the last of them. What it raises ends the request
    and is raised here.
    """
    with engine.stream(request, rid=rid) as items:
        for item in items:
            if isinstance(item, Cosmos3Video | Cosmos3Action):
                return item
            assert isinstance(item, DenoiseProgress)
            on_step(item)
    raise AssertionError("a stream ends in its output")
