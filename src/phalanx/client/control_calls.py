"""What a client of phases sends to a control process, and what an answer means."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

import httpx
import msgspec

from phalanx.client.roles.settings import RoleClientSettings, bearer
from phalanx.errors import (
    ConfigurationError,
    EngineUnavailableError,
    PhalanxError,
    RequestFailedError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)
from phalanx.wire.phases import PhasesDocument


class TryAgainError(RoleOperationRefusedError):
    """Another operation is under way."""


class _Told(msgspec.Struct, frozen=True):
    code: str = ""
    message: str = ""


class _Refusal(msgspec.Struct, frozen=True):
    error: _Told


_CLASSES: Mapping[str, type[PhalanxError]] = {
    "invalid_request": ConfigurationError,
    "not_json": ConfigurationError,
    "busy": TryAgainError,
    "refused": RoleOperationRefusedError,
    "failed": RoleOperationFailedError,
}
_HINTS = {
    401: "give control.key of the job's file as api_key",
    404: "it is no control process of `phalanx up` (phalanx status --json has its control_url)",
}


class PhaseCalls:
    """Calls of one client. The caller bounds the time and may cancel."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        settings: RoleClientSettings,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = _checked(url)
        self._client = httpx.AsyncClient(
            transport=transport,
            timeout=httpx.Timeout(None, connect=settings.connect_timeout_s),
            headers=bearer(api_key),
            # Without TLS there is nothing to verify, and its context takes long to make.
            verify=settings.tls() if self._url.startswith("https:") else False,
            trust_env=False,
        )

    async def ask(self, path: str, asked: msgspec.Struct | None) -> PhasesDocument:
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
            reason = str(error) or type(error).__name__
            raise EngineUnavailableError(f"{url} does not answer: {reason}") from error
        if answer.status_code != 200:
            raise _failure(url, answer.status_code, answer.content)
        try:
            return msgspec.json.decode(answer.content, type=PhasesDocument)
        except msgspec.DecodeError as error:
            raise RequestFailedError(f"{url} answered what cannot be read: {error}") from error

    async def close(self) -> None:
        await self._client.aclose()


def _failure(url: str, status: int, body: bytes) -> PhalanxError:
    try:
        told = msgspec.json.decode(body, type=_Refusal).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = _Told()
    message = told.message or f"{url} answered {status}"
    if status in _HINTS:
        return ConfigurationError(f"{message}; {_HINTS[status]}")
    if told.code == "unavailable" or status in (502, 504):
        return EngineUnavailableError(message)
    return _CLASSES.get(told.code, RequestFailedError)(message)


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ConfigurationError(
            f"url {url[:300]!r} must be that of a control process, as http://127.0.0.1:PORT; it is"
            " the control_url of `phalanx status --json`"
        )
    return f"{parts.scheme}://{parts.netloc}"
