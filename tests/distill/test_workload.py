"""Rollouts and grades over HTTP."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import numpy as np
import pytest

import phalanx.distill
from phalanx.distill import Grading, Prompt, RolloutWorkload
from phalanx.errors import (
    ConfigurationError,
    EngineUnavailableError,
    InvalidRequestError,
    RequestFailedError,
)
from tests.client.roles.servers import ReplicaState, model
from tests.distill.making import FAST, prompts, rollout, samples
from tests.distill.toy_role import END, engine, log_probs, role
from tests.distill.waiting import Polls


def grading(**changes: object) -> Grading:
    given = {
        "messages": lambda one: [{"role": "user", "content": f"Grade {one.text}"}],
        "reward": lambda said, one: float(said) / 10,
        "asking": FAST,
        **changes,
    }
    return Grading(**given)


def test_groups_of_answers_in_the_order_of_the_prompts():
    async def run():
        async with engine("student", version="v3") as (toy, client):
            workload = RolloutWorkload(client, rollout(num_samples=3, top_logprobs=2))
            found = await workload.generate(prompts(3, metadata={"level": 2}), "b1")
            ids = [(one.sample_id, one.group_id, one.index) for one in found]
            assert ids == [(f"g{g}/{at}", f"g{g}", at) for g in range(3) for at in range(3)]
            for one in found:
                assert one.prompt_ids == (3 + int(one.group_id[1]), 5, 7 + int(one.group_id[1]))
                assert one.weight_versions == (("v3", one.response_length),)
                assert one.finish_reason == ("stop" if one.response_ids[-1] == END else "length")
                assert one.metadata == {"level": 2}
                prefix = [*one.prompt_ids]
                for at, token in enumerate(one.response_ids):
                    scores = log_probs("student", prefix)
                    assert one.rollout_log_probs[at] == pytest.approx(float(scores[token]))
                    best = one.student_topk.id_array.tolist()[at]
                    assert best == np.argsort(-scores)[:2].tolist()
                    prefix.append(token)
            assert len({one.seed for one in found}) == 9
            assert len(toy.asked) == 9

    asyncio.run(run())


def test_the_same_seeds_are_the_same_samples_and_others_are_others():
    async def run():
        async with engine("student") as (_, client):

            async def made(batch: str, seed: int = 0):
                workload = RolloutWorkload(client, rollout(seed=seed, max_new_tokens=12))
                return [one.response_ids for one in await workload.generate(prompts(3), batch)]

            first = await made("b1")
            assert await made("b1") == first
            assert await made("b2") != first
            assert await made("b1", seed=1) != first

    asyncio.run(run())


def test_texts_are_tokenized_by_the_engine():
    async def run():
        async with engine("student") as (toy, client):
            toy.cuts = 1
            workload = RolloutWorkload(client, rollout(num_samples=1))
            [one] = await workload.generate([Prompt("a", text="hello")], "b1")
            assert one.prompt_ids == tuple(1 + byte % 20 for byte in b"hello")
            assert toy.asked[1]["input_ids"][:5] == list(one.prompt_ids)
            assert "text" not in toy.asked[1]

    asyncio.run(run())


def test_a_rollout_that_was_cut_off_goes_on_where_it_stopped():
    """Its tokens, log-probabilities and versions are those of all parts together."""

    async def run():
        async with engine("student", version="1") as (toy, client):
            toy.cuts = 2

            def spoil(asked, answer):
                toy.version = "2"  # new weights come while it is cut off

            toy.spoil = spoil
            settings = rollout(num_samples=1, max_new_tokens=7, top_logprobs=2)
            [one] = await RolloutWorkload(client, settings).generate(prompts(1), "b1")
            first, second, third = toy.asked
            assert second["input_ids"] == [*first["input_ids"], *one.response_ids[:2]]
            assert third["input_ids"] == [*first["input_ids"], *one.response_ids[:4]]
            limits = [body["sampling_params"]["max_new_tokens"] for body in toy.asked]
            assert limits == [7, 5, 3]
            assert len({body["sampling_params"]["sampling_seed"] for body in toy.asked}) == 3
            assert one.weight_versions == (("1", 2), ("2", one.response_length - 2))
            assert one.student_topk.num_rows == one.response_length
            prefix = [*one.prompt_ids]
            for value, token in zip(one.rollout_log_probs, one.response_ids, strict=True):
                assert value == pytest.approx(float(log_probs("student", prefix)[token]))
                prefix.append(token)
            assert one.finish_reason in ("stop", "length")

    asyncio.run(run())


def test_a_rollout_that_is_always_cut_off_ends_in_an_error():
    async def run():
        async with engine("student") as (toy, client):
            toy.cuts, toy.cut_length = 1000, 0
            settings = rollout(num_samples=1, max_new_tokens=100, max_continuations=3)
            with pytest.raises(RequestFailedError, match="cut off 4 times"):
                await RolloutWorkload(client, settings).generate([Prompt("g", (1, 2))], "b1")

    asyncio.run(run())


def test_only_what_never_started_is_sent_again():
    """A lost rollout may have run. The others come to their end, and the next call has them."""

    async def run():
        async with role("student", mode="direct") as (toy, client, gateway):
            gateway.show(
                model("student", toy.replica(ReplicaState.STARTING), state=ReplicaState.STARTING)
            )
            gateway.asked = polls = Polls()
            workload = RolloutWorkload(client, rollout())
            generating = asyncio.create_task(workload.generate(prompts(2), "b1"))
            await polls.seen.wait()
            assert not toy.asked
            gateway.show(model("student", toy.replica()))
            whole = await generating
            assert len(toy.asked) == 4

            lost = []

            def refuse(request):
                if len(toy.asked) == 7:
                    lost.append(request.json)
                    request.cut()
                return bool(lost) and request.json == lost[0]

            toy.refusal = refuse
            kept = {}

            async def keep(one):
                kept[one.sample_id] = one

            with pytest.raises((EngineUnavailableError, RequestFailedError)):
                await workload.generate(prompts(2), "b1", on_sample=keep)
            assert len(toy.asked) == 8
            assert len(kept) == 3
            assert toy.asked.count(lost[0]) == 2  # of the first time, and the lost one
            toy.refusal = lambda request: False
            assert await workload.generate(prompts(2), "b1", have=kept) == whole
            assert len(toy.asked) == 9

    asyncio.run(run())


def test_another_version_than_the_wanted_one_is_refused():
    async def run():
        async with engine("student", version="2") as (_, client):
            workload = RolloutWorkload(client, rollout(weight_version="3"))
            with pytest.raises(RequestFailedError, match="version 2 of the student; version 3"):
                await workload.generate(prompts(1), "b1")

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["auto", "gateway", "direct"])
def test_a_judge_is_asked_by_messages_in_every_mode(mode):
    async def run():
        async with role("judge", mode=mode) as (toy, judge, _), engine("student") as (_, client):
            toy.says = lambda messages: str(len(messages[0]["content"]) % 10)
            sampling = {"temperature": 0, "max_new_tokens": 4}
            graded = grading(sampling=sampling)
            workload = RolloutWorkload(client, rollout(), judge=judge, grading=graded)
            found = await workload.evaluate(await workload.generate(prompts(2), "b1"))
            for one in found:
                assert one.verdict == str(len(f"Grade {one.text}") % 10)
                assert one.reward == int(one.verdict) / 10
            body = toy.asked[0]
            assert body["messages"][0]["content"].startswith("Grade ")
            limit = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
            assert limit == 4
            assert len(toy.asked) == 4
            assert await workload.evaluate(found) == found
            assert len(toy.asked) == 4

    asyncio.run(run())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1", None])
def test_what_is_no_reward_is_refused(value):
    async def run():
        async with engine("judge") as (_, judge), engine("student") as (_, client):
            graded = grading(reward=lambda said, one: value)
            workload = RolloutWorkload(client, rollout(), judge=judge, grading=graded)
            with pytest.raises(InvalidRequestError, match="g0/0"):
                await workload.evaluate(samples())

    asyncio.run(run())


def test_settings_that_cannot_be_met_are_refused():
    for bad in (
        {"num_samples": 0},
        {"max_new_tokens": 0},
        {"top_logprobs": 257},
        {"sampling": {"n": 4}},
        {"sampling": {"sampling_seed": 4}},
    ):
        with pytest.raises(ConfigurationError):
            rollout(**bad)
    for bad in ({}, {"input_ids": (1,), "text": "a"}, {"input_ids": ()}, {"input_ids": (-1,)}):
        with pytest.raises(InvalidRequestError):
            Prompt("g", **bad)

    async def run():
        async with engine("student") as (_, client):
            with pytest.raises(InvalidRequestError, match="'g0' is given twice"):
                await RolloutWorkload(client, rollout()).generate([*prompts(1), *prompts(1)], "b")
            with pytest.raises(ConfigurationError, match="judge and grading together"):
                RolloutWorkload(client, rollout(), grading=grading())
            with pytest.raises(ConfigurationError, match="no judge"):
                await RolloutWorkload(client, rollout()).evaluate(samples())

    asyncio.run(run())


LIFECYCLE = {"activate", "deactivate", "drain", "sleep", "wake", "release", "resume", "shutdown"}
WORKERS = ("workload", "rollout", "judging", "scoring", "asking", "deferred_batch", "prefill")


def test_i8_the_workload_owns_no_lifecycle_of_engines():
    """Neither by what it imports nor by what it calls."""
    folder = Path(phalanx.distill.__file__).parent
    for name in WORKERS:
        tree = ast.parse((folder / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.module is not None
                assert not node.module.startswith(
                    ("phalanx.roles", "phalanx.server", "phalanx.engine", "phalanx.gateway")
                )
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = node.func
                if isinstance(called.value, ast.Name) and called.value.id == "asyncio":
                    continue
                assert called.attr not in LIFECYCLE, (name, called.attr)
