"""The control calls of one class against real processes of both makes: ours, and what behaves as
SGLang. What a manager does in turn has to work at both; only the memory of ours can be asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from phalanx.roles.contracts import ALL_TAGS, EngineCallError, Tag
from phalanx.roles.sglang_engine import SGLangEngine
from phalanx.schema.roles import EngineKind, WeightSource
from phalanx.testing.roles_conformance import check_engine_control
from tests.roles.launching.engines import model_for, sglang_model, started

KINDS = [
    pytest.param(EngineKind.PHALANX, id="phalanx"),
    pytest.param(EngineKind.SGLANG, id="sglang"),
]
STATIC_KINDS = [
    pytest.param(EngineKind.PHALANX, marks=pytest.mark.long, id="phalanx"),
    pytest.param(EngineKind.SGLANG, id="sglang"),
]
# What behaves as SGLang reads no checkpoints and has no static servers.
OURS = pytest.mark.parametrize("engine", KINDS[:1], indirect=True)
OURS_STATIC = pytest.mark.parametrize("static_engine", STATIC_KINDS[:1], indirect=True)
ENDLESS = {"max_new_tokens": 4000, "ignore_eos": True}


@dataclass(frozen=True)
class Engine:
    """One that runs, for all tests of this file, in an event loop of its own."""

    kind: EngineKind
    control: SGLangEngine
    url: str
    loop: asyncio.Runner

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        self.loop.run(test())

    @property
    def is_ours(self) -> bool:
        return self.kind is EngineKind.PHALANX

    async def generate(self, **body: object) -> dict:
        async with httpx.AsyncClient(timeout=60.0) as client:
            response = await client.post(f"{self.url}/generate", json=body)
            assert response.status_code == 200, response.text
            return response.json()

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[asyncio.Task[str]]:
        """A stream that has begun; the task's result is all of it."""
        begun = asyncio.Event()
        body = {"text": "The sea", "sampling_params": ENDLESS, "stream": True}

        async def read() -> str:
            parts = []
            async with (
                httpx.AsyncClient(timeout=60.0) as client,
                client.stream("POST", f"{self.url}/generate", json=body) as response,
            ):
                async for part in response.aiter_text():
                    parts.append(part)
                    begun.set()
            return "".join(parts)

        task = asyncio.create_task(read())
        await begun.wait()
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(scope="module", params=KINDS)
def engine(request, tiny_llama, tmp_path_factory) -> Iterator[Engine]:
    yield from running(request.param, tiny_llama, tmp_path_factory, WeightSource.LOCAL)


@pytest.fixture(scope="module", params=STATIC_KINDS)
def static_engine(request, tiny_llama, tmp_path_factory) -> Iterator[Engine]:
    yield from running(request.param, tiny_llama, tmp_path_factory, WeightSource.STATIC)


def running(
    kind: EngineKind, model: Path, directories: pytest.TempPathFactory, source: WeightSource
) -> Iterator[Engine]:
    async def start(stack: AsyncExitStack):
        logs = directories.mktemp("logs")
        return await stack.enter_async_context(started(logs, model_for(kind, model, source)))

    with asyncio.Runner() as loop:
        stack = AsyncExitStack()
        try:
            replica, control = loop.run(start(stack))
            yield Engine(kind, control, replica.url, loop)
        finally:
            loop.run(stack.aclose())


def test_it_is_healthy_and_ready_and_tells_its_weights(engine):
    async def test() -> None:
        assert await engine.control.healthy()
        assert await engine.control.ready()
        assert await engine.control.weight_version()
        held = await engine.control.resident()
        assert held == (ALL_TAGS if engine.is_ours else None)
        assert await engine.control.waits_for_weights() == (False if engine.is_ours else None)

    engine.run(test)


def test_it_is_not_idle_while_a_request_runs_and_is_when_it_is_aborted(engine):
    async def test() -> None:
        assert await engine.control.is_idle()
        assert await engine.control.num_requests() == 0
        async with engine.generating() as task:
            assert not await engine.control.is_idle()
            assert await engine.control.num_requests() == 1
            await engine.control.abort_all()
            assert '"abort"' in await task
        while not await engine.control.is_idle():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)

    engine.run(test)


