"""Control calls of one engine that speaks SGLang's wire, ours or SGLang's own, over HTTP.

Each call is one request on a connection of its own, sent once: where the connection is refused
nothing was sent, and where an answer is lost nobody knows.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import httpx
import msgspec

from phalanx.errors import ConfigurationError
from phalanx.roles.contracts import EngineCallError, Tag
from phalanx.schema.roles import DeploymentSpec
from phalanx.wire.call_order import HEADER, CallNumber

_MAX_TEXT = 500
_UNCERTAIN_STATUS = frozenset({500, 502, 504})
_JSON = msgspec.json.Decoder()


@dataclass(frozen=True)
class EngineTimeouts:
    """How long is waited: for a connection, for a health check, for one generated token, and for
    everything else. Whoever calls may give up earlier.
    """

    connect_s: float = 5.0
    health_s: float = 5.0
    ready_s: float = 30.0
    call_s: float = 600.0

    @classmethod
    def of(cls, deployment: DeploymentSpec) -> Self:
        """No shorter than what a role gives its engines for the same."""
        usual = cls()
        return cls(
            health_s=deployment.health_timeout_s,
            call_s=max(usual.call_s, deployment.startup_timeout_s, deployment.offload_timeout_s),
        )

    def __post_init__(self) -> None:
        for name in ("connect_s", "health_s", "ready_s", "call_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be above 0")


class SGLangEngine:
    """One engine at `url`. `api_key` goes along as a bearer token.

    What an engine has done already is not asked for again here: SGLang's own crashes on some of it.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeouts: EngineTimeouts | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._timeouts = timeouts or EngineTimeouts()
        self._name = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._client = httpx.AsyncClient(
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            # A kept connection may have been closed by the other side: then a request would be lost
            # without anybody knowing whether it arrived.
            limits=httpx.Limits(max_keepalive_connections=0),
            # Without TLS there is nothing to verify, and its context takes long to make.
            verify=self.url.startswith("https:"),
            trust_env=False,
            transport=transport,
        )

    async def healthy(self) -> bool:
        """Whether `/health` answers 200 in time."""
        return await self._status("/health", self._timeouts.health_s) == 200

    async def ready(self) -> bool:
        """Whether it generates a token. For an engine that holds weights and cache: SGLang's own
        crashes on it otherwise. A server of another make, which has no such check, is asked whether
        it is healthy.
        """
        status = await self._status("/health_generate", self._timeouts.ready_s)
        return await self.healthy() if status == 404 else status == 200

    async def pause(self) -> None:
        await self._post("/pause_generation", {"mode": "abort"})

    async def go_on(self) -> None:
        await self._post("/continue_generation", {})

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"rid": "", "abort_all": True})

    async def is_idle(self) -> bool:
        """Whether `/flush_cache` is done: it is refused while a request runs or waits."""
        response = await self._send("POST", "/flush_cache", {}, self._timeouts.call_s)
        if response.status_code == 400:
            return False
        self._check(response, "/flush_cache")
        return True

    async def num_requests(self) -> int | None:
        """What `/v1/loads` says of all its ranks; None where it says nothing."""
        try:
            loads = (await self._get("/v1/loads?include=core")).get("loads")
            counts = [one["num_running_reqs"] + one["num_waiting_reqs"] for one in loads or ()]
            return sum(counts) if counts else None
        except (TypeError, KeyError):
            return None

    async def release(self, tags: frozenset[Tag]) -> None:
        await self._post_in_order("/release_memory_occupation", _tags(tags))

    async def resume(self, tags: frozenset[Tag]) -> None:
        await self._post_in_order("/resume_memory_occupation", _tags(tags))

    async def resident(self) -> frozenset[Tag] | None:
        """What `/server_info` says under `memory`; None from SGLang's own, which does not say."""
        resident = (await self._memory()).get("resident")
        if not isinstance(resident, list):
            return None
        known = {tag.value for tag in Tag}
        return frozenset(Tag(tag) for tag in resident if tag in known)

    async def waits_for_weights(self) -> bool | None:
        """What `/server_info` says under `memory`; None from SGLang's own, which does not say."""
        waits = (await self._memory()).get("waiting_for_weights")
        return waits if isinstance(waits, bool) else None

    async def weight_version(self) -> str:
        path = "/model_info"
        version = (await self._get(path)).get("weight_version")
        if not isinstance(version, str):
            raise EngineCallError(
                f"{self.url}{path} tells no weight_version; it is no engine of SGLang's wire, or"
                " an older one",
                uncertain=False,
            )
        return version

    async def load_weights(self, path: str, version: str) -> None:
        """Raises an uncertain error where new weights are in, and what was cached of old ones too."""
        await self._post(
            "/update_weights_from_disk",
            {
                "model_path": path,
                "weight_version": version,
                "abort_all_requests": False,
                "flush_cache": True,
            },
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _status(self, path: str, timeout_s: float) -> int | None:
        """That of the answer; None where there is none in time."""
        try:
            return (await self._send("GET", path, None, timeout_s)).status_code
        except EngineCallError:
            return None

    async def _memory(self) -> Mapping[str, Any]:
        memory = (await self._get("/server_info")).get("memory")
        return memory if isinstance(memory, dict) else {}

    async def _get(self, path: str) -> Mapping[str, Any]:
        response = await self._send("GET", path, None, self._timeouts.call_s)
        self._check(response, path)
        answer = _object(response)
        if answer is None:
            raise EngineCallError(
                f"{self.url}{path} answered {_text(response)}, which is no JSON object",
                uncertain=False,
            )
        return answer

    async def _post(self, path: str, body: Mapping[str, object]) -> None:
        response = await self._send("POST", path, body, self._timeouts.call_s)
        self._check(response, path)

    async def _post_in_order(self, path: str, body: Mapping[str, object]) -> None:
        """One that was given up may still be under way: it is not to be done after a later one."""
        number = CallNumber(self._name, next(self._numbers))
        response = await self._send("POST", path, body, self._timeouts.call_s, number)
        self._check(response, path)

    async def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        timeout_s: float,
        number: CallNumber | None = None,
    ) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, self._timeouts.connect_s))
        where = f"{method} {self.url}{path}"
        try:
            return await self._client.request(
                method,
                self.url + path,
                json=body,
                timeout=timeout,
                headers=None if number is None else {HEADER: str(number)},
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineCallError(
                f"{where}: no connection: {_words(error)}", uncertain=False, gone=_refused(error)
            ) from error
        except httpx.TimeoutException as error:
            raise EngineCallError(
                f"{where}: no answer within {timeout_s} s; it may still be done", uncertain=True
            ) from error
        except httpx.RequestError as error:
            raise EngineCallError(
                f"{where}: the connection was lost, or the answer cannot be read: {_words(error)};"
                " it may have been done",
                uncertain=True,
            ) from error

    def _check(self, response: httpx.Response, path: str) -> None:
        status, answer = response.status_code, _object(response)
        if 200 <= status < 300 and (answer is None or answer.get("success") is not False):
            return
        raise EngineCallError(
            f"{response.request.method} {self.url}{path} was answered with {status}: "
            f"{_text(response)}",
            uncertain=_is_uncertain(status, answer),
            out_of_memory=status == 507,
            taken_over=status == 400 and _refused_field(answer) == HEADER,
        )


def _is_uncertain(status: int, answer: Mapping[str, Any] | None) -> bool:
    if answer is not None and answer.get("success") is False:
        # The weights are in, and what was computed with the old ones was not dropped.
        return "flush" in str(answer.get("message", "")).lower()
    if status == 503:
        return answer is None  # else the engine itself turned it away, and no proxy before it
    return status in _UNCERTAIN_STATUS


def _refused_field(answer: Mapping[str, Any] | None) -> object:
    """Which field of the request is at fault, as our own engines say it."""
    error = None if answer is None else answer.get("error")
    return error.get("param") if isinstance(error, dict) else None


def _tags(tags: frozenset[Tag]) -> dict[str, object]:
    return {"tags": sorted(tag.value for tag in tags)}


def _object(response: httpx.Response) -> Mapping[str, Any] | None:
    try:
        answer = _JSON.decode(response.content)
    except msgspec.DecodeError:
        return None
    return answer if isinstance(answer, dict) else None


def _text(response: httpx.Response) -> str:
    text = response.text.strip()
    return (text[:_MAX_TEXT] + "...") if len(text) > _MAX_TEXT else text or "nothing"


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _refused(error: BaseException) -> bool:
    """Whether the machine said that nobody listens there."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ConnectionRefusedError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
