"""A batch of samples that is scored after its rollout: collecting, staged, scored, validated,
published.

While it is scored, copies of its samples are worked on, which its store keeps as notes; when all of
them are there and right they are written back, all at once. Only what was checked as a whole is
published, and that once. Every step may be begun again, after a failure and in another process: what
is done is not done twice.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Self

import msgspec

from phalanx.distill.asking import OnSample
from phalanx.distill.checking import check_order, check_reward, check_scores
from phalanx.distill.rollout import Prompt
from phalanx.distill.sample import Sample, TeacherRequest
from phalanx.distill.scoring import StudentScorer, TeacherScorer
from phalanx.distill.stores.base import SampleStore, Scoring, Stage, StoredBatch
from phalanx.distill.workload import RolloutWorkload
from phalanx.errors import BatchStateError, InvalidRequestError, ScoresMisalignedError

Progress = Callable[[str, int, int], None]
"""Told what is done (`collect`, `judge`, `teacher`, `student`), of how many samples, of all."""
Work = Callable[[Sequence[Sample], OnSample], Awaitable[list[Sample]]]


def no_progress(what: str, done: int, total: int) -> None:
    """For callers that show none."""


class DeferredBatch:
    """The batch `batch_id` of `store`, opened by `open`. One caller at a time."""

    def __init__(self, store: SampleStore, stored: StoredBatch, progress: Progress) -> None:
        self._store = store
        self._stored = stored
        self._progress = progress

    @classmethod
    async def open(
        cls,
        store: SampleStore,
        batch_id: str,
        needs: Sequence[Scoring] = (Scoring.TEACHER,),
        progress: Progress = no_progress,
    ) -> Self:
        """As the store has it, or a new one that is collecting. `needs` says which scores have to be
        written back before it can be published.
        """
        stored = await asyncio.to_thread(store.load, batch_id)
        if stored is None:
            stored = StoredBatch(batch_id=batch_id, stage=Stage.COLLECTING, needs=tuple(needs))
            await asyncio.to_thread(store.save, stored)
        elif stored.stage is not Stage.CONSUMED and set(stored.needs) != set(needs):
            raise BatchStateError(
                f"batch {batch_id!r} needs {_names(stored.needs)}, and {_names(needs)} is asked of it;"
                " give the same, or another batch_id"
            )
        return cls(store, stored, progress)

    @property
    def batch_id(self) -> str:
        return self._stored.batch_id

    @property
    def stage(self) -> Stage:
        return self._stored.stage

    @property
    def missing(self) -> tuple[Scoring, ...]:
        """What has to be written back yet."""
        return self._stored.missing

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Of a staged or later batch, with what was written back."""
        return self._stored.samples

    async def collect(
        self,
        workload: RolloutWorkload,
        prompts: Sequence[Prompt],
        weight_version: str | None = None,
    ) -> None:
        """Have the samples generated, and stage them. No judge and no teacher is asked anything.

        `weight_version` is the one that has to answer, where it is not that of the settings; samples
        of another one, which an earlier process left, are made anew.
        """
        if self._is_past(Stage.COLLECTING):
            return
        have = await self._notes()
        count = _Count(self._progress, "collect", len(prompts) * workload.settings.num_samples)
        count.add(len(have))

        samples = await workload.generate(
            prompts,
            self.batch_id,
            have=have,
            on_sample=self._noting(count),
            weight_version=weight_version,
        )
        await self.stage_samples(samples)

    async def stage_samples(self, samples: Sequence[Sample]) -> None:
        """Stage samples that somebody has made, in this order; groups stand together in it.

        They may have rewards or scores already, which are then not asked for again.
        """
        if self._is_past(Stage.COLLECTING):
            check_order(self.samples, samples)
            return
        _check_groups(samples)
        stage = Stage.STAGED if self.missing else Stage.SCORED
        await self._save(stage=stage, samples=tuple(samples))

    async def prepare(self, request_of: Callable[[Sample], TeacherRequest]) -> None:
        """Say what the teacher is asked about each sample, which may depend on its reward."""
        if Scoring.TEACHER in self._stored.done or self._is_past(Stage.STAGED):
            return
        self._check_staged("prepare")
        asked = tuple(msgspec.structs.replace(one, teacher=request_of(one)) for one in self.samples)
        if asked != self.samples:
            await self._save(samples=asked)

    async def judge(self, workload: RolloutWorkload) -> None:
        """Have every sample graded, and write the rewards back."""
        await self._score(Scoring.JUDGE, workload.evaluate)

    async def score_teacher(self, scorer: TeacherScorer) -> None:
        """Have every sample scored by its teacher, and write the scores back."""
        await self._score(Scoring.TEACHER, scorer.score)

    async def score_student(self, scorer: StudentScorer, model: str | None = None) -> None:
        """Have the student scored at the teacher's tokens, and write that back. The student's
        weights have to be those that made the samples.
        """
        if Scoring.STUDENT in self._stored.needs and Scoring.TEACHER in self.missing:
            raise BatchStateError(
                f"batch {self.batch_id!r} has no teacher's tokens yet; score the teacher first"
            )
        await self._score(Scoring.STUDENT, partial(scorer.score, model=model))

    async def validate(self) -> None:
        """Check all of what the store holds: every sample, its order, and every output.

        Raises `ScoresMisalignedError`; the batch is then as it was.
        """
        if self._is_past(Stage.SCORED):
            return
        if self.stage is not Stage.SCORED:
            raise BatchStateError(
                f"batch {self.batch_id!r} is {self.stage}, and lacks"
                f" {_names(self.missing) or 'samples'}; score it first"
            )
        stored = await self._loaded()
        check_order(self.samples, stored.samples)
        _check_groups(stored.samples)
        for sample in stored.samples:
            _check_outputs(sample, stored.needs)
        self._stored = stored
        await self._save(stage=Stage.VALIDATED)

    async def publish(self) -> bool:
        """Make it the trainer's. False where that was done before, by whomever."""
        is_first = await asyncio.to_thread(self._store.publish, self.batch_id)
        self._stored = await self._loaded()
        return is_first

    async def consume(self) -> None:
        """Drop its samples, once it was trained on."""
        await asyncio.to_thread(self._store.consume, self.batch_id)
        self._stored = await self._loaded()

    async def _score(self, what: Scoring, work: Work) -> None:
        if what not in self._stored.needs:
            raise BatchStateError(
                f"batch {self.batch_id!r} was opened without '{what}' among its needs"
            )
        if what in self._stored.done:
            return
        self._check_staged(what)
        notes = await self._notes()
        copies = [notes.get(one.sample_id, one) for one in self.samples]
        count = _Count(self._progress, what, len(copies))
        worked = await work(copies, self._noting(count))
        check_order(self.samples, worked)
        pairs = zip(self.samples, worked, strict=True)
        scored = tuple(_with_outputs(what, one, copy) for one, copy in pairs)
        for sample in scored:
            _check_outputs(sample, (what,))
        count.end()
        done = (*self._stored.done, what)
        is_last = set(done) == set(self._stored.needs)
        await self._save(stage=Stage.SCORED if is_last else Stage.STAGED, samples=scored, done=done)
        # What another scoring has done, and did not come to its end, was a note of before.
        rests = map(_with_rest, scored, worked)
        left = [rest for rest, one in zip(rests, scored, strict=True) if rest != one]
        if left and not is_last:
            await asyncio.to_thread(self._store.note, self.batch_id, left)

    def _noting(self, count: _Count) -> OnSample:
        """Keeps a copy that is done, and counts it."""

        async def note(sample: Sample) -> None:
            await asyncio.to_thread(self._store.note, self.batch_id, [sample])
            count.add(1)

        return note

    def _is_past(self, stage: Stage) -> bool:
        return self.stage.rank > stage.rank

    def _check_staged(self, what: str) -> None:
        if self.stage is not Stage.STAGED:
            raise BatchStateError(
                f"{what}: batch {self.batch_id!r} is {self.stage}; stage its samples first"
            )

    async def _notes(self) -> dict[str, Sample]:
        return (await self._loaded()).notes

    async def _loaded(self) -> StoredBatch:
        stored = await asyncio.to_thread(self._store.load, self.batch_id)
        if stored is None:
            raise BatchStateError(f"batch {self.batch_id!r} is no longer in its store")
        return stored

    async def _save(
        self,
        *,
        stage: Stage | None = None,
        samples: tuple[Sample, ...] | None = None,
        done: tuple[Scoring, ...] | None = None,
    ) -> None:
        stored = msgspec.structs.replace(
            self._stored,
            stage=stage or self.stage,
            samples=self.samples if samples is None else samples,
            done=self._stored.done if done is None else done,
            notes={},
        )
        await asyncio.to_thread(self._store.save, stored)
        self._stored = stored


