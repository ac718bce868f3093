"""Brings a trainer's checkpoints to the student: by its role's manager, or to one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Self
from urllib.parse import quote

import httpx
import msgspec

from phalanx.client.control_calls import ControlCalls, http_client, no_answer
from phalanx.client.roles.settings import RoleClientSettings
from phalanx.distill.training import Checkpoint
from phalanx.errors import (
    ConfigurationError,
    EngineUnavailableError,
    RequestFailedError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)
from phalanx.roles.control_messages import UpdateWeights

_OF_ENGINE = {
    400: ConfigurationError,
    401: ConfigurationError,
    404: ConfigurationError,
    409: RoleOperationRefusedError,
    503: RoleOperationFailedError,
}


class RoleWeights:
    """By the control process at `control_url` (see `phalanx status --json`): every replica of the
    role's `model` loads them, those that sleep when they wake.

    Made inside a running event loop, closed by `close` or at the end of `async with`.
    """

    def __init__(
        self,
        control_url: str,
        model: str,
        *,
        role: str = "rollout",
        api_key: str | None = None,
        settings: RoleClientSettings | None = None,
    ) -> None:
        self._settings = settings or RoleClientSettings()
        self._calls = ControlCalls(control_url, api_key, self._settings)
        self._path = f"/v1/roles/{quote(role, safe='')}/models/{quote(model, safe='')}/weights"

    async def push(self, checkpoint: Checkpoint) -> None:
        """Again until somebody answers. Raises `RoleOperationRefusedError` and
        `RoleOperationFailedError` as the manager says, `ConfigurationError` for what is wrong, and
        `EngineUnavailableError` where nobody has answered in time.
        """
        asked = UpdateWeights(str(checkpoint.path), checkpoint.version)
        ask = partial(self._calls.ask, self._path, asked, msgspec.Raw)
        await _until_answered(ask, self._settings)

    async def close(self) -> None:
        await self._calls.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class EngineWeights:
    """To the engine at `url`, which nobody manages (`/update_weights_from_disk`).

    Made and closed as `RoleWeights`.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        settings: RoleClientSettings | None = None,
    ) -> None:
        self._settings = settings or RoleClientSettings()
        self._url = url.rstrip("/") + "/update_weights_from_disk"
        self._client = http_client(url, api_key, self._settings)

    async def push(self, checkpoint: Checkpoint) -> None:
        """Again until somebody answers. Raises as `RoleWeights.push`."""
        body = {"model_path": str(checkpoint.path), "weight_version": checkpoint.version}
        await _until_answered(partial(self._post, body), self._settings)

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _post(self, body: dict[str, str]) -> None:
        try:
            answer = await self._client.post(self._url, json=body)
        except httpx.TransportError as error:
            raise no_answer(self._url, error) from error
        if answer.status_code != 200:
            kind = _OF_ENGINE.get(answer.status_code, RequestFailedError)
            raise kind(f"{self._url} answered {answer.status_code}: {answer.text[:500]}")


async def _until_answered(
    ask: Callable[[], Awaitable[object]], settings: RoleClientSettings
) -> None:
    """To bring the same weights twice does no harm."""
    problem = EngineUnavailableError(f"no word of the weights within {settings.timeout_s:g} s")
    try:
        async with asyncio.timeout(settings.timeout_s):
            while True:
                try:
                    await ask()
                    return
                except EngineUnavailableError as error:
                    problem = error
                await asyncio.sleep(settings.retry_s)
    except TimeoutError:
        raise problem from None
