"""The training loop: every placement's phases, and every process that is killed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from phalanx.client import AsyncPhaseClient
from phalanx.distill import (
    Checkpoint,
    DiskStore,
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
from tests.distill.looping import PLAN, DigestTrainer, train
from tests.distill.toy_role import ToyEngine

NUM_STEPS = 3


@asynccontextmanager
async def engines():
    toys = [ToyEngine(name) for name in ("student", "judge", "teacher")]
    toys[0].version = "default"
    for toy in toys:
        await toy.start()
    try:
        yield toys
    finally:
        for toy in toys:
            await toy.stop()


def urls(toys) -> list[str]:
    return [toy.url for toy in toys]


class LoggedPhases:
    """Keeps the order as a coordinator does, and a log; `faults` are raised by the next calls."""

    def __init__(self, trainer: DigestTrainer, names=PLAN.phases) -> None:
        self.names = names
        self.trainer = trainer
        self.log: list[tuple[str, ...]] = []
        self.batch: str | None = None
        self.reached = -1
        self.faults: dict[str, list[Exception]] = {}

    async def enter(self, phase: str, batch: str, /) -> None:
        self.log.append((phase, batch))
        if self.faults.get(phase):
            raise self.faults[phase].pop(0)
        index = self.names.index(phase)
        if self.trainer.holds:
            raise RoleOperationRefusedError("the trainer holds the devices")
        is_new = batch != self.batch
        reached = -1 if is_new else self.reached
        if index > reached + 1 or (is_new and self.reached not in (-1, len(self.names) - 1)):
            raise RoleOperationRefusedError(f"{phase} cannot follow {self.reached}")
        self.batch, self.reached = batch, max(reached, index)

    async def leave(self) -> None:
        self.log.append(("leave",))

    async def attach(self, trainer_id: str, /) -> None:
        self.log.append(("attach", trainer_id))

    async def release(self, trainer_id: str, /) -> None:
        assert not self.trainer.holds
        self.log.append(("release", trainer_id))


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


def weights_of(checkpoint: Checkpoint | None) -> str:
    return Path(checkpoint.path, "weights").read_text()


async def undisturbed(tmp_path: Path, num_steps: int = NUM_STEPS) -> str:
    async with engines() as toys:
        trainer = DigestTrainer(tmp_path / "undisturbed")
        last = await train(urls(toys), trainer, MemoryStore(), num_steps)
        return weights_of(last)


def test_a_run_is_the_same_again_and_goes_on_where_it_stopped(tmp_path):
    async def run():
        expected = await undisturbed(tmp_path)
        assert await undisturbed(tmp_path / "again") == expected
        async with engines() as toys:
            for num_steps in (1, 1, 3, 0, 2):
                trainer = DigestTrainer(tmp_path / "parts")
                with DiskStore(tmp_path / "samples") as store:
                    last = await train(urls(toys), trainer, store, num_steps)
            assert weights_of(last) == expected

    asyncio.run(run())


POINTS = [
    "PhaseEntered:1",
    "SamplesDone:2",
    "SamplesDone:4",
    "SamplesDone:7",
    "SamplesDone:8",
    "SamplesDone:11",
    "SamplesDone:15",
    "PhaseEntered:5",
    "load:2",
    "loaded:1",
    "train:2",
    "trained:1",
    "save:2",
    "saved:1",
    "offload:2",
    "StepTrained:1",
    "WeightsPushed:2",
    "StepEnded:1",
]
AFTER_SCORING = POINTS[POINTS.index("PhaseEntered:5") :]
QUICK = ["SamplesDone:11", "train:2", "saved:1"]


@pytest.mark.parametrize("point", QUICK)
def test_killed_the_next_process_ends_with_the_same_weights(tmp_path, point):
    check_killed(tmp_path, point)


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere(tmp_path, point):
    check_killed(tmp_path, point)


def check_killed(tmp_path: Path, point: str) -> None:
    async def run():
        expected = await undisturbed(tmp_path, 2)
        async with engines() as toys:
            command = [sys.executable, "-m", "tests.distill.looping", str(tmp_path / "killed")]

            async def program(at: str) -> tuple[int, str]:
                process = await asyncio.create_subprocess_exec(
                    *command, *urls(toys), "2", at, stdout=asyncio.subprocess.PIPE
                )
                out, _ = await process.communicate()
                return process.returncode, out.decode()

            assert (await program(point))[0] == -signal.SIGKILL
            num_before = [len(toy.asked) for toy in toys]
            status, out = await program("never:1")
            assert status == 0
            assert json.loads(out)["weights"] == expected
            for toy, before in zip(toys[1:], num_before[1:], strict=True):
                # Only what was on its way, of one step's four samples, may be asked for again.
                lost = 0 if point in AFTER_SCORING else 4
                assert len(toy.asked) <= 8 + lost
                assert before <= 8
            trained = json.loads(out)["log"]
            assert [step for step, _ in trained] == sorted(step for step, _ in trained)

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
    assert LoopPlan().phases == ("rollout", "teacher", "train")


def as_phases(client: AsyncPhaseClient) -> Phases:
    """The client of a job's phases is what the loop asks for; mypy checks it."""
    return client
