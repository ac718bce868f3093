"""The real sglang-router: started and kept as a model's router, alone and for pairs of workers, and
what it does not pass on. `make test-long`; its environment is made by `python scripts/peer_env.py
router`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from phalanx.roles.contracts import EngineCallError, ModelRouter
from phalanx.roles.local_launcher import LocalLauncher
from phalanx.roles.router_process import RouterSettings, RouterStarter
from phalanx.roles.sglang_engine import SGLangEngine
from phalanx.roles.sglang_router import DROPPED_FIELDS, SGLangRouter
from phalanx.schema.roles import (
    EngineGroupSpec,
    InferenceModelSpec,
    RouteMode,
    RoutingPolicy,
    WeightSource,
    WorkerType,
)
from phalanx.testing.raw_http import answer, read_request
from phalanx.testing.roles_conformance import check_model_router
from tests.roles.launching.engines import healthy, launching
from tests.roles.launching.processes import has_ended, wait_for_end, watched
from tests.roles.launching.specs import launch_of, model_of, sglang_group

PYTHON = Path(__file__).parents[3] / ".venv-router" / "bin" / "python"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="no sglang-router: run `python scripts/peer_env.py router`"
    ),
]
REGULAR = EngineGroupSpec()
SAMPLING = {"max_new_tokens": 3}


def routed(*groups: EngineGroupSpec, path: Path, **fields: object) -> InferenceModelSpec:
    return model_of(
        *groups,
        path=str(path),
        weight_source=WeightSource.LOCAL,
        route_mode=RouteMode.SGLANG_ROUTER,
        **fields,
    )


def settings(logs: Path, **fields: object) -> RouterSettings:
    return RouterSettings(logs, python=str(PYTHON), **fields)


@asynccontextmanager
async def opened(
    model: InferenceModelSpec, logs: Path, **fields: object
) -> AsyncIterator[SGLangRouter]:
    router = await RouterStarter(settings(logs, **fields)).open("rollout", model)
    try:
        yield router
    finally:
        await router.close()
        await router.close()


async def engine(launcher: LocalLauncher, model: InferenceModelSpec, at: int = 0, group: int = 0):
    """A healthy one of the conformance server."""
    replica = await launcher.launch(launch_of(model, at, group=group))
    async with SGLangEngine(replica.url) as control:
        await healthy(replica, control)
    return replica


async def workers(router: SGLangRouter) -> set[str]:
    async with httpx.AsyncClient() as client:
        return {one["url"] for one in (await client.get(f"{router.url}/workers")).json()["workers"]}


def test_replicas_are_added_and_removed_and_requests_pass(tiny_llama, tmp_path, caplog):
    model = routed(sglang_group(num_replicas=2), path=tiny_llama)
    _: type[ModelRouter] = SGLangRouter

    async def main() -> None:
        async with launching(tmp_path) as launcher, opened(model, tmp_path) as router:
            one, other = [await engine(launcher, model, at) for at in range(2)]
            for replica in (one, one, other):
                await router.add(replica.url, REGULAR, None)
            assert await workers(router) == {one.url, other.url}
            async with httpx.AsyncClient(timeout=60.0) as client:
                body = {"text": "a", "sampling_params": SAMPLING}
                response = await client.post(f"{router.url}/generate", json=body)
                assert response.json()["meta_info"]["completion_tokens"] == 3
            await router.remove(one.url)
            await router.remove(one.url)
            assert await workers(router) == {other.url}
            await router.remove(other.url)
            assert await workers(router) == set()
            await check_model_router(router, one.url, REGULAR)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "sglang-router, which passes on only the fields that it knows" in caplog.text


def test_i50_a_pair_is_reached_through_the_router_alone(tiny_llama, tmp_path):
    prefill = sglang_group(worker_type=WorkerType.PREFILL)
    decode = sglang_group(worker_type=WorkerType.DECODE)
    model = routed(prefill, decode, path=tiny_llama)

    async def main() -> None:
        async with launching(tmp_path) as launcher, opened(model, tmp_path) as router:
            one = await engine(launcher, model)
            other = await engine(launcher, model, 1, 1)
            assert one.bootstrap_port is not None
            await router.add(one.url, prefill, one.bootstrap_port)
            await router.add(other.url, decode, None)
            async with httpx.AsyncClient(timeout=60.0) as client:
                body = {"text": "a", "sampling_params": SAMPLING}
                for _ in range(2):
                    response = await client.post(f"{router.url}/generate", json=body)
                    assert response.json()["meta_info"]["completion_tokens"] == 3
                alone = await client.post(f"{other.url}/generate", json=body)
                assert alone.status_code == 400

    asyncio.run(main())


def test_a_request_is_sent_once_though_its_worker_dies(tiny_llama, tmp_path):
    """The router's own retries are off: a request that has started is nobody's to repeat."""
    model = routed(sglang_group(num_replicas=2), path=tiny_llama)

    async def main() -> None:
        async with launching(tmp_path) as launcher, opened(model, tmp_path) as router:
            replicas = [await engine(launcher, model, at) for at in range(2)]
            for replica in replicas:
                await router.add(replica.url, REGULAR, None)
            os.kill(replicas[0].pid, signal.SIGKILL)
            await replicas[0].exited()
            async with httpx.AsyncClient(timeout=60.0) as client:
                body = {"text": "a", "sampling_params": SAMPLING}
                answers = [
                    (await client.post(f"{router.url}/generate", json=body)).status_code
                    for _ in range(4)
                ]
            assert sorted(answers) == [200, 200, 500, 500]
            await router.remove(replicas[0].url)
            assert await workers(router) == {replicas[1].url}

    asyncio.run(main())


def test_affinity_keeps_a_key_at_its_replica(tiny_llama, tmp_path):
    model = routed(sglang_group(num_replicas=2), path=tiny_llama)

    async def main() -> None:
        async with (
            launching(tmp_path) as launcher,
            opened(model, tmp_path, policy=RoutingPolicy.AFFINITY) as router,
        ):
            for at in range(2):
                replica = await engine(launcher, model, at)
                await router.add(replica.url, REGULAR, None)
            async with httpx.AsyncClient(timeout=60.0) as client:
                for key in ("a", "b", "c", "a", "b", "c"):
                    await client.post(
                        f"{router.url}/generate",
                        json={"rid": f"{key}", "text": "a", "sampling_params": SAMPLING},
                        headers={"x-smg-routing-key": key},
                    )
        logs = (tmp_path / "rollout" / "student").glob("[01].0.log")
        counts = [log.read_text().count('"POST /generate') for log in logs]
        assert sum(counts) == 6 and all(count % 2 == 0 for count in counts)

    asyncio.run(main())


def test_a_registration_that_is_under_way_is_waited_for_before_it_is_undone(tiny_llama, tmp_path):
    """A removal does not cancel it: what answers at that address later would join after all."""
    model = routed(sglang_group(), path=tiny_llama)

    async def main() -> None:
        async with launching(tmp_path) as launcher, opened(model, tmp_path) as router:
            with socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))
                port = unused.getsockname()[1]
            late = f"http://127.0.0.1:{port}"
            impatient = SGLangRouter(router.url, register_timeout_s=0.2)
            with pytest.raises(EngineCallError, match="as healthy after") as caught:
                await impatient.add(late, REGULAR, None)
            assert caught.value.uncertain
            with pytest.raises(EngineCallError, match="still has") as caught:
                await impatient.remove(late)
            assert caught.value.uncertain
            replica = await engine(launcher, model)
            await router.add(replica.url, REGULAR, None)
            assert await workers(router) == {replica.url}
            await impatient.close()

    asyncio.run(main())


def test_one_that_dies_is_started_anew_at_its_address_with_its_replicas(tiny_llama, tmp_path):
    model = routed(sglang_group(num_replicas=2), path=tiny_llama)

    async def main() -> None:
        async with launching(tmp_path) as launcher:
            before = children()
            async with opened(model, tmp_path) as router:
                mine = children() - before
                replicas = [await engine(launcher, model, at) for at in range(2)]
                for replica in replicas:
                    await router.add(replica.url, REGULAR, None)
                await router.remove(replicas[1].url)
                (pid,) = [pid for pid in mine if leads_a_log(pid, tmp_path)]
                with watched(pid) as ends:
                    os.kill(pid, signal.SIGKILL)
                    wait_for_end(ends)
                while not await router.answers():  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0.05)
                while await workers(router) != {replicas[0].url}:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                async with httpx.AsyncClient(timeout=60.0) as client:
                    body = {"text": "a", "sampling_params": SAMPLING}
                    response = await client.post(f"{router.url}/generate", json=body)
                    assert response.json()["meta_info"]["completion_tokens"] == 3

    asyncio.run(main())


def leads_a_log(pid: int, logs: Path) -> bool:
    """Whether what it prints goes to a file there."""
    return os.readlink(f"/proc/{pid}/fd/1").startswith(str(logs))


def children() -> set[int]:
    pid = os.getpid()
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_its_processes_end_with_it(tiny_llama, tmp_path):
    model = routed(sglang_group(), path=tiny_llama)

    async def main() -> None:
        before = children()
        async with opened(model, tmp_path) as router:
            started = children() - before
            assert len(started) == 2  # the router, and what guards it
            with watched(*started) as ends:
                await router.close()
                assert all(map(has_ended, ends))

    asyncio.run(main())


class Echo:
    """An engine that remembers the bodies which it is sent."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader, writer)
        if request is not None:
            body = request.json()
            if isinstance(body, dict):
                self.bodies.append(body)
            told = {"text": "", "meta_info": {}, "choices": [], "id": "x", "object": "x"}
            writer.write(answer(200, {**told, "extra": [1], "model": "m", "created": 0}))
            await writer.drain()
        writer.close()


