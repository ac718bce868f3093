"""Brings a trainer's checkpoints to the student: by its role's manager, or to one engine."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self
from urllib.parse import quote

import httpx

from phalanx.client.roles.settings import RoleClientSettings, bearer
from phalanx.distill.training import Checkpoint
from phalanx.errors import (
    ConfigurationError,
    EngineUnavailableError,
    RequestFailedError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)

_REFUSED = {400: ConfigurationError, 401: ConfigurationError, 404: ConfigurationError}
_FAILED = {409: RoleOperationRefusedError, 503: RoleOperationFailedError}


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
        path = f"/v1/roles/{quote(role, safe='')}/models/{quote(model, safe='')}/weights"
        self._posts = _Posts(control_url.rstrip("/") + path, api_key, settings)

    async def push(self, checkpoint: Checkpoint) -> None:
        """Again until somebody answers. Raises `RoleOperationRefusedError` and
        `RoleOperationFailedError` as the manager says, and `ConfigurationError` for what is wrong.
        """
        await self._posts.post({"path": str(checkpoint.path), "version": checkpoint.version})

    async def close(self) -> None:
        await self._posts.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class EngineWeights(RoleWeights):
    """To the engine at `url`, which nobody manages (`/update_weights_from_disk`)."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        settings: RoleClientSettings | None = None,
    ) -> None:
        self._posts = _Posts(url.rstrip("/") + "/update_weights_from_disk", api_key, settings)

    async def push(self, checkpoint: Checkpoint) -> None:
        """Again until somebody answers. Raises as `RoleWeights.push`."""
        body = {"model_path": str(checkpoint.path), "weight_version": checkpoint.version}
        await self._posts.post(body)


class _Posts:
    """One address, asked until it answers: to bring the same weights twice does no harm."""

    def __init__(self, url: str, api_key: str | None, settings: RoleClientSettings | None) -> None:
        self._url = url
        self._settings = settings or RoleClientSettings()
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(
                self._settings.timeout_s, connect=self._settings.connect_timeout_s
            ),
            headers=bearer(api_key),
            verify=self._settings.tls(),
            trust_env=False,
        )

    async def post(self, body: dict[str, str]) -> None:
        end_s = asyncio.get_running_loop().time() + self._settings.timeout_s
        while True:
            try:
                answer = await self._client.post(self._url, json=body)
                break
            except httpx.TransportError as error:
                if asyncio.get_running_loop().time() >= end_s:
                    raise EngineUnavailableError(
                        f"{self._url} does not answer: {str(error) or type(error).__name__}"
                    ) from error
            await asyncio.sleep(self._settings.retry_s)
        if answer.status_code != 200:
            kind = _REFUSED.get(answer.status_code) or _FAILED.get(answer.status_code)
            text = f"{self._url} answered {answer.status_code}: {answer.text[:500]}"
            raise (kind or RequestFailedError)(text)

    async def close(self) -> None:
        await self._client.aclose()
