"""Teacher's scores over HTTP: what is sent, what is read, and what is refused."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from phalanx.distill import (
    AskingSettings,
    ChosenIds,
    ScorerSettings,
    StudentScorer,
    TeacherScorer,
    TokenSelection,
)
from phalanx.distill.checking import check_scores
from phalanx.distill.prefill import Prefill, read_scores
from phalanx.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    RequestFailedError,
    ScoresMisalignedError,
)
from tests.client.roles.servers import ReplicaState, model
from tests.distill.making import ALL, FAST, asked, sample, samples
from tests.distill.toy_role import engine, log_probs, role
from tests.distill.waiting import Polls

SAMPLED, STUDENT, TEACHER, UNION = ALL
SETTINGS = ScorerSettings(asking=FAST)


def expected(name, one):
    """The toy model's log-probabilities at each position of the response: [response, vocabulary]."""
    ids = [*one.teacher_prompt_ids, *one.response_ids]
    start = len(one.teacher_prompt_ids)
    return np.array([log_probs(name, ids[:at]) for at in range(start, len(ids))])


def check_against_toy(scored, teacher, student="student", with_student=False):
    scores, request = scored.scores, scored.teacher
    full = expected(teacher, scored)
    rows = np.arange(len(full))[:, None]
    assert scores.teacher_log_probs == pytest.approx(full[rows[:, 0], scored.response_ids])
    if request.selection.of_teacher:
        best = -np.sort(-full, axis=1)[:, : request.top_k]
        np.testing.assert_allclose(scores.teacher_topk.score_array, best, rtol=1e-6)
        np.testing.assert_allclose(full[rows, scores.teacher_topk.id_array], best, rtol=1e-6)
    if request.selection.of_student:
        found = scores.teacher_at_student_topk
        assert found.ids == scored.student_topk.ids
        np.testing.assert_allclose(found.score_array, full[rows, found.id_array], rtol=1e-6)
    if request.selection is SAMPLED:
        assert scores.support is None
        return
    support = scores.support
    valid = np.arange(support.width) < support.size_array[:, None]
    np.testing.assert_allclose(
        support.teacher_array[valid], full[rows, support.id_array][valid], rtol=1e-6
    )
    if with_student:
        own = expected(student, scored)
        np.testing.assert_allclose(
            support.student_array[valid], own[rows, support.id_array][valid], rtol=1e-6
        )
    if request.selection is UNION:
        for row, size in enumerate(support.size_array):
            ids = support.id_array[row, :size].tolist()
            assert len(set(ids)) == size
            both = {
                *scored.student_topk.id_array.tolist()[row],
                *scores.teacher_topk.id_array.tolist()[row],
            }
            assert set(ids) == both


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("selection", ALL)
def test_i99_i102_every_selection_is_what_the_teacher_says(selection, packed):
    async def run():
        async with engine("teacher") as (toy, client):
            toy.packed = packed
            before = samples(selection=selection)
            scored = await TeacherScorer(client, SETTINGS).score(before)
            assert [one.sample_id for one in scored] == [one.sample_id for one in before]
            for one in scored:
                check_against_toy(one, "teacher")
            assert all(body["sampling_params"]["max_new_tokens"] == 0 for body in toy.asked)
            assert len(toy.asked) == len(before)

    asyncio.run(run())


def test_i99_the_payload_is_prefill_and_logprobs_only():
    async def run():
        async with engine("teacher") as (toy, client):
            one = sample(selection=UNION)
            await TeacherScorer(client, SETTINGS).score([one])
            [body] = toy.asked
            rows = body.pop("token_ids_logprob_by_position")
            assert body == {
                "input_ids": [*one.prompt_ids, *one.response_ids],
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": 0,
                    "skip_special_tokens": False,
                },
                "return_logprob": True,
                "logprob_start_len": 2,
                "top_logprobs_num": 3,
            }
            assert rows == [[0, 0, 0], *one.student_topk.id_array.tolist()]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("knows", "chosen", "num_requests"),
    [
        ("by_position", ChosenIds.AUTO, 4),
        ("nothing", ChosenIds.AUTO, 5),
        ("refuses", ChosenIds.AUTO, 5),
        ("flat", ChosenIds.FLAT, 4),
        ("nothing", ChosenIds.UNION, 4),
    ],
)
def test_chosen_tokens_in_every_way_that_servers_know(knows, chosen, num_requests):
    """The way is found out once: of four samples, one may be asked about twice."""

    async def run():
        async with engine("teacher", knows=knows) as (toy, client):
            settings = ScorerSettings(AskingSettings(max_concurrency=1), chosen)
            for one in await TeacherScorer(client, settings).score(samples(selection=STUDENT)):
                check_against_toy(one, "teacher")
            assert len(toy.asked) == num_requests

    asyncio.run(run())


