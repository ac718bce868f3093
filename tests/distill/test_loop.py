"""The training loop in every placement: its phases in their order, and what fails in them."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from phalanx.client import AsyncPhaseClient
from phalanx.distill import (
    LoopPlan,
    MemoryStore,
    PhaseEntered,
    Phases,
    Scoring,
    Stage,
    StepEnded,
    StepTrained,
    WeightsPushed,
)
from phalanx.errors import (
    BatchStateError,
    ConfigurationError,
    RequestFailedError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)
from tests.distill.loop_case import LoggedPhases, engines, urls
from tests.distill.looping import PLAN, DigestTrainer, train


def test_i91_the_phases_of_every_step_are_entered_in_their_order(tmp_path):
    async def run():
        async with engines() as toys:
            trainer, events = DigestTrainer(tmp_path), []
            phases = LoggedPhases(trainer)
            store = MemoryStore()
            last = await train(urls(toys), trainer, store, 2, phases=phases, on_event=events.append)
            steps = [
                [*((name, f"step-{step}") for name in PLAN.phases), ("release", "trainer")]
                for step in range(2)
            ]
            assert phases.log == [("attach", "trainer"), *steps[0], *steps[1], ("leave",)]
            assert (last.step, last.version) == (2, "v2")
            assert toys[0].updates == ["v1", "v2"]
            assert dict(store.stages()) == {f"step-{at}": Stage.CONSUMED for at in range(2)}
            kinds = [type(one) for one in events]
            assert kinds.count(StepTrained) == kinds.count(StepEnded) == 2
            assert [one.phase for one in events if isinstance(one, PhaseEntered)] == [
                *PLAN.phases * 2
            ]
            assert [one.version for one in events if isinstance(one, WeightsPushed)] == ["v1", "v2"]
            versions = [body.get("logprob_start_len") is None for body in toys[0].asked]
            assert versions.count(True) == versions.count(False) == 8

    asyncio.run(run())


def test_i98_i100_nothing_is_asked_outside_of_its_phase(tmp_path):
    """When a phase is entered, all requests of the one before have ended."""

    async def run():
        async with engines() as toys:
            trainer = DigestTrainer(tmp_path)
            seen: list[tuple[str, list[int]]] = []

            class Counting(LoggedPhases):
                async def enter(self, phase: str, batch: str, /) -> None:
                    await super().enter(phase, batch)
                    seen.append((phase, [len(toy.asked) for toy in toys]))

            await train(urls(toys), trainer, MemoryStore(), 1, phases=Counting(trainer))
            assert seen == [
                ("rollout", [0, 0, 0]),
                ("genrm", [4, 0, 0]),
                ("teacher", [4, 4, 0]),
                ("student_score", [4, 4, 4]),
                ("train", [8, 4, 4]),
            ]

    asyncio.run(run())


@pytest.mark.parametrize("where", ["save", "release"])
def test_a_step_that_was_saved_is_not_trained_again_for_what_failed_after_it(tmp_path, where):
    async def run():
        async with engines() as toys:
            failing = [RoleOperationFailedError("cannot write the journal")]

            def point(name: str) -> None:
                if name == "saved" and where == "save" and failing:
                    raise failing.pop()

            trainer = DigestTrainer(tmp_path, point)

            class Failing(LoggedPhases):
                async def release(self, trainer_id: str, /) -> None:
                    await super().release(trainer_id)
                    if where == "release" and failing:
                        raise failing.pop()

            last = await train(urls(toys), trainer, MemoryStore(), 1, phases=Failing(trainer))
            assert not failing
            assert [step for step, _ in trainer.log] == [0]
            assert last.step == 1
            assert not trainer.holds

    asyncio.run(run())


def test_a_passing_failure_enters_the_phase_again(tmp_path):
    async def run():
        async with engines() as toys:
            trainer = DigestTrainer(tmp_path)
            phases = LoggedPhases(trainer)
            phases.faults = {"teacher": [RoleOperationFailedError("a replica did not wake")]}
            left = 12  # a scorer sends each of four samples again twice, by itself

            def refuse(request):
                nonlocal left
                left -= 1
                if left >= 0:
                    request.answer({"error": {"message": "lost"}}, 500)
                return left >= 0

            toys[2].refusal = refuse
            await train(urls(toys), trainer, MemoryStore(), 1, phases=phases)
            assert phases.log.count(("teacher", "step-0")) == 3

    asyncio.run(run())


def test_a_lasting_failure_ends_the_run_and_the_trainer_holds_nothing(tmp_path):
    async def run():
        async with engines() as toys:
            trainer = DigestTrainer(tmp_path)
            phases = LoggedPhases(trainer)

            def broken(name: str) -> None:
                if name == "train":
                    raise RequestFailedError("the trainer broke")

            trainer.point = broken
            store = MemoryStore()
            with pytest.raises(RequestFailedError, match="the trainer broke"):
                await train(urls(toys), trainer, store, 1, phases=phases)
            assert not trainer.holds
            assert phases.log.count(("train", "step-0")) == PLAN.attempts
            assert phases.log[-1] == ("release", "trainer")
            assert store.stages() == {"step-0": Stage.PUBLISHED}
            trainer.point = lambda name: None
            asked = [len(toy.asked) for toy in toys]
            await train(urls(toys), trainer, store, 1, phases=phases)
            assert [len(toy.asked) for toy in toys] == asked
            assert len(trainer.log) == 1

    asyncio.run(run())


def test_a_job_that_has_begun_anew_is_led_through_its_phases(tmp_path):
    """The store has a scored batch, and the coordinator has never heard of it."""

    async def run():
        async with engines() as toys:
            trainer = DigestTrainer(tmp_path)
            store = MemoryStore()
            trainer.point = _raise_at("load")
            with pytest.raises(RuntimeError, match="load"):
                await train(urls(toys), trainer, store, 1, phases=LoggedPhases(trainer))
            trainer.point = lambda name: None
            asked = [len(toy.asked) for toy in toys]
            phases = LoggedPhases(trainer)
            await train(urls(toys), trainer, store, 1, phases=phases)
            assert [len(toy.asked) for toy in toys] == asked
            names = [entry[0] for entry in phases.log]
            assert names == ["attach", "train", *PLAN.phases, "release", "leave"]

    asyncio.run(run())


def _raise_at(wanted: str):
    def point(name: str) -> None:
        if name == wanted:
            raise RuntimeError(name)

    return point


def test_a_refusal_that_order_cannot_help_is_told(tmp_path):
    async def run():
        async with engines() as toys:
            trainer = DigestTrainer(tmp_path)
            phases = LoggedPhases(trainer)
            phases.batch, phases.reached = "other", 1
            with pytest.raises(RoleOperationRefusedError, match="rollout cannot follow 1"):
                await train(urls(toys), trainer, MemoryStore(), 1, phases=phases)

    asyncio.run(run())


def test_samples_of_older_weights_are_made_anew(tmp_path):
    """A process was killed in its rollout, before weights that a trainer saved had arrived."""

    async def run():
        async with engines() as toys:
            trainer, store = DigestTrainer(tmp_path), MemoryStore()
            await train(urls(toys), trainer, store, 1)
            count = len(toys[0].asked)
            toys[0].version = "stale"

            class Later(LoggedPhases):
                async def enter(self, phase: str, batch: str, /) -> None:
                    toys[0].version = "stale"

            with pytest.raises(
                RequestFailedError, match="version stale of the student; version v1"
            ):
                once = dataclasses.replace(PLAN, attempts=1)
                await train(urls(toys), trainer, store, 2, phases=Later(trainer), plan=once)
            assert len(toys[0].asked) > count
            assert store.load("step-1").samples == ()

    asyncio.run(run())


def test_a_job_that_began_anew_gets_the_weights_again(tmp_path):
    """It was started again from its file while the student rolled out."""

    async def run():
        async with engines() as toys:
            trainer, store = DigestTrainer(tmp_path), MemoryStore()
            await train(urls(toys), trainer, store, 1)
            lost = ["stale"]

            class BegunAnew(LoggedPhases):
                async def enter(self, phase: str, batch: str, /) -> None:
                    if lost:
                        toys[0].version = lost.pop()

            last = await train(urls(toys), trainer, store, 2, phases=BegunAnew(trainer))
            assert last.step == 2
            # At the start, in the second attempt at the rollout, and after the step.
            assert toys[0].updates == ["v1", "v1", "v1", "v2"]

    asyncio.run(run())


def test_weights_that_could_not_be_pushed_in_passing_are_pushed_again_and_nothing_is_trained_twice(
    tmp_path,
):
    async def run():
        async with engines() as toys:
            trainer, store = DigestTrainer(tmp_path), MemoryStore()
            phases, left = LoggedPhases(trainer), 2

            def refuse(request):
                nonlocal left
                if request.path != "/update_weights_from_disk" or not left:
                    return False
                left -= 1
                request.answer({"error": {"message": "a replica did not answer"}}, 503)
                return True

            toys[0].refusal = refuse
            last = await train(urls(toys), trainer, store, 1, phases=phases)
            assert (last.version, toys[0].updates) == ("v1", ["v1"])
            assert [step for step, _ in trainer.log] == [0]
            assert phases.log.count(("train", "step-0")) == 3
            assert dict(store.stages()) == {"step-0": Stage.CONSUMED}

    asyncio.run(run())


def test_a_lost_checkpoint_is_told(tmp_path):
    async def run():
        async with engines() as toys:
            store = MemoryStore()
            await train(urls(toys), DigestTrainer(tmp_path / "a"), store, 1)
            with pytest.raises(BatchStateError, match="give it back its checkpoint of step 1"):
                await train(urls(toys), DigestTrainer(tmp_path / "b"), store, 1)

    asyncio.run(run())


def test_plans_that_cannot_be_met_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="put 'teacher' before it"):
        LoopPlan(scoring={Scoring.STUDENT: "s", Scoring.TEACHER: "t"})
    with pytest.raises(ConfigurationError, match="attempts=0"):
        LoopPlan(attempts=0)
    with pytest.raises(ConfigurationError, match="pause_s=-1"):
        LoopPlan(pause_s=-1)
    assert LoopPlan().phases == ("rollout", "teacher", "train")


def as_phases(client: AsyncPhaseClient) -> Phases:
    """The client of a job's phases is what the loop asks for; mypy checks it."""
    return client