SENT = {
    "/generate": {
        "text": "a",
        "rid": "r1",
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [5],
        "extra_key": "k",
        "priority": 3,
        "lora_path": "l",
        "return_routed_experts": True,
        "routed_experts_start_len": 1,
        "return_prompt_token_ids": True,
        "return_flat_raw_top_logprobs": True,
        "session_id": "s",
        "cache_salt": "c",
        "sampling_params": {
            "max_new_tokens": 3,
            "sampling_seed": 7,
            "spaces_between_special_tokens": False,
            "custom_params": {"x": 1},
        },
    },
    "/v1/chat/completions": {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 3,
        "chat_template_kwargs": {"enable_thinking": False},
        "return_token_ids": True,
        "return_prompt_token_ids": True,
        "return_meta_info": True,
        "return_routed_experts": True,
    },
}


def names(body: dict, prefix: str = "") -> set[str]:
    found = set()
    for name, value in body.items():
        found.add(prefix + name)
        if name == "sampling_params":
            found |= names(value, f"{name}.")
    return found


@pytest.mark.parametrize("path", SENT)
def test_i25_what_the_router_does_not_pass_on_is_what_is_documented(path, tiny_llama, tmp_path):
    """A newer router that passes on more, or less, makes this fail: then change the list."""
    model = routed(sglang_group(), path=tiny_llama)
    echo = Echo()

    async def main() -> dict:
        async with opened(model, tmp_path) as router:
            async with await asyncio.start_server(echo.serve, "127.0.0.1", 0) as server:
                url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                await router.add(url, REGULAR, None)
                echo.bodies.clear()
                async with httpx.AsyncClient(timeout=60.0) as client:
                    response = await client.post(f"{router.url}{path}", json=SENT[path])
                await router.remove(url)
                return response.json()

    answered = asyncio.run(main())
    (received,) = echo.bodies
    assert names(SENT[path]) - names(received) == set(DROPPED_FIELDS[path])
    assert answered["extra"] == [1], json.dumps(answered)
