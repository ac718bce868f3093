"""What a trainer's program sends to a control process, and what an answer means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from phalanx.client.control_refusals import refusal_in
from phalanx.client.roles.settings import RoleClientSettings, bearer
from phalanx.errors import (
    ConfigurationError,
    EngineUnavailableError,
    PhalanxError,
    RequestFailedError,
)

T = TypeVar("T")


_NO_CONTROL = "it is no control process of `phalanx up` (phalanx status --json has its control_url)"
_HINTS: Mapping[str, str] = {
    "unauthorized": "give control.key of the job's file as api_key",
    "http": _NO_CONTROL,
}


class ControlCalls:
    """Calls of one client. The caller bounds the time and may cancel."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        settings: RoleClientSettings,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = _checked(url)
        self._client = http_client(self._url, api_key, settings, transport)

    async def ask(self, path: str, asked: msgspec.Struct | None, kind: type[T]) -> T:
        """A GET without `asked`. Raises `EngineUnavailableError` where nobody answered, or the job
        stops, and what the answer says for another status than 200.
        """
        url = self._url + path
        try:
            if asked is None:
                answer = await self._client.get(url)
            else:
                answer = await self._client.post(
                    url,
                    content=msgspec.json.encode(asked),
                    headers={"content-type": "application/json"},
                )
        except httpx.TransportError as error:
            raise no_answer(url, error) from error
        if answer.status_code != 200:
            raise _failure(url, answer.status_code, answer.content)
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            raise RequestFailedError(f"{url} answered what cannot be read: {error}") from error

    async def close(self) -> None:
        await self._client.aclose()


def http_client(
    url: str,
    api_key: str | None,
    settings: RoleClientSettings,
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncClient:
    """One that waits for answers as long as its caller does."""
    return httpx.AsyncClient(
        transport=transport,
        timeout=httpx.Timeout(None, connect=settings.connect_timeout_s),
        headers=bearer(api_key),
        # Without TLS there is nothing to verify, and its context takes long to make.
        verify=settings.tls() if url.startswith("https:") else False,
        trust_env=False,
    )


def no_answer(url: str, error: httpx.TransportError) -> EngineUnavailableError:
    """What to raise for a request that got lost."""
    return EngineUnavailableError(f"{url} does not answer: {str(error) or type(error).__name__}")


def _failure(url: str, status: int, body: bytes) -> PhalanxError:
    refusal = refusal_in(body)
    if refusal is not None:
        return refusal.error(_HINTS.get(refusal.code, ""))
    message = f"{url} answered {status}"
    if status in (502, 504):
        return EngineUnavailableError(message)
    if status in (401, 404):
        return ConfigurationError(f"{message}; {_NO_CONTROL}")
    return RequestFailedError(message)


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ConfigurationError(
            f"url {url[:300]!r} must be that of a control process, as http://127.0.0.1:PORT; it is"
            " the control_url of `phalanx status --json`"
        )
    return f"{parts.scheme}://{parts.netloc}"
