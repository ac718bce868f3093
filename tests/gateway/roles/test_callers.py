"""Callers' exact requests through a role's gateway, to a real engine: data goes through the gateway,
control to the engine itself. There is no code for any of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from phalanx.client import AsyncRoleClient
from phalanx.schema.roles import RoutingSpec, WorkloadType
from tests.gateway.roles.running import content, model, role, run
from tests.server.callers.call import Call
from tests.server.callers.test_callers import CALLERS, known  # noqa: F401 - a fixture
from tests.server.rl.models import serving, write_llama

DATA = ("/generate", "/v1/chat/completions")
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("served"), 1)


def published(url: str, workload: WorkloadType = WorkloadType.ROLLOUT):
    """One model that callers name by an alias, and its engine by another name."""
    port = int(url.rpartition(":")[2])
    student = model("student", port, served_model_name="policy")
    routing = RoutingSpec(aliases={"policy": "student"})
    return content(student, routing=routing, workload=workload)


@contextmanager
def gateway(url: str) -> Iterator[str]:
    """The role's address, behind which the engine at `url` is."""
    ready: Future[int] = Future()

    async def serve() -> None:
        async with role(published(url)) as front:
            end = asyncio.Event()
            loop = asyncio.get_running_loop()
            stop.set_result(lambda: loop.call_soon_threadsafe(end.set))
            ready.set_result(front.port)
            await end.wait()

    stop: Future = Future()
    thread = threading.Thread(target=run, args=(serve(),))
    thread.start()
    try:
        yield f"http://127.0.0.1:{ready.result()}/rollout"
    finally:
        stop.result()()
        thread.join()


@pytest.mark.long
@pytest.mark.parametrize("caller", CALLERS)
def test_a_caller_gets_what_it_reads_through_the_gateway(directory, known, caller):  # noqa: F811
    calls: list[Call] = CALLERS[caller]
    through = 0
    with serving(directory) as server, server.client() as direct, gateway(server.url) as url:
        with httpx.Client(timeout=60) as client:
            for call in calls:
                if call.path in DATA:
                    replace(call, path=url + call.path).made(client, known)
                    through += 1
                else:
                    call.made(direct, known)
    assert through or caller in ("trl", "openrlhf"), "it has asked the gateway for nothing"


def test_i25_i59_a_teacher_is_asked_alike_at_its_engine_and_at_the_gateway(directory):
    """What on-policy distillation asks of a teacher's URL, whichever of the two it is."""
    scored = {
        "input_ids": [5, 6, 7, 8, 9],
        "sampling_params": {"temperature": 0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 2,
        "top_logprobs_num": 2,
    }
    asked = [scored, {"input_ids": [[5, 6], [7]], "sampling_params": GREEDY, "stream": False}]

    async def scenario(url: str):
        async with role(published(url, WorkloadType.TEACHER), name="teacher") as front:
            at_gateway = f"http://127.0.0.1:{front.port}/teacher/generate"
            answers = []
            for address in (url + "/generate", at_gateway):
                async with AsyncRoleClient(address, mode="gateway") as client:
                    answers.append([await client.generate(each) for each in asked])
            return answers

    with serving(directory) as server:
        direct, relayed = run(scenario(server.url))
    for one, other in zip(direct, relayed, strict=True):
        assert stable(one) == stable(other)
    tokens = relayed[0]["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in tokens] == [7, 8, 9]


def test_i56_a_judges_text_is_that_of_its_own_chat_completions(directory):
    messages = [{"role": "user", "content": "Is 2 right?"}]
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}

    async def scenario(url: str):
        async with role(published(url, WorkloadType.GENRM), name="genrm") as front:
            base = f"http://127.0.0.1:{front.port}/genrm"
            async with AsyncRoleClient(base, mode="gateway") as client:
                judged = await client.generate({"messages": messages, "sampling_params": sampling})
                chat = {"messages": messages, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
                return judged, await client.chat(chat)

    with serving(directory) as server:
        judged, completion = run(scenario(server.url))
    assert judged == {"response": completion["choices"][0]["message"]["content"]}
    assert completion["model"] == "policy" and judged["response"]


def stable(answer: object) -> object:
    """Without what differs from request to request."""
    if isinstance(answer, list):
        return [stable(each) for each in answer]
    if isinstance(answer, dict):
        return {
            name: stable(value)
            for name, value in answer.items()
            if name not in ("id", "e2e_latency", "cached_tokens")
        }
    return answer
