"""Whoever is away for a moment is waited for, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.client.roles.http_exchange import NotConnectedError
from phalanx.client.roles.settings import RoleClientSettings
from phalanx.distill.asking import AskingSettings
from phalanx.distill.loop import LoopPlan
from phalanx.distill.scoring import look
from phalanx.errors import EngineUnavailableError
from phalanx.testing.virtual_time import run_virtual


class Gateway:
    """Discovery of a role, whose gateway does not listen before `since_s`."""

    is_engine = False
    settings = RoleClientSettings()

    def __init__(self, since_s: float) -> None:
        self._since_s = now() + since_s

    async def engines(self) -> None:
        if now() < self._since_s:
            raise NotConnectedError("nobody listens")


def now() -> float:
    return asyncio.get_running_loop().time()


def test_i100_a_gateway_that_is_started_anew_is_waited_for_before_a_scoring():
    async def scenario():
        began_s = now()
        await look(Gateway(30.0), AskingSettings(ready_timeout_s=60.0))
        assert 30.0 <= now() - began_s <= 31.0
        with pytest.raises(EngineUnavailableError, match="nobody listens"):
            await look(Gateway(90.0), AskingSettings(ready_timeout_s=60.0))
        assert 90.0 <= now() - began_s <= 92.0

    run_virtual(scenario())


def test_between_two_attempts_at_a_phase_the_pause_grows():
    assert [LoopPlan().pause_after_s(attempt) for attempt in range(7)] == [1, 2, 4, 8, 16, 30, 30]
