"""A batch from its rollout to its trainer, by real requests to toy roles."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from phalanx.distill import (
    DeferredBatch,
    MemoryStore,
    RolloutWorkload,
    ScorerSettings,
    Scoring,
    Stage,
    StudentScorer,
    TeacherScorer,
)
from phalanx.errors import (
    BatchStateError,
    InvalidRequestError,
    ScoresMisalignedError,
)
from tests.distill.making import ALL, FAST, asked, prompts, rollout, sample, samples
from tests.distill.test_workload import grading
from tests.distill.toy_role import engine

SAMPLED, STUDENT, TEACHER, UNION = ALL
SETTINGS = ScorerSettings(asking=FAST)
ALL_NEEDS = (Scoring.JUDGE, Scoring.TEACHER, Scoring.STUDENT)


class Roles:
    """A student, a judge and a teacher, and what works with them."""

    def __init__(self, student, judge, teacher) -> None:
        (self.student, client), (self.judge, judged), (self.teacher, taught) = (
            student,
            judge,
            teacher,
        )
        settings = rollout(top_logprobs=3)
        self.workload = RolloutWorkload(client, settings, judge=judged, grading=grading())
        self.scorer = TeacherScorer(taught, SETTINGS)
        self.rescorer = StudentScorer(client, SETTINGS)

    def counts(self) -> tuple[int, int, int]:
        return len(self.student.asked), len(self.judge.asked), len(self.teacher.asked)


def with_roles(run):
    async def main():
        async with (
            engine("student") as student,
            engine("judge") as judge,
            engine("teacher") as teacher,
        ):
            await run(Roles(student, judge, teacher))

    asyncio.run(main())


def test_i97_i101_i105_a_batch_is_rolled_out_then_scored_then_published():
    """No judge and no teacher is asked before the rollout has ended; groups and order stay."""

    async def run(roles):
        store, told = MemoryStore(), []
        batch = await DeferredBatch.open(store, "s1", ALL_NEEDS, lambda *one: told.append(one))
        await batch.collect(roles.workload, prompts(3, teacher=asked(UNION)))
        assert roles.counts() == (6, 0, 0)
        assert batch.stage is Stage.STAGED
        staged = batch.samples
        await batch.judge(roles.workload)
        assert roles.counts() == (6, 6, 0)
        await batch.score_teacher(roles.scorer)
        assert roles.counts() == (6, 6, 6)
        assert batch.stage is Stage.STAGED
        await batch.score_student(roles.rescorer)
        assert roles.counts() == (12, 6, 6)
        assert batch.stage is Stage.SCORED
        with pytest.raises(BatchStateError, match="only a validated one"):
            await batch.publish()
        await batch.validate()
        assert await batch.publish()
        assert not await batch.publish()
        ids = [(one.group_id, one.index, one.response_ids) for one in batch.samples]
        assert ids == [(one.group_id, one.index, one.response_ids) for one in staged]
        assert [one[0] for one in ids] == ["g0", "g0", "g1", "g1", "g2", "g2"]
        for one in batch.samples:
            assert one.reward == 0.8
            assert len(one.scores.teacher_log_probs) == one.response_length
            assert one.scores.support.student_array is not None
        ends = [(what, 6, 6) for what in ("collect", "judge", "teacher", "student")]
        assert [one for one in told if one[1] == one[2]] == ends
        await batch.consume()
        assert (batch.stage, batch.samples) == (Stage.CONSUMED, ())

    with_roles(run)


@pytest.mark.parametrize("needs", [(Scoring.JUDGE, Scoring.TEACHER), ALL_NEEDS[::-1]])
def test_the_order_of_judge_and_teacher_is_the_callers(needs):
    async def run(roles):
        batch = await DeferredBatch.open(MemoryStore(), "s1", needs)
        await batch.collect(roles.workload, prompts(1, teacher=asked(TEACHER)))
        if Scoring.STUDENT in needs:
            with pytest.raises(BatchStateError, match="score the teacher first"):
                await batch.score_student(roles.rescorer)
        await batch.score_teacher(roles.scorer)
        if Scoring.STUDENT in needs:
            await batch.score_student(roles.rescorer)
        await batch.judge(roles.workload)
        await batch.validate()
        assert await batch.publish()

    with_roles(run)


def test_complaint_relax_237_what_the_teacher_is_asked_may_be_said_after_the_judge():
    async def run(roles):
        needs = (Scoring.JUDGE, Scoring.TEACHER)
        batch = await DeferredBatch.open(MemoryStore(), "s1", needs)
        await batch.collect(roles.workload, prompts(1))
        with pytest.raises(InvalidRequestError, match="no TeacherRequest"):
            await batch.score_teacher(roles.scorer)
        await batch.judge(roles.workload)
        await batch.prepare(
            lambda one: asked(SAMPLED, prompt_ids=(round(one.reward * 10), *one.prompt_ids))
        )
        await batch.score_teacher(roles.scorer)
        assert all(body["input_ids"][0] == 8 for body in roles.teacher.asked)
        await batch.validate()

    with_roles(run)


@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize("role", ["student", "judge", "teacher"])
def test_i104_a_step_that_fails_wrote_nothing_back_and_goes_on_with_what_it_has(role, nth):
    """Another process takes over with the store alone: what was answered is not asked for again."""

    async def run(roles):
        store = MemoryStore()
        toy = getattr(roles, role)

        def refuse(request):
            if len(toy.asked) >= nth:
                request.answer({"error": {"message": "broken"}}, 400)
            return len(toy.asked) >= nth

        async def steps():
            batch = await DeferredBatch.open(store, "s1", (Scoring.JUDGE, Scoring.TEACHER))
            await batch.collect(roles.workload, prompts(2, teacher=asked(SAMPLED)))
            await batch.judge(roles.workload)
            await batch.score_teacher(roles.scorer)
            await batch.validate()
            return await batch.publish()

        toy.refusal = refuse
        with pytest.raises(InvalidRequestError, match="broken"):
            await steps()
        left = store.load("s1")
        assert len(left.notes) == nth - 1
        assert left.stage is (Stage.COLLECTING if role == "student" else Stage.STAGED)
        assert all(one.scores is None for one in left.samples)
        if role == "judge":
            assert all(one.reward is None for one in left.samples)
        toy.refusal = lambda request: False
        failed = len(toy.asked)
        assert await steps()
        assert len(toy.asked) == failed + 4 - (nth - 1)
        assert not await steps()

    with_roles(run)


class NotedStore(MemoryStore):
    """`noted` are the samples of which a copy was kept, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def note(self, batch_id, samples):
        self.noted += [one.sample_id for one in samples]
        super().note(batch_id, samples)