def test_a_pause_ends_what_runs_and_holds_what_comes(engine):
    async def test() -> None:
        async with engine.generating() as task:
            await engine.control.pause()
            assert '"abort"' in await task
        later = asyncio.create_task(
            engine.generate(text="a", sampling_params={"max_new_tokens": 2})
        )
        await engine.control.go_on()
        assert (await later)["meta_info"]["completion_tokens"] > 0

    engine.run(test)


def test_it_holds_the_contract_of_an_engine(static_engine):
    static_engine.run(lambda: check_engine_control(static_engine.control))


def test_complaint_dynamo_13823_memory_is_taken_again_tag_by_tag(static_engine):
    engine = static_engine

    async def test() -> None:
        greedy = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        before = (await engine.generate(text="The sea", sampling_params=greedy))["text"]
        await engine.control.pause()
        assert await engine.control.is_idle()
        await engine.control.release(ALL_TAGS)
        if engine.is_ours:
            assert await engine.control.resident() == frozenset()
        await engine.control.resume(frozenset({Tag.WEIGHTS}))
        if engine.is_ours:
            assert await engine.control.resident() == {Tag.WEIGHTS}
        await engine.control.resume(frozenset({Tag.KV_CACHE, Tag.CUDA_GRAPH}))
        await engine.control.go_on()
        assert await engine.control.ready()
        after = (await engine.generate(text="The sea", sampling_params=greedy))["text"]
        assert after == before

    engine.run(test)


def test_weights_are_loaded_as_a_version_that_answers_tell(engine, other_tiny_llama):
    async def test() -> None:
        greedy = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        before = await engine.generate(text="The sea", sampling_params=greedy)
        await engine.control.load_weights(str(other_tiny_llama), "step-7")
        assert await engine.control.weight_version() == "step-7"
        after = await engine.generate(text="The sea", sampling_params=greedy)
        assert after["meta_info"]["weight_version"] == "step-7"
        assert after["text"] != before["text"]

    engine.run(test)


@OURS
def test_weights_that_do_not_fit_are_refused_and_nothing_has_changed(engine, tmp_path):
    async def test() -> None:
        before = await engine.control.weight_version()
        with pytest.raises(EngineCallError) as caught:
            await engine.control.load_weights(str(tmp_path), "step-8")
        assert not caught.value.uncertain and not caught.value.gone
        assert await engine.control.weight_version() == before
        assert await engine.control.ready()

    engine.run(test)


@OURS_STATIC
def test_i96_a_static_server_of_ours_refuses_other_weights(static_engine, other_tiny_llama):
    async def test() -> None:
        with pytest.raises(EngineCallError, match="static") as caught:
            await static_engine.control.load_weights(str(other_tiny_llama), "1")
        assert not caught.value.uncertain
        assert await static_engine.control.ready()

    static_engine.run(test)


@OURS_STATIC
def test_i86_ours_takes_again_what_it_holds(static_engine):
    control = static_engine.control

    async def test() -> None:
        await control.resume(frozenset({Tag.WEIGHTS}))
        await control.release(frozenset({Tag.KV_CACHE}))
        await control.release(frozenset({Tag.KV_CACHE}))
        await control.resume(ALL_TAGS)
        await control.resume(ALL_TAGS)
        assert await control.ready()

    static_engine.run(test)


def test_i86_where_sglang_dies_of_it_the_first_answer_is_lost_and_then_it_is_gone(
    tiny_llama, tmp_path
):
    async def main() -> None:
        async with started(tmp_path, sglang_model(tiny_llama)) as (replica, control):
            with pytest.raises(EngineCallError) as caught:
                await control.resume(frozenset({Tag.WEIGHTS}))
            assert caught.value.uncertain
            assert "KeyError: 'weights'" in await replica.exited()
            with pytest.raises(EngineCallError) as caught:
                await control.resume(frozenset({Tag.WEIGHTS}))
            assert caught.value.gone

    asyncio.run(main())
