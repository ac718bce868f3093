"""The phases of a job over HTTP: what a trainer's program and operators ask the control process."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phalanx.roles.control_requests import json_answer, json_body, waiting_s, whole_number
from phalanx.roles.coordination.coordinator import LifecycleCoordinator
from phalanx.wire.phases import AttachTrainer, Enter, Leave, Recover, ReleaseTrainer


class PhaseRoutes:
    """Each operation is answered when it has ended, with what the phases are then."""

    def __init__(self, coordinator: LifecycleCoordinator) -> None:
        self._coordinator = coordinator

    def routes(self) -> list[Route]:
        return [
            Route("/v1/phases", self.phases, methods=["GET"]),
            Route("/v1/phases/enter", self.enter, methods=["POST"]),
            Route("/v1/phases/leave", self.leave, methods=["POST"]),
            Route("/v1/phases/recover", self.recover, methods=["POST"]),
            Route("/v1/trainer/attach", self.attach, methods=["POST"]),
            Route("/v1/trainer/release", self.release, methods=["POST"]),
        ]

    async def phases(self, request: Request) -> Response:
        """What they are; with `?after=NUMBER&wait_s=` once the number is another one."""
        number, limit_s = whole_number(request, "after"), waiting_s(request)
        if number is None:
            return json_answer(self._coordinator.document)
        return json_answer(await self._coordinator.wait(number, limit_s))

    async def enter(self, request: Request) -> Response:
        return json_answer(await self._coordinator.enter(await json_body(request, Enter)))

    async def leave(self, request: Request) -> Response:
        return json_answer(await self._coordinator.leave(await json_body(request, Leave)))

    async def recover(self, request: Request) -> Response:
        return json_answer(await self._coordinator.recover(await json_body(request, Recover)))

    async def attach(self, request: Request) -> Response:
        return json_answer(self._coordinator.attach(await json_body(request, AttachTrainer)))

    async def release(self, request: Request) -> Response:
        return json_answer(self._coordinator.release(await json_body(request, ReleaseTrainer)))
