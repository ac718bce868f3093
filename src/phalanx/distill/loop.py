"""The training loop: step by step through the phases of the job, the same for every placement.

A step's batch has the step's number in its id, and all that the loop does is known by that: what was
done by a process that was killed is not done again, and what was begun is taken up where it stood.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from phalanx.distill.deferred_batch import DeferredBatch
from phalanx.distill.loop_events import (
    LoopEvent,
    PhaseEntered,
    SamplesDone,
    StepEnded,
    StepTrained,
    WeightsPushed,
    no_event,
)
from phalanx.distill.rollout import Prompt
from phalanx.distill.sample import Sample, TeacherRequest
from phalanx.distill.scoring import StudentScorer, TeacherScorer
from phalanx.distill.stores.base import SampleStore, Scoring, Stage
from phalanx.distill.training import Checkpoint, Phases, Trainer, WeightSink
from phalanx.distill.workload import RolloutWorkload
from phalanx.errors import (
    BatchStateError,
    ConfigurationError,
    DeadlineExceededError,
    EngineUnavailableError,
    RequestFailedError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)

_T = TypeVar("_T")
MAX_PAUSE_S = 30.0
_PASSING = (EngineUnavailableError, RequestFailedError, RoleOperationFailedError)


@dataclass(frozen=True)
class LoopPlan:
    """The names of the job's phases: of the rollout, of each scoring in the order in which they run,
    and of the trainer. `batches` is what ids of batches begin with: `NAME-STEP`. A phase whose work
    failed for a passing reason is entered again, `attempts` times in all, `pause_s` after the first
    of them and longer after each later one: a death may be known a moment later.
    """

    rollout: str = "rollout"
    scoring: Mapping[Scoring, str] = field(default_factory=lambda: {Scoring.TEACHER: "teacher"})
    train: str = "train"
    batches: str = "step"
    trainer_id: str = "trainer"
    attempts: int = 3
    pause_s: float = 1.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigurationError(f"attempts={self.attempts} must be at least 1")
        if not 0 <= self.pause_s < math.inf:
            raise ConfigurationError(f"pause_s={self.pause_s} must be at least 0")
        order = list(self.scoring)
        if (
            Scoring.STUDENT in order
            and Scoring.TEACHER not in order[: order.index(Scoring.STUDENT)]
        ):
            raise ConfigurationError(
                "scoring: the student is scored at the teacher's tokens; put 'teacher' before it"
            )

    def batch_id(self, step: int) -> str:
        return f"{self.batches}-{step}"

    def pause_after_s(self, attempt: int) -> float:
        """Before the next one; the first attempt is 0."""
        return min(self.pause_s * 2.0 ** min(attempt, 30), MAX_PAUSE_S)

    @property
    def phases(self) -> tuple[str, ...]:
        """All of them, in their order."""
        return (self.rollout, *self.scoring.values(), self.train)


@dataclass(frozen=True)
class LoopParts:
    """What the loop works with. `prompts` gives those of a step, always the same. `request_of` says
    what the teacher is asked, where the prompts do not.
    """

    phases: Phases
    store: SampleStore
    workload: RolloutWorkload
    trainer: Trainer
    prompts: Callable[[int], Sequence[Prompt]]
    teacher: TeacherScorer | None = None
    student: StudentScorer | None = None
    weights: WeightSink | None = None
    request_of: Callable[[Sample], TeacherRequest] | None = None


class DistillLoop:
    """Trains a student for a number of steps. One `run` at a time."""

    def __init__(
        self,
        parts: LoopParts,
        plan: LoopPlan | None = None,
        on_event: Callable[[LoopEvent], None] = no_event,
    ) -> None:
        self.plan = plan or LoopPlan()
        self._parts = parts
        self._on_event = on_event
        self._entered: tuple[str, str] | None = None
        if Scoring.TEACHER in self.plan.scoring and parts.teacher is None:
            raise ConfigurationError("the plan scores with a teacher; give teacher")
        if Scoring.STUDENT in self.plan.scoring and parts.student is None:
            raise ConfigurationError("the plan scores the student again; give student")

    async def run(self, num_steps: int) -> Checkpoint | None:
        """Train until `num_steps` are done in all, those of earlier processes among them; the last
        checkpoint. However it ends, the trainer holds no memory afterwards.

        Raises what a step failed with. It may be called again then, by another process too.
        """
        if num_steps < 0:
            raise ConfigurationError(f"num_steps={num_steps} is below 0")
        last = await asyncio.to_thread(self._parts.trainer.last)
        first = 0 if last is None else last.step
        await self._parts.phases.attach(self.plan.trainer_id)
        if last is not None:
            await self._push(last)
            await self._drop(first - 1)
        for step in range(first, num_steps):
            last = await self._step(step, last)
        self._entered = None
        await self._parts.phases.leave()
        return last

    async def _step(self, step: int, before: Checkpoint | None) -> Checkpoint:
        batch = await self._batch(step)
        if batch.stage is Stage.CONSUMED:
            raise BatchStateError(
                f"step {step} was trained on batch {batch.batch_id!r}, whose samples are gone, and the"
                f" trainer is at step {step}; give it back its checkpoint of step {step + 1}, or another"
                " store"
            )
        if batch.stage is Stage.COLLECTING:
            await self._in_phase(
                self.plan.rollout, batch, lambda: self._collect(batch, step, before), before
            )
        for what, phase in self.plan.scoring.items():
            if what in batch.missing:
                await self._in_phase(phase, batch, partial(self._score, batch, what), before)
        await batch.validate()
        checkpoint = await self._in_phase(
            self.plan.train, batch, lambda: self._train_and_push(batch, step)
        )
        await batch.consume()
        self._on_event(StepEnded(step))
        return checkpoint

    async def _batch(self, step: int) -> DeferredBatch:
        return await DeferredBatch.open(
            self._parts.store,
            self.plan.batch_id(step),
            tuple(self.plan.scoring),
            lambda what, done, total: self._on_event(SamplesDone(step, what, done, total)),
        )

    async def _collect(self, batch: DeferredBatch, step: int, before: Checkpoint | None) -> None:
        # A rollout by weights of another step than the trainer's is none of this step.
        sink = self._parts.weights
        version = None if before is None or sink is None else before.version
        await batch.collect(self._parts.workload, self._parts.prompts(step), version)

    async def _score(self, batch: DeferredBatch, what: Scoring) -> None:
        match what:
            case Scoring.JUDGE:
                await batch.judge(self._parts.workload)
            case Scoring.TEACHER:
                if self._parts.request_of is not None:
                    await batch.prepare(self._parts.request_of)
                assert self._parts.teacher is not None
                await batch.score_teacher(self._parts.teacher)
            case Scoring.STUDENT:
                assert self._parts.student is not None
                await batch.score_student(self._parts.student, self._parts.workload.settings.model)

    async def _train_and_push(self, batch: DeferredBatch, step: int) -> Checkpoint:
        checkpoint = await self._train(batch, step)
        await self._push(checkpoint)
        return checkpoint

    async def _train(self, batch: DeferredBatch, step: int) -> Checkpoint:
        """Publication is the last thing before the trainer sees the batch; one that was published to
        a process that was killed is trained on from the same checkpoint.
        """
        trainer = self._parts.trainer
        try:
            last = await asyncio.to_thread(trainer.last)
            if last is not None and last.step > step:
                # It was trained, and what came after that failed.
                return last
            await asyncio.to_thread(trainer.load)
            await batch.publish()
            metrics = await asyncio.to_thread(trainer.train, batch.samples, step)
            self._on_event(StepTrained(step, dict(metrics)))
            return await asyncio.to_thread(trainer.save, step + 1)
        finally:
            await asyncio.to_thread(trainer.offload)
            await self._parts.phases.release(self.plan.trainer_id)

    async def _in_phase(
        self,
        phase: str,
        batch: DeferredBatch,
        work: Callable[[], Awaitable[_T]],
        before: Checkpoint | None = None,
    ) -> _T:
        """What `work` answers, in `phase`, which is entered again where it failed in passing; the
        student then gets the weights of `before` again.
        """
        for attempt in range(self.plan.attempts):
            try:
                await self._enter(phase, batch.batch_id)
                if attempt and before is not None and phase != self.plan.train:
                    # A job that has begun anew serves the weights of its file.
                    await self._push(before)
                return await work()
            except DeadlineExceededError:
                raise
            except _PASSING:
                self._entered = None
                if attempt + 1 == self.plan.attempts:
                    raise
            await asyncio.sleep(self.plan.pause_after_s(attempt))
        raise AssertionError("a phase has at least one attempt")

    async def _enter(self, phase: str, batch_id: str) -> None:
        if self._entered == (phase, batch_id):
            return
        phases = self._parts.phases
        try:
            await phases.enter(phase, batch_id)
        except RoleOperationRefusedError:
            # The store knows more of the batch than a job that has begun anew: in its order, then.
            names = self.plan.phases
            earlier = names[: names.index(phase)]
            if not earlier:
                raise
            for name in earlier:
                await phases.enter(name, batch_id)
            await phases.enter(phase, batch_id)
        self._entered = (phase, batch_id)
        self._on_event(PhaseEntered(phase, batch_id))

    async def _push(self, checkpoint: Checkpoint) -> None:
        if self._parts.weights is not None:
            await self._parts.weights.push(checkpoint)
            self._on_event(WeightsPushed(checkpoint.step, checkpoint.version))

    async def _drop(self, step: int) -> None:
        """The batch of the last step, where its process was killed before that."""
        stages = await asyncio.to_thread(self._parts.store.stages)
        batch_id = self.plan.batch_id(step)
        if stages.get(batch_id) is Stage.PUBLISHED:
            await asyncio.to_thread(self._parts.store.consume, batch_id)
