"""Callers of a generative reward model who send messages to `/generate`, and those who do not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace

import pytest

from phalanx.gateway.http.limits import HttpLimits
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.schema.roles import RoutingPolicy, RoutingSpec, WorkloadType
from tests.gateway.roles.running import (
    Engine,
    ask_json,
    content,
    listening,
    model,
    raw,
    role,
    run,
)
from tests.gateway.roles.test_refusing import Dying, free_port

PATH = "/genrm/generate"
MESSAGES = [{"role": "user", "content": 'Is "2" right?', "extra": {"n": 1.0}}]
ASKED = json.dumps({"messages": MESSAGES}).encode()


def completion(text: str | None) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": None}
    return json.dumps({"id": "x", "choices": [choice], "usage": {}}).encode()


def judges(*models, **changes):
    return content(*models, workload=WorkloadType.GENRM, **changes)


def test_i56_messages_are_answered_with_the_response_alone():
    engine = Engine(completion('["yes"] \u00e9'))

    async def scenario():
        async with listening(engine) as ports:
            async with role(judges(model("judge", *ports)), name="genrm") as front:
                answer = await front.ask(PATH, ASKED, x_request_id="r1")
                assert ask_json(answer) == {"response": '["yes"] \u00e9'}
                assert answer.status == 200 and answer.headers["x-inference-model"] == "judge"
                assert answer.headers["content-type"] == "application/json"
                assert front.in_flight == 0
                again = {"messages": MESSAGES, "sampling_params": {"temperature": 1}}
                assert (await front.ask(PATH, json.dumps(again).encode())).status == 200
                return front.gateway.servers.traffic.of("judge/0").codes

    assert run(scenario()) == {"200": 2}
    head, body = engine.asked[0]
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"x-request-id: r1\r\n" in head
    assert json.loads(body) == {"model": "judge", "messages": MESSAGES, "stream": False}
    assert json.loads(engine.bodies[1])["temperature"] == 1


def test_i20_i21_the_models_own_defaults_apply_and_the_callers_values_win():
    engine = Engine(completion("x"))
    one = model(
        "judge",
        served_model_name="base",
        sampling_defaults={"temperature": 0.2, "max_new_tokens": 1024, "top_k": -1},
        chat_template_kwargs={"enable_thinking": False},
    )
    asked = {
        "messages": MESSAGES,
        "sampling_params": {"temperature": 0.7, "max_new_tokens": 5, "stop": ["\n"]},
        "chat_template_kwargs": {"more": [1]},
        "rid": "mine",
        "route_key": "k",
        "model": None,
    }

    async def scenario():
        async with listening(engine) as ports:
            replicas = model("judge", *ports).replicas
            published = judges(
                replace(one, replicas=replicas), routing=RoutingSpec(route_keys={"k": "judge"})
            )
            async with role(published, name="genrm") as front:
                assert (await front.ask(PATH, json.dumps(asked).encode())).status == 200
                assert (await front.ask(PATH, ASKED)).status == 200
                # Who renders the request himself gets what he asks for and nothing else.
                plain = b'{"messages": [], "temperature": 1.50}'
                await front.ask("/genrm/v1/chat/completions", plain)

    run(scenario())
    given, defaults, plain = map(json.loads, engine.bodies)
    assert given == {
        "model": "base",
        "messages": MESSAGES,
        "temperature": 0.7,
        "max_tokens": 5,
        "top_k": -1,
        "stop": ["\n"],
        "stream": False,
        "chat_template_kwargs": {"enable_thinking": False, "more": [1]},
        "rid": "mine",
    }
    assert defaults["temperature"] == 0.2 and defaults["max_tokens"] == 1024
    assert defaults["chat_template_kwargs"] == {"enable_thinking": False}
    assert plain == {"model": "base", "messages": [], "temperature": 1.5}


def test_i57_an_engines_own_request_passes_on_the_same_path():
    engine = Engine(b'{"text": "y", "meta_info": {}}')

    async def scenario():
        async with listening(engine) as ports:
            async with role(judges(model("judge", *ports)), name="genrm") as front:
                for body in (b'{"input_ids":  [1]}', b'{"text": "a", "messages": null}'):
                    assert (await front.ask(PATH, body)).body == engine.answer

    run(scenario())
    assert engine.bodies == [b'{"input_ids":  [1]}', b'{"text": "a", "messages": null}']


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"text": "x"}, "text"),
        ({"input_ids": [1]}, "input_ids"),
        ({"max_tokens": 4}, "give it as sampling_params.max_new_tokens"),
        ({"temperature": 0}, "give it as sampling_params.temperature"),
        ({"temperature": 1}, "temperature"),
        ({"messages": []}, "empty"),
        ({"messages": "x"}, "messages"),
        ({"stream": True}, "stream"),
        ({"sampling_params": {"n": 2}}, "n must be 1"),
        ({"sampling_params": [1]}, "sampling_params"),
        ({"sampling_params": {"model": "other"}}, "give model beside them"),
        ({"sampling_params": {"messages": []}}, "give messages beside them"),
        ({"model": "none"}, "no model 'none'"),
        ({"route_key": "none"}, "no route_key 'none'"),
    ],
)
def test_i57_both_forms_in_one_body_and_other_mistakes_are_400(more, word):
    engine = Engine()

    async def scenario():
        async with listening(engine) as ports:
            async with role(judges(model("judge", *ports)), name="genrm") as front:
                body = json.dumps({"messages": MESSAGES, **more}).encode()
                return await front.ask(PATH, body)

    answer = run(scenario())
    assert answer.status == 400 and word in ask_json(answer)["error"]["message"]
    assert engine.asked == []


def test_messages_to_other_roles_are_their_engines_to_judge():
    engine = Engine(b"{}", status=400)

    async def scenario():
        async with listening(engine) as ports, role(content(model("m", *ports))) as front:
            assert (await front.ask("/rollout/generate", ASKED)).status == 400

    run(scenario())
    assert engine.bodies == [ASKED]


def test_i39_a_judge_that_sleeps_is_503():
    engine = Engine()

    async def scenario():
        async with listening(engine) as ports:
            sleeping = judges(model("judge", *ports, state=ReplicaState.SLEEPING))
            async with role(sleeping, name="genrm") as front:
                return await front.ask(PATH, ASKED)

    answer = run(scenario())
    assert answer.status == 503 and answer.headers["retry-after"] == "5"
    assert ask_json(answer)["state"] == "sleeping" and engine.asked == []
    assert answer.headers["x-inference-model"] == "judge"


def test_i43_a_judges_request_is_not_sent_again_either():
    engines = [Dying(), Dying()]

    async def scenario():
        async with listening(*engines) as ports:
            async with role(judges(model("judge", *ports)), name="genrm") as front:
                answer = await front.ask(PATH, ASKED)
                assert answer.status == 502 and front.in_flight == 0
                assert "not sent again" in ask_json(answer)["error"]["message"]

    run(scenario())
    assert sum(len(engine.asked) for engine in engines) == 1


def test_d4_a_judge_that_does_not_listen_is_passed_over():
    engine = Engine(completion("x"))

    async def scenario():
        async with listening(engine) as (port,):
            async with role(judges(model("judge", free_port(), port)), name="genrm") as front:
                for _ in range(3):
                    assert (await front.ask(PATH, ASKED)).status == 200
                traffic = front.gateway.servers.traffic
                assert traffic.of("judge/0").codes == {"503": 1}, "it was asked again at once"
                front.change("judge", replicas=model("judge", free_port()).replicas)
                answer = await front.ask(PATH, ASKED)
                assert traffic.of("judge/0").codes == {"503": 2}, "it was tried twice"
                assert (
                    answer.status == 503 and "not started" in ask_json(answer)["error"]["message"]
                )

    run(scenario())


@pytest.mark.parametrize(
    "body",
    [b"{}", b"x", b'{"choices": []}', b'{"choices": [{"message": {"content": 1}}]}'],
)
def test_an_answer_that_is_no_completion_is_502(body):
    async def scenario():
        async with listening(Engine(body)) as ports:
            async with role(judges(model("judge", *ports)), name="genrm") as front:
                return await front.ask(PATH, ASKED)

    answer = run(scenario())
    assert answer.status == 502 and answer.headers["x-inference-model"] == "judge"


def test_an_engines_refusal_and_an_empty_text():
    refusing, silent = Engine(b'{"error": {"message": "too long"}}', 400), Engine(completion(None))

    async def scenario():
        async with listening(refusing, silent) as (first, second):
            published = judges(
                model("r", first), model("s", second), routing=RoutingSpec(default_model="r")
            )
            async with role(published, name="genrm") as front:
                refused = await front.ask(PATH, ASKED)
                assert (refused.status, refused.body) == (400, refusing.answer)
                empty = json.dumps({"messages": MESSAGES, "model": "s"}).encode()
                assert ask_json(await front.ask(PATH, empty)) == {"response": ""}

    run(scenario())


def test_a_judges_answer_in_pieces_and_one_that_never_comes():
    class Slow(Engine):
        async def respond(self, writer):
            if len(self.asked) > 1:
                await asyncio.Event().wait()
            body = completion("x" * 100_000)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for start in range(0, len(body), 1000):
                part = body[start : start + 1000]
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await asyncio.sleep(0)
            writer.write(b"0\r\n\r\n")

    async def scenario():
        limits = HttpLimits(response_timeout_s=0.1)
        async with listening(Slow()) as ports:
            async with role(judges(model("judge", *ports)), name="genrm", limits=limits) as front:
                assert ask_json(await front.ask(PATH, ASKED)) == {"response": "x" * 100_000}
                assert (await front.ask(PATH, ASKED)).status == 504
                assert front.in_flight == 0

    run(scenario())


def test_a_caller_that_leaves_ends_the_judges_request():
    class Held(Engine):
        async def serve(self, reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            self.asked.append((b"", b""))
            self._came.set()
            with contextlib.suppress(ConnectionError):
                await reader.read()  # to the end
            self.closed.set()
            writer.close()

    engine = Held()

    async def scenario():
        async with listening(engine) as ports:
            async with role(judges(model("judge", *ports)), name="genrm") as front:
                client = await front.connect()
                client.write(raw(PATH, ASKED))
                await engine.has_been_asked()
                client.close()
                await front.until_in_flight(0)
                await engine.closed.wait()

    run(scenario())


def test_a_judges_callers_can_name_an_affinity():
    engines = [Engine(completion("x")), Engine(completion("x"))]
    policy = RoutingSpec(policy=RoutingPolicy.AFFINITY)

    async def scenario():
        async with listening(*engines) as ports:
            published = judges(model("judge", *ports), routing=policy)
            async with role(published, name="genrm") as front:
                for _ in range(4):
                    await front.ask(PATH, ASKED, x_smg_routing_key="one")

    run(scenario())
    assert sorted(len(engine.asked) for engine in engines) == [0, 4]
    asked = max(engines, key=lambda engine: len(engine.asked)).asked
    assert b"x-smg-routing-key: one\r\n" in asked[0][0]
