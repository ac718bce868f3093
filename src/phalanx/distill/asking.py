"""Many requests to a role at once, a bounded number of them at a time.

What never started is sent again when the role is ready. What may have run is sent again only where
that does no harm: scores are the same every time, and a rollout is not.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from phalanx.client import AsyncRoleClient
from phalanx.client.roles.answers import JsonObject
from phalanx.client.roles.settings import check_positive
from phalanx.distill.sample import Sample
from phalanx.errors import (
    ConfigurationError,
    DeadlineExceededError,
    EngineUnavailableError,
    NoServerError,
    RequestFailedError,
)

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Route:
    """Where a request goes: see `AsyncRoleClient.generate`."""

    model: str | None = None
    route_key: str | None = None
    affinity: str | None = None


@dataclass(frozen=True)
class AskingSettings:
    """`max_concurrency` requests run at a time, each for at most `timeout_s`.

    A role that is not ready is waited for, at most `ready_timeout_s`. A request that got lost at
    an engine is sent again `resends` times, where that does no harm.
    """

    max_concurrency: int = 64
    timeout_s: float = 600.0
    ready_timeout_s: float = 60.0
    resends: int = 2

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise ConfigurationError(f"max_concurrency={self.max_concurrency} must be at least 1")
        if self.resends < 0:
            raise ConfigurationError(f"resends={self.resends} must be at least 0")
        for name in ("timeout_s", "ready_timeout_s"):
            check_positive(name, getattr(self, name))


async def generate(
    client: AsyncRoleClient,
    payload: Mapping[str, object],
    route: Route,
    settings: AskingSettings,
    *,
    harmless: bool = False,
) -> JsonObject:
    """The answer to one prompt. `harmless`: it may be sent again after it got lost."""

    async def send() -> JsonObject:
        answer = await client.generate(
            payload,
            model=route.model,
            route_key=route.route_key,
            affinity=route.affinity,
            timeout_s=settings.timeout_s,
        )
        if isinstance(answer, list):
            raise RequestFailedError("a list came for one prompt; n must be 1")
        return answer

    return await sent(send, client, route, settings, harmless=harmless)


async def sent(
    send: Callable[[], Awaitable[R]],
    client: AsyncRoleClient,
    route: Route,
    settings: AskingSettings,
    *,
    harmless: bool,
) -> R:
    """What `send` answers, called again under the rules of this module."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + settings.ready_timeout_s
    resends, is_first = settings.resends if harmless else 0, True
    while True:
        try:
            return await send()
        except NoServerError as error:
            left_s = end_s - loop.time()
            if left_s <= 0:
                raise
            await _ready(client, route, error, left_s, is_first=is_first)
            is_first = False
        except (EngineUnavailableError, RequestFailedError) as error:
            if resends == 0 or isinstance(error, DeadlineExceededError):
                raise
            resends -= 1


async def _ready(
    client: AsyncRoleClient, route: Route, error: NoServerError, left_s: float, *, is_first: bool
) -> None:
    """Return when it is worth sending the request again; raise `error` where that is never."""
    if client.is_engine or not is_first:
        # Discovery has no word for it, or has said that the role is ready when it was not.
        await asyncio.sleep(min(error.retry_after_s, left_s))
    if client.is_engine:
        return
    try:
        await client.wait_ready(route.model, route_key=route.route_key, timeout_s=left_s)
    except DeadlineExceededError as late:
        raise error from late


async def each(
    items: Iterable[T], act: Callable[[T], Awaitable[R]], max_concurrency: int
) -> list[R]:
    """What `act` makes of each, in the order of `items`; `max_concurrency` at a time.

    After a failure no other begins; those that run come to their end, then it is raised.
    """
    waiting = iter(list(enumerate(items)))
    results: dict[int, R] = {}
    failures: list[Exception] = []

    async def work() -> None:
        for place, item in waiting:
            if failures:
                return
            try:
                results[place] = await act(item)
            except Exception as error:  # noqa: BLE001 - raised below, when all have ended
                failures.append(error)
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(max_concurrency):
            group.create_task(work())
    if failures:
        raise failures[0]
    return [results[place] for place in sorted(results)]


OnSample = Callable[[Sample], Awaitable[None]]


async def ignore(sample: Sample) -> None:
    """For callers that wait for all samples."""


async def each_sample(
    samples: Sequence[Sample],
    act: Callable[[Sample], Awaitable[Sample]],
    on_sample: OnSample,
    max_concurrency: int,
) -> list[Sample]:
    """As `each`; `on_sample` gets every sample of which `act` has made another one, as it is done."""

    async def one(sample: Sample) -> Sample:
        worked = await act(sample)
        if worked is not sample:
            await on_sample(worked)
        return worked

    return await each(samples, one, max_concurrency)


def affinity_of(group_id: str) -> str:
    """The key that keeps a group at one replica."""
    return hashlib.sha256(group_id.encode()).hexdigest()[:32]
