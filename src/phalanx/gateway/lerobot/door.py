"""Where LeRobot's clients come in: the gateway's gRPC port, and ports of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from phalanx.gateway.grpc.front import GrpcFront
from phalanx.gateway.http.message import HttpRequest, HttpResponse
from phalanx.gateway.http.router import Access, Router
from phalanx.gateway.lerobot.named_front import Listener, NamedFront
from phalanx.gateway.lerobot.service import LeRobotService, RobotView


class RobotsView(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/robots`."""

    robots: tuple[RobotView, ...]


class LeRobotDoor:
    """`start` listens, `close` drains. Robots of different ports are never taken for one another,
    nor those of different host names at a port of LeRobot's own.
    """

    def __init__(self, robots: LeRobotService, listeners: Sequence[Listener]) -> None:
        self.ports: tuple[int, ...] = ()
        self._robots = robots
        self._fronts = [NamedFront(robots, listener) for listener in listeners]

    def add_to(self, front: GrpcFront, router: Router) -> None:
        front.add(self._robots.service("the gateway's port"))
        router.add("GET", "/v1/robots", self._report, access=Access.ADMIN)

    async def start(self) -> None:
        """Raises `ConfigurationError` where a port cannot be listened on."""
        for front in self._fronts:
            self.ports += (await front.start(),)

    async def close(self, drain_s: float = 0.0) -> None:
        await asyncio.gather(*(front.close(drain_s) for front in self._fronts))

    async def forget(self) -> None:
        """After all ports are closed: end what still runs for robots."""
        await self._robots.close()

    async def _report(self, request: HttpRequest) -> HttpResponse:
        view = RobotsView(self._robots.robots())
        return HttpResponse.json(200, msgspec.to_builtins(view))