def test_flat_is_r_times_k_and_k_zeros():
    async def run():
        async with engine("teacher", knows="flat") as (toy, client):
            one = sample(selection=STUDENT, length=5)
            await TeacherScorer(client, ScorerSettings(FAST, ChosenIds.FLAT)).score([one])
            flat = toy.asked[0]["token_ids_logprob"]
            assert len(flat) == 5 * 3 + 3
            assert flat[:3] == [0, 0, 0]

    asyncio.run(run())


def test_a_union_of_more_ids_than_a_request_takes_is_cut():
    """Every part is asked for ids of its own, and the first one alone for the likeliest tokens."""
    length, ids = 700, np.arange(2100, dtype=np.int32).reshape(700, 3)
    prefill = Prefill((1, 2), tuple(range(length)), 2, ids)
    parts = prefill.parts()
    assert [len(part["token_ids_logprob"]) for part in parts] == [1024, 1024, 52]
    assert [part.get("top_logprobs_num") for part in parts] == [2, None, None]
    answers = []
    for part in parts:
        row = [[-0.001 * one, one, None] for one in part["token_ids_logprob"]]
        meta = {
            "weight_version": "1",
            "input_token_logprobs": [
                [None, 2, None],
                *[[-1.0, one, None] for one in range(length)],
            ],
            "input_token_ids_logprobs": [None, *[row] * length],
        }
        if "top_logprobs_num" in part:
            meta["input_top_logprobs"] = [None, *[[[-0.1, 5, None], [-0.2, 6, None]]] * length]
        answers.append({"meta_info": meta})
    found = read_scores(prefill, answers, ChosenIds.UNION)
    np.testing.assert_allclose(found.chosen.score_array, -0.001 * ids, rtol=1e-6)
    with pytest.raises(ScoresMisalignedError, match="lacks token 2048 at position 682"):
        read_scores(prefill, answers[:2], ChosenIds.UNION)
    answers[1]["meta_info"]["weight_version"] = "2"
    with pytest.raises(ScoresMisalignedError, match="weights changed between"):
        read_scores(prefill, answers, ChosenIds.UNION)


def test_requests_that_cannot_be_met_are_refused_before_any_is_sent():
    async def run():
        async with engine("teacher") as (toy, client):
            scorer = TeacherScorer(client, SETTINGS)
            for bad in (
                msgspec.structs.replace(sample(), teacher=None),
                msgspec.structs.replace(sample(), teacher=asked(STUDENT)),
                msgspec.structs.replace(sample(selection=UNION), teacher=asked(UNION, 4)),
            ):
                with pytest.raises(InvalidRequestError, match="g0/0"):
                    await scorer.score([sample(1), bad])
            assert not toy.asked

    asyncio.run(run())


def test_complaint_relax_242_carried_over_samples_are_not_asked_about_again():
    """Not by the same version of the teacher; by another one all are."""

    async def run():
        async with role("teacher") as (toy, client, gateway):
            gateway.show(model("teacher", toy.replica(), weight_version="1"))
            scorer = TeacherScorer(client, SETTINGS)
            scored = await scorer.score(samples(selection=UNION))
            assert len(toy.asked) == 4
            again = await scorer.score(scored)
            assert (again, len(toy.asked)) == (scored, 4)
            half = [*scored[:2], *samples(selection=UNION)[2:]]
            assert await scorer.score(half) == scored
            assert len(toy.asked) == 6
            other = msgspec.structs.replace(scored[0], response_ids=scored[1].response_ids)
            await scorer.score([other])
            assert len(toy.asked) == 7
            toy.version = "2"
            gateway.show(model("teacher", toy.replica(), weight_version="2"))
            newer = await scorer.score(scored)
            assert len(toy.asked) == 11
            assert {one.scores.version for one in newer} == {"2"}

    asyncio.run(run())


def test_an_answer_of_another_version_of_the_teacher_is_refused():
    async def run():
        async with engine("teacher", version="7") as (_, client):
            settings = ScorerSettings(FAST, version="6")
            with pytest.raises(ScoresMisalignedError, match="'7'.*'6'"):
                await TeacherScorer(client, settings).score([sample()])

    asyncio.run(run())


def test_a_group_has_one_affinity_and_groups_have_others():
    async def run():
        async with engine("teacher") as (toy, client):
            await TeacherScorer(client, SETTINGS).score(samples(groups=3, each=3))
            keys = [request.headers["x-smg-routing-key"] for request in toy.requests]
            by_prompt = {}
            for body, key in zip(toy.asked, keys, strict=True):
                by_prompt.setdefault(tuple(body["input_ids"][:3]), set()).add(key)
            assert len(by_prompt) == 3
            assert all(len(found) == 1 for found in by_prompt.values())
            assert len(set(keys)) == 3

    asyncio.run(run())


