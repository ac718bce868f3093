"""Weights on their way to the student."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from phalanx.client import RoleClientSettings
from phalanx.distill import Checkpoint, EngineWeights, RoleWeights
from phalanx.errors import (
    ConfigurationError,
    EngineUnavailableError,
    RequestFailedError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)
from tests.client.roles.published import closed_port
from tests.client.roles.servers import FakeServer, Request

QUICK = RoleClientSettings(retry_s=0.01, timeout_s=30)
CHECKPOINT = Checkpoint(3, Path("/run/step-3"), "v3")


def refusal(code: str) -> dict[str, object]:
    """As a control process says it."""
    return {"error": {"code": code, "message": f"it is {code}"}}


def pushed(kind, *arguments, answers):
    """What was sent, while the server answers one status (and JSON) after the other (None: it hangs
    up).
    """
    left = list(answers)

    async def behave(request: Request) -> None:
        match left.pop(0):
            case None:
                request.cut()
            case (status, body):
                request.answer(body, status)
            case status:
                request.answer({"said": status}, status)

    async def run() -> list[Request]:
        server = FakeServer(behave)
        await server.start()
        try:
            async with kind(server.url, *arguments, api_key="secret", settings=QUICK) as weights:
                await weights.push(CHECKPOINT)
            return server.requests
        finally:
            await server.stop()

    return asyncio.run(run())


def test_a_roles_manager_is_told_path_and_version():
    [request] = pushed(RoleWeights, "my student", answers=[200])
    assert request.path == "/v1/roles/rollout/models/my%20student/weights"
    assert request.json == {"path": "/run/step-3", "version": "v3"}
    assert request.headers["authorization"] == "Bearer secret"


def test_an_engine_loads_them_from_the_directory():
    [request] = pushed(EngineWeights, answers=[200])
    assert request.path == "/update_weights_from_disk"
    assert request.json == {"model_path": "/run/step-3", "weight_version": "v3"}


def test_a_lost_answer_is_asked_for_again():
    assert len(pushed(RoleWeights, "student", answers=[None, None, 200])) == 3
    assert len(pushed(EngineWeights, answers=[None, 200])) == 2


def test_a_job_that_stops_is_asked_again_when_it_has_begun_anew():
    stopping = (503, refusal("unavailable"))
    assert len(pushed(RoleWeights, "student", answers=[stopping, None, 200])) == 3


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request", ConfigurationError),
        (401, "unauthorized", ConfigurationError),
        (404, "not_found", ConfigurationError),
        (409, "refused", RoleOperationRefusedError),
        (503, "failed", RoleOperationFailedError),
    ],
)
def test_what_a_manager_refuses_is_told_by_its_class_in_its_own_words(status, code, kind):
    with pytest.raises(kind) as caught:
        pushed(RoleWeights, "student", answers=[(status, refusal(code))])
    advice = "; give control.key of the job's file as api_key" if status == 401 else ""
    assert str(caught.value) == f"it is {code}{advice}"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ConfigurationError),
        (401, ConfigurationError),
        (404, ConfigurationError),
        (409, RoleOperationRefusedError),
        (503, RoleOperationFailedError),
        (500, RequestFailedError),
    ],
)
def test_what_an_engine_refuses_is_told_by_its_class(status, kind):
    with pytest.raises(kind, match=f"answered {status}"):
        pushed(EngineWeights, answers=[status])


def test_nobody_who_answers_is_told_in_the_end():
    async def run():
        settings = RoleClientSettings(retry_s=0.01, timeout_s=0.05)
        async with EngineWeights(closed_port(), settings=settings) as weights:
            with pytest.raises(EngineUnavailableError, match="does not answer"):
                await weights.push(CHECKPOINT)

    asyncio.run(run())


def test_an_answer_that_does_not_come_is_not_waited_for_for_ever():
    async def run():
        server = FakeServer(lambda request: asyncio.Event().wait())
        await server.start()
        settings = RoleClientSettings(timeout_s=0.05)
        try:
            async with RoleWeights(server.url, "student", settings=settings) as weights:
                with pytest.raises(EngineUnavailableError, match="no word of the weights"):
                    await weights.push(CHECKPOINT)
        finally:
            await server.stop()

    asyncio.run(run())


def test_checkpoints_have_a_step_and_a_name():
    for wrong in ({"step": -1}, {"version": ""}):
        given = {"step": 1, "path": Path("a"), "version": "1", **wrong}
        with pytest.raises(ConfigurationError):
            Checkpoint(**given)