class _Count:
    """Tells how many samples are done; each number is told once and none goes back."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self._progress, self._what, self._total = progress, what, total
        self._done = 0

    def add(self, count: int) -> None:
        done = min(self._done + count, self._total)
        if done > self._done:
            self._done = done
            self._progress(self._what, done, self._total)

    def end(self) -> None:
        """All are done, also those that nobody had to be asked about."""
        self.add(self._total - self._done)


def _with_outputs(what: Scoring, sample: Sample, copy: Sample) -> Sample:
    """The sample with what was to be written back of its copy, which may have more: what another
    scoring left that did not come to its end.
    """
    if what is Scoring.JUDGE:
        return msgspec.structs.replace(sample, reward=copy.reward, verdict=copy.verdict)
    return msgspec.structs.replace(sample, scores=copy.scores)


def _with_rest(sample: Sample, copy: Sample) -> Sample:
    """The sample with everything that its copy has."""
    return msgspec.structs.replace(
        sample, reward=copy.reward, verdict=copy.verdict, scores=copy.scores
    )


def _check_outputs(sample: Sample, needs: Sequence[Scoring]) -> None:
    if Scoring.JUDGE in needs:
        check_reward(sample)
    if Scoring.TEACHER in needs:
        check_scores(sample, with_student=False)
    if Scoring.STUDENT in needs:
        check_scores(sample)


def _check_groups(samples: Sequence[Sample]) -> None:
    """Groups stand together, in the order of their indices, and no sample is there twice."""
    if not samples:
        raise InvalidRequestError("a batch has no samples; give at least one", field="samples")
    ids = [one.sample_id for one in samples]
    if len(set(ids)) != len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise InvalidRequestError(f"sample {twice!r} is given twice", field="samples")
    ended: set[str] = set()
    for before, after in itertools.pairwise(samples):
        if before.group_id == after.group_id:
            if after.index <= before.index:
                raise ScoresMisalignedError(
                    f"samples of group {after.group_id!r} are not in the order of their index"
                )
            continue
        ended.add(before.group_id)
        if after.group_id in ended:
            raise ScoresMisalignedError(f"group {after.group_id!r} does not stand together")


def _names(needs: Sequence[Scoring]) -> str:
    return ", ".join(needs)
