"""Talks with the server that behaves as SGLang, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from phalanx.testing.sglang_scheduler import SchedulerCrashedError, SchedulerOptions
from phalanx.testing.sglang_server import sglang_app

ENDLESS = {"max_new_tokens": 10**9, "ignore_eos": True}
Test = Callable[[httpx.AsyncClient], Awaitable[None]]


@asynccontextmanager
async def client_of(
    options: SchedulerOptions, crashes: list[str], **args: object
) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(sglang_app(options, crashes.append, args))
    async with httpx.AsyncClient(transport=transport, base_url="http://sglang") as client:
        yield client


def talked(test: Test, *, crash: str | None = None, **fields: object) -> None:
    """Runs `test`; where it must end in a crash, with this reason."""
    args = {name: fields.pop(name) for name in ("disaggregation_mode",) if name in fields}
    crashes: list[str] = []

    async def main() -> None:
        async with client_of(SchedulerOptions(**fields), crashes, **args) as client:
            if crash is None:
                await test(client)
                return
            with pytest.raises(SchedulerCrashedError, match=crash):
                await test(client)
            with pytest.raises(SchedulerCrashedError):
                await client.get("/health")

    asyncio.run(main())
    assert len(crashes) == (crash is not None)


async def generated(client: httpx.AsyncClient, **body: object) -> dict:
    response = await client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@asynccontextmanager
async def running(client: httpx.AsyncClient, rid: str = "long") -> AsyncIterator[asyncio.Task]:
    """A request that runs until it is aborted; its answer is the task's result."""
    body = {"rid": rid, "text": "go", "sampling_params": ENDLESS}
    task = asyncio.create_task(generated(client, **body))
    try:
        await until_one(client, "num_running_reqs")
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_one(client: httpx.AsyncClient, what: str) -> None:
    while not (await loads(client))[what]:  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(0)


async def loads(client: httpx.AsyncClient) -> dict[str, int]:
    return (await client.get("/v1/loads", params={"include": "core"})).json()["loads"][0]
