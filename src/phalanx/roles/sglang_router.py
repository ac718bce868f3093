"""A model's sglang-router, ours or somebody else's, and the replicas that it knows.

It takes registrations and answers before it has acted on them, so whoever adds or removes a replica
here waits until the router's own list says so.

A stock router builds requests anew from the fields that it knows: the rest, most of what only RL asks
for, does not reach the engine. `DROPPED_FIELDS` lists what is known of that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
import msgspec

from phalanx.roles.contracts import EngineCallError
from phalanx.roles.external_pool import base_url
from phalanx.schema.roles import EngineGroupSpec

logger = logging.getLogger(__name__)
DROPPED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "/generate": (
        "return_routed_experts",
        "routed_experts_start_len",
        "return_prompt_token_ids",
        "return_flat_raw_top_logprobs",
        "session_id",
        "cache_salt",
        "sampling_params.spaces_between_special_tokens",
        "sampling_params.custom_params",
    ),
    "/v1/chat/completions": (
        "return_token_ids",
        "return_prompt_token_ids",
        "return_meta_info",
        "return_routed_experts",
    ),
}
"""Fields of requests that sglang-router 0.3.2 does not pass on, by path; and any that it does not
know. Answers pass unchanged.
"""
_PAUSE_S = 0.05
_CALL_TIMEOUT_S = 10.0
_JSON = msgspec.json.Decoder()


class SGLangRouter:
    """The router at `url`. `on_close` stops it where it is ours."""

    def __init__(
        self,
        url: str,
        *,
        register_timeout_s: float = 60.0,
        on_close: Callable[[], Awaitable[None]] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = base_url(url)
        self._timeout_s = register_timeout_s
        self._on_close = on_close
        self._known: dict[str, tuple[EngineGroupSpec, int | None]] = {}
        self._registering: dict[str, str] = {}
        self._client = httpx.AsyncClient(
            verify=self._url.startswith("https:"),
            trust_env=False,
            timeout=_CALL_TIMEOUT_S,
            transport=transport,
        )

    @property
    def url(self) -> str:
        return self._url

    async def answers(self) -> bool:
        """Whether it lists its workers."""
        try:
            await self._workers()
        except EngineCallError:
            return False
        return True

    async def add(self, url: str, worker: EngineGroupSpec, bootstrap_port: int | None) -> None:
        """Register the replica at `url`, and wait until the router counts it as healthy.

        One that it has already is only waited for. The error is uncertain where the router may
        still register it; `remove` then waits for that.
        """
        if not await self._find(url):
            body: dict[str, object] = {"url": url, "worker_type": worker.worker_type.value}
            if bootstrap_port is not None:
                body["bootstrap_port"] = bootstrap_port
            answer = await self._call("POST", "/workers", body)
            self._registering[url] = str(answer.get("worker_id", ""))
        try:
            async with asyncio.timeout(self._timeout_s):
                while not any(found.get("is_healthy") for found in await self._find(url)):
                    await self._check_registration(url)
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise EngineCallError(
                f"the router {self._url} does not count {url} as healthy after {self._timeout_s} s",
                uncertain=True,
            ) from None
        self._registering.pop(url, None)
        self._known[url] = (worker, bootstrap_port)

    async def add_all_again(self) -> None:
        """Register what it knew, after it has begun anew; what cannot be is left to its manager."""
        self._registering.clear()
        for url, (worker, bootstrap_port) in tuple(self._known.items()):
            if url not in self._known:
                continue  # removed meanwhile
            try:
                await self.add(url, worker, bootstrap_port)
            except EngineCallError as error:
                logger.warning("%s", error)

    async def remove(self, url: str) -> None:
        """Deregister the replica at `url`, and wait until the router no longer lists it."""
        self._known.pop(url, None)
        try:
            async with asyncio.timeout(self._timeout_s):
                # One that is under way is not undone by a removal, and would be there after it.
                while await self._is_registering(url):  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(_PAUSE_S)
                while found := await self._find(url):
                    for worker in found:
                        await self._delete(str(worker.get("id")))
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise EngineCallError(
                f"the router {self._url} still has {url} after {self._timeout_s} s", uncertain=True
            ) from None
        self._registering.pop(url, None)

    async def close(self) -> None:
        """Stop the router where we run it. Any number of times."""
        if self._on_close is not None:
            await self._on_close()
        await self._client.aclose()

    async def _find(self, url: str) -> list[Mapping[str, Any]]:
        return [worker for worker in await self._workers() if worker.get("url") == url]

    async def _workers(self) -> list[Mapping[str, Any]]:
        workers = (await self._call("GET", "/workers")).get("workers")
        if not isinstance(workers, list):
            raise EngineCallError(
                f"{self._url}/workers lists no workers; it is no sglang-router", uncertain=False
            )
        return workers

    async def _delete(self, worker_id: str) -> None:
        try:
            await self._call("DELETE", f"/workers/{worker_id}")
        except _NotFoundError:
            return  # another removal was faster

    async def _is_registering(self, url: str) -> bool:
        job = await self._job(url)
        return job.get("status") in ("pending", "processing") and not await self._find(url)

    async def _check_registration(self, url: str) -> None:
        job = await self._job(url)
        if job.get("status") == "failed":
            self._registering.pop(url, None)
            raise EngineCallError(
                f"the router {self._url} cannot register {url}: {job.get('message')}",
                uncertain=False,
            )

    async def _job(self, url: str) -> Mapping[str, Any]:
        """What the router says of the registration that was asked for last; empty: nothing."""
        worker_id = self._registering.get(url)
        if not worker_id:
            return {}
        try:
            job = (await self._call("GET", f"/workers/{worker_id}")).get("job_status")
        except _NotFoundError:
            return {}
        return job if isinstance(job, dict) else {}

    async def _call(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> Mapping[str, Any]:
        where = f"{method} {self._url}{path}"
        try:
            response = await self._client.request(method, self._url + path, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineCallError(
                f"{where}: no connection: {error}", uncertain=False, gone=True
            ) from error
        except httpx.RequestError as error:
            raise EngineCallError(
                f"{where}: no answer: {error or type(error).__name__}", uncertain=True
            ) from error
        if response.status_code == 404:
            raise _NotFoundError(f"{where}: not found", uncertain=False)
        try:
            answer = _JSON.decode(response.content)
        except msgspec.DecodeError:
            answer = None
        if not 200 <= response.status_code < 300 or not isinstance(answer, dict):
            raise EngineCallError(
                f"{where} was answered with {response.status_code}: {response.text[:300]}",
                uncertain=response.status_code >= 500,
            )
        return answer


class _NotFoundError(EngineCallError):
    """The router has no such worker."""
