"""Batches that begin half done, of another teacher, of nothing, or with a judge that answers nonsense."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from phalanx.distill import (
    ChosenIds,
    DeferredBatch,
    MemoryStore,
    Prompt,
    RolloutWorkload,
    ScorerSettings,
    Scoring,
    Stage,
    StudentScorer,
    TeacherScorer,
)
from phalanx.errors import PhalanxError, RequestFailedError, ScoresMisalignedError
from tests.distill.making import ALL, FAST, prompts, rollout, sample, samples
from tests.distill.test_deferred_batch import with_roles
from tests.distill.test_workload import grading
from tests.distill.toy_role import engine

UNION = ALL[3]
SETTINGS = ScorerSettings(asking=FAST)


def test_i104_a_judge_that_failed_half_way_leaves_no_rewards_behind_the_teachers_scores():
    async def run(roles):
        batch = await DeferredBatch.open(MemoryStore(), "s1", (Scoring.JUDGE, Scoring.TEACHER))
        await batch.stage_samples([msgspec.structs.replace(one, text="x") for one in samples()])
        said = iter(["8", "8", "nonsense", "nonsense"])
        roles.judge.says = lambda messages: next(said)
        with pytest.raises(ValueError, match="nonsense") as caught:
            await batch.judge(roles.workload)
        assert "reward() of sample 'g" in caught.value.__notes__[0]
        assert "the judge said 'nonsense'" in caught.value.__notes__[0]
        await batch.score_teacher(roles.scorer)
        assert [one.reward for one in batch.samples] == [None] * 4
        assert batch.missing == (Scoring.JUDGE,)
        before = len(roles.judge.asked)
        roles.judge.says = lambda messages: "9"
        await batch.judge(roles.workload)
        assert len(roles.judge.asked) == before + 2
        assert sorted(one.verdict for one in batch.samples) == ["8", "8", "9", "9"]
        assert all(one.reward is not None and one.scores for one in batch.samples)

    with_roles(run)


def test_a_batch_that_needs_no_scores_is_checked_and_published():
    async def run():
        batch = await DeferredBatch.open(MemoryStore(), "s1", ())
        await batch.stage_samples(samples())
        assert batch.stage is Stage.SCORED
        await batch.validate()
        assert await batch.publish()

    asyncio.run(run())


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.int64(2)])
def test_rewards_may_be_numbers_of_numpy(value):
    async def run():
        async with engine("judge") as (_, judge), engine("student") as (_, client):
            graded = grading(reward=lambda said, one: value)
            workload = RolloutWorkload(client, rollout(), judge=judge, grading=graded)
            [found] = await workload.evaluate([sample()])
            assert (found.reward, type(found.reward)) == (value, float)

    asyncio.run(run())


def test_a_text_whose_tokens_nobody_tells_is_refused_with_the_way_out():
    """A router may drop the field that asks for them; to go on without them would be another prompt."""

    async def run():
        async with engine("student") as (toy, client):
            toy.cuts = 1
            toy.spoil = lambda asked, answer: answer.pop("prompt_token_ids", None)
            with pytest.raises(RequestFailedError, match=r"prompt_token_ids.*input_ids"):
                one = RolloutWorkload(client, rollout(num_samples=1))
                await one.generate([Prompt("g", text="a b")], "b1")
            assert len(toy.asked) == 1

    asyncio.run(run())


def test_samples_that_were_kept_without_the_tops_are_made_anew():
    async def run():
        async with engine("student") as (toy, client):
            made = await RolloutWorkload(client, rollout()).generate(prompts(1), "b1")
            have = {one.sample_id: one for one in made}
            workload = RolloutWorkload(client, rollout(top_logprobs=3))
            again = await workload.generate(prompts(1), "b1", have=have)
            assert all(one.student_topk.width == 3 for one in again)
            assert len(toy.asked) == 4

    asyncio.run(run())


@pytest.mark.parametrize("nothing", [None, []])
def test_a_server_that_answers_nothing_for_an_unknown_field_is_asked_for_the_union(nothing):
    def spoil(asked, answer):
        if "token_ids_logprob" not in asked:
            answer["meta_info"]["input_token_ids_logprobs"] = nothing

    async def run():
        async with engine("teacher", knows="nothing") as (toy, client):
            toy.spoil = spoil
            [scored] = await TeacherScorer(client, SETTINGS).score([sample(selection=UNION)])
            assert scored.scores.teacher_at_student_topk is not None

    asyncio.run(run())


@pytest.mark.parametrize("chosen", list(ChosenIds))
def test_an_empty_response_of_every_selection_goes_through(chosen):
    async def run():
        knows = {ChosenIds.FLAT: "flat", ChosenIds.UNION: "nothing"}.get(chosen, "by_position")
        settings = ScorerSettings(asking=FAST, chosen=chosen)
        async with (
            engine("teacher", knows=knows) as (_, teacher),
            engine("student", knows=knows) as (_, student),
        ):
            for selection in ALL:
                one = sample(length=0, selection=selection)
                scored = await TeacherScorer(teacher, settings).score([one])
                [whole] = await StudentScorer(student, settings).score(scored)
                assert whole.scores.teacher_log_probs == ()

    asyncio.run(run())


def test_samples_of_one_batch_never_have_scores_of_two_versions_of_a_teacher():
    """Carried over from an engine that has been given other weights since."""

    async def run():
        async with engine("teacher") as (toy, client):
            made = samples(groups=2, each=2)
            old = await TeacherScorer(client, SETTINGS).score(made[:2])
            toy.version = "2"
            scorer = TeacherScorer(client, SETTINGS)
            found = await scorer.score([*old, *made[2:]])
            assert {one.scores.version for one in found} == {"2"}
            assert [one.sample_id for one in found] == [one.sample_id for one in made]
            assert len(toy.asked) == 2 + 4

            def change(asked, answer):
                toy.version = str(int(toy.version) + 1)

            toy.spoil = change
            with pytest.raises(ScoresMisalignedError, match="changed while"):
                await scorer.score(made)

    asyncio.run(run())


def test_a_judge_without_words_is_told_as_a_failure():
    async def run():
        async with engine("judge") as (toy, judge), engine("student") as (_, client):
            toy.says = lambda messages: None
            workload = RolloutWorkload(client, rollout(), judge=judge, grading=grading())
            with pytest.raises(PhalanxError, match="has no text"):
                await workload.evaluate([sample()])

    asyncio.run(run())