def test_concurrency_is_bounded():
    async def run():
        running, most, begun = 0, 0, asyncio.Event()
        go_on = asyncio.Event()
        async with engine("teacher") as (toy, client):
            answer = toy.behave

            async def counted(request):
                nonlocal running, most
                running += 1
                most = max(most, running)
                if running == 4:
                    begun.set()
                await go_on.wait()
                await answer(request)
                running -= 1

            toy.behave = counted
            scoring = asyncio.create_task(
                TeacherScorer(client, SETTINGS).score(samples(groups=5, each=4))
            )
            await begun.wait()
            go_on.set()
            assert len(await scoring) == 20
            assert most == 4

    asyncio.run(run())


def test_a_lost_score_is_asked_for_again_and_a_hopeless_one_is_told():
    async def run():
        async with engine("teacher") as (toy, client):
            left = 2

            def refuse(request):
                nonlocal left
                left -= 1
                if left >= 0:
                    request.cut()
                return left >= 0

            toy.refusal = refuse
            [scored] = await TeacherScorer(client, SETTINGS).score([sample()])
            check_against_toy(scored, "teacher")
            left = 1000
            with pytest.raises((EngineUnavailableError, RequestFailedError)):
                await TeacherScorer(client, SETTINGS).score([sample()])
            assert left == 1000 - 3

    asyncio.run(run())


def test_a_teacher_that_loads_is_waited_for():
    async def run():
        async with role("teacher", mode="direct") as (toy, client, gateway):
            gateway.show(
                model("teacher", toy.replica(ReplicaState.ONLOADING), state=ReplicaState.ONLOADING)
            )
            gateway.asked = polls = Polls()
            scoring = asyncio.create_task(TeacherScorer(client, SETTINGS).score([sample()]))
            await polls.seen.wait()
            assert not toy.asked
            gateway.show(model("teacher", toy.replica()))
            [scored] = await scoring
            check_against_toy(scored, "teacher")

    asyncio.run(run())


@pytest.mark.parametrize("selection", [TEACHER, UNION])
def test_the_student_is_scored_again_at_the_teachers_tokens(selection):
    async def run():
        async with (
            engine("teacher") as (_, teacher),
            engine("student") as (student, client),
        ):
            scored = await TeacherScorer(teacher, SETTINGS).score(samples(selection=selection))
            with pytest.raises(ScoresMisalignedError, match="student_at_teacher_topk is missing"):
                check_scores(scored[0])
            scorer = StudentScorer(client, SETTINGS)
            whole = await scorer.score(scored)
            for one in whole:
                check_scores(one)
                check_against_toy(one, "teacher", with_student=True)
            assert await scorer.score(whole) == whole
            assert len(student.asked) == len(whole)

    asyncio.run(run())


def test_another_version_of_the_student_is_refused():
    async def run():
        async with (
            engine("teacher") as (_, teacher),
            engine("student", version="2") as (_, client),
        ):
            scored = await TeacherScorer(teacher, SETTINGS).score([sample(selection=TEACHER)])
            scorer = StudentScorer(client, SETTINGS)
            with pytest.raises(ScoresMisalignedError, match="'1' of the student, which is '2'"):
                await scorer.score(scored)
            mixed = msgspec.structs.replace(scored[0], weight_versions=(("1", 2), ("2", 2)))
            with pytest.raises(ScoresMisalignedError, match="2 versions of the student"):
                await scorer.score([mixed])

    asyncio.run(run())


def test_i99_a_gateway_url_and_an_engine_url_say_the_same():
    async def run():
        async with role("teacher", mode="gateway") as (toy, client, _):
            by_gateway = await TeacherScorer(client, SETTINGS).score(samples(selection=UNION))
        async with engine("teacher") as (toy, client):
            assert (
                await TeacherScorer(client, SETTINGS).score(samples(selection=UNION)) == by_gateway
            )

    asyncio.run(run())


def test_a_teacher_that_is_told_more_scores_the_response_behind_its_own_prompt():
    async def run():
        async with engine("teacher") as (toy, client):
            request = asked(TokenSelection.STUDENT_SAMPLED, prompt_ids=(9, 9, 9, 9, 9))
            one = msgspec.structs.replace(sample(), teacher=request)
            [scored] = await TeacherScorer(client, SETTINGS).score([one])
            check_against_toy(scored, "teacher")
            assert toy.asked[0]["input_ids"][:5] == [9] * 5
            assert toy.asked[0]["logprob_start_len"] == 4

    asyncio.run(run())