def test_a_scoring_that_goes_on_writes_no_copy_again():
    async def run(roles):
        store = NotedStore()

        async def steps():
            batch = await DeferredBatch.open(store, "s1")
            await batch.collect(roles.workload, prompts(2, teacher=asked(SAMPLED)))
            await batch.score_teacher(roles.scorer)

        def refuse_the_third(request):
            if len(roles.teacher.asked) >= 3:
                request.answer({"error": {"message": "broken"}}, 400)
            return len(roles.teacher.asked) >= 3

        roles.teacher.refusal = refuse_the_third
        with pytest.raises(InvalidRequestError):
            await steps()
        roles.teacher.refusal = lambda request: False
        await steps()
        collected, scored = store.noted[:4], store.noted[4:]
        assert sorted(scored) == sorted(collected) == ["g0/0", "g0/1", "g1/0", "g1/1"]

    with_roles(run)


MISALIGNED = {
    "missing": lambda one: {"scores": None},
    "short": lambda one: {"teacher_log_probs": one.scores.teacher_log_probs[:-1]},
    "not a number": lambda one: {
        "teacher_log_probs": (float("nan"), *one.scores.teacher_log_probs[1:])
    },
    "above zero": lambda one: {"teacher_log_probs": (0.5, *one.scores.teacher_log_probs[1:])},
    "another request": lambda one: {"asked": "0"},
    "no teacher's tokens": lambda one: {"teacher_topk": None},
    "no support": lambda one: {"support": None},
    "other tokens": lambda one: {
        "teacher_at_student_topk": one.scores.teacher_topk,
    },
}


@pytest.mark.parametrize("how", MISALIGNED)
def test_i102_i103_one_misaligned_output_keeps_the_whole_batch_back(how):
    """Damage in the store itself is found by the check before publication."""

    async def run(roles):
        store = MemoryStore()
        batch = await DeferredBatch.open(store, "s1")
        await batch.collect(roles.workload, prompts(2, teacher=asked(UNION)))
        await batch.score_teacher(roles.scorer)
        stored = store.load("s1")
        victim = stored.samples[2]
        changes = MISALIGNED[how](victim)
        if "scores" not in changes:
            changes = {"scores": msgspec.structs.replace(victim.scores, **changes)}
        spoiled = [*stored.samples]
        spoiled[2] = msgspec.structs.replace(victim, **changes)
        store.save(msgspec.structs.replace(stored, samples=tuple(spoiled)))
        with pytest.raises(ScoresMisalignedError, match="g1/0"):
            await batch.validate()
        with pytest.raises(BatchStateError):
            await batch.publish()
        assert store.stages() == {"s1": Stage.SCORED}
        store.save(stored)
        await batch.validate()
        assert await batch.publish()

    with_roles(run)


def test_i105_moved_missing_and_exchanged_samples_are_found():
    async def run(roles):
        store = MemoryStore()
        batch = await DeferredBatch.open(store, "s1")
        await batch.collect(roles.workload, prompts(2, teacher=asked(SAMPLED)))
        await batch.score_teacher(roles.scorer)
        stored = store.load("s1")
        one, two, three, four = stored.samples
        swapped = msgspec.structs.replace(one, response_ids=two.response_ids)
        for wrong in (
            (two, one, three, four),
            (one, two, three),
            (one, two, three, three),
            (one, three, two, four),
        ):
            store.save(msgspec.structs.replace(stored, samples=wrong))
            with pytest.raises(ScoresMisalignedError):
                await batch.validate()
        if len(one.response_ids) == len(two.response_ids):
            store.save(msgspec.structs.replace(stored, samples=(swapped, two, three, four)))
            with pytest.raises(ScoresMisalignedError):
                await batch.validate()

    with_roles(run)


def test_samples_that_somebody_else_made_are_staged_as_they_are():
    async def run(roles):
        store = MemoryStore()
        made = samples()
        batch = await DeferredBatch.open(store, "s1")
        for wrong in (
            [],
            [made[0], made[0]],
            [made[1], made[0]],
            [made[0], made[2], made[1], made[3]],
        ):
            with pytest.raises((InvalidRequestError, ScoresMisalignedError)):
                await batch.stage_samples(wrong)
        await batch.stage_samples(made)
        await batch.stage_samples(made)
        with pytest.raises(ScoresMisalignedError):
            await batch.stage_samples(made[:2])
        await batch.score_teacher(roles.scorer)
        await batch.score_teacher(roles.scorer)
        assert roles.counts() == (0, 0, 4)
        with pytest.raises(BatchStateError, match="without 'judge' among its needs"):
            await batch.judge(roles.workload)
        with pytest.raises(BatchStateError, match="needs teacher, and judge is asked"):
            await DeferredBatch.open(store, "s1", (Scoring.JUDGE,))

    with_roles(run)


def test_carried_over_samples_of_an_earlier_batch_cost_nothing():
    """Half of a batch was scored before; only the other half goes to the teacher."""

    async def run(roles):
        made = samples(groups=3, each=2)
        old = await roles.scorer.score(made[:4])
        assert len(roles.teacher.asked) == 4
        batch = await DeferredBatch.open(MemoryStore(), "s2")
        await batch.stage_samples([*old, *made[4:]])
        await batch.score_teacher(roles.scorer)
        assert len(roles.teacher.asked) == 6
        await batch.validate()
        assert await batch.publish()

    with_roles(run)


def test_steps_out_of_order_are_refused():
    async def run(roles):
        batch = await DeferredBatch.open(MemoryStore(), "s1", (Scoring.JUDGE, Scoring.TEACHER))
        with pytest.raises(BatchStateError, match="stage its samples first"):
            await batch.judge(roles.workload)
        with pytest.raises(BatchStateError, match="is collecting, and lacks judge, teacher"):
            await batch.validate()
        with pytest.raises(BatchStateError):
            await batch.publish()
        assert roles.counts() == (0, 0, 0)

    with_roles(run)


def test_an_empty_response_needs_no_scores():
    async def run(roles):
        batch = await DeferredBatch.open(MemoryStore(), "s1")
        await batch.stage_samples([sample(length=0), sample(index=1)])
        await batch.score_teacher(roles.scorer)
        await batch.validate()
        assert batch.samples[0].scores.teacher_log_probs == ()

    with_roles(run)
