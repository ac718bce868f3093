"""A deferred batch and its store with a fault at any call: a role that fails, answers nonsense or gets
lost, a store that fails before or after it has written, and a process that ends right there.
"""

from __future__ import annotations

import asyncio
import enum
import tempfile
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.distill import (
    AskingSettings,
    DeferredBatch,
    DiskStore,
    MemoryStore,
    RolloutWorkload,
    ScorerSettings,
    Scoring,
    Stage,
    StudentScorer,
    TeacherScorer,
)
from phalanx.distill.checking import check_order, check_reward, check_scores
from phalanx.errors import PhalanxError, RequestFailedError, SampleStoreError
from tests.distill.making import ALL, asked, prompts, rollout
from tests.distill.test_workload import grading
from tests.distill.toy_role import ToyEngine

NEEDS = (Scoring.JUDGE, Scoring.TEACHER, Scoring.STUDENT)
ASKING = AskingSettings(max_concurrency=2, resends=0)


class Fault(enum.Enum):
    """What happens at a call."""

    NONE = "none"
    FAILS = "fails"
    LOST = "done, and its answer lost"
    WRONG = "answers something else"
    ENDS_BEFORE = "the process ends before it"
    ENDS_AFTER = "the process ends after it"


class ProcessEndedError(BaseException):
    """Nothing catches it but the test."""


class Faults:
    """The next one for each call; none when they have run out."""

    def __init__(self, faults: list[Fault]) -> None:
        self._left = list(faults)

    def next(self) -> Fault:
        return self._left.pop(0) if self._left else Fault.NONE


class ToyClient:
    """As `AsyncRoleClient` at one engine, without a socket."""

    is_engine = True
    mode = "direct"
    snapshot = None

    def __init__(self, name: str, faults: Faults) -> None:
        self.engine = ToyEngine(name)
        self.faults = faults
        self.num_answered = 0

    async def generate(self, payload, *, model, route_key, affinity, timeout_s):
        await asyncio.sleep(0)
        scores = payload["sampling_params"]["max_new_tokens"] == 0
        act = self.engine._scored if scores else self.engine._sampled
        return self._through(lambda: act(payload))

    async def chat(self, payload, *, model, route_key, timeout_s):
        await asyncio.sleep(0)
        return self._through(lambda: {"choices": [{"message": {"content": "8"}}]})

    def _through(self, act: Callable[[], dict]) -> dict:
        fault = self.faults.next()
        if fault is Fault.ENDS_BEFORE:
            raise ProcessEndedError
        if fault is Fault.FAILS:
            raise RequestFailedError("it failed")
        answer = act()
        self.num_answered += 1
        if fault is Fault.LOST:
            raise RequestFailedError("it got lost")
        if fault is Fault.ENDS_AFTER:
            raise ProcessEndedError
        if fault is Fault.WRONG:
            return {"meta_info": {"finish_reason": {"type": "stop"}}, "choices": []}
        return answer


class FaultyStore:
    """A store whose calls meet faults; `published` counts the calls that were told so."""

    def __init__(self, inner: MemoryStore | DiskStore, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults
        self.num_published = 0

    def _through(self, act: Callable[[], object]) -> object:
        fault = self.faults.next()
        if fault is Fault.ENDS_BEFORE:
            raise ProcessEndedError
        if fault in (Fault.FAILS, Fault.WRONG):
            raise SampleStoreError("no room")
        value = act()
        if fault is Fault.ENDS_AFTER:
            raise ProcessEndedError
        if fault is Fault.LOST:
            raise SampleStoreError("it was written, and nobody heard of it")
        return value

    def stages(self):
        return self._through(self.inner.stages)

    def load(self, batch_id):
        return self._through(lambda: self.inner.load(batch_id))

    def save(self, batch):
        return self._through(lambda: self.inner.save(batch))

    def note(self, batch_id, samples):
        return self._through(lambda: self.inner.note(batch_id, samples))

    def publish(self, batch_id):
        def act() -> bool:
            is_first = self.inner.publish(batch_id)
            self.num_published += is_first
            return is_first

        return self._through(act)

    def consume(self, batch_id):
        return self._through(lambda: self.inner.consume(batch_id))


async def process(store: FaultyStore, clients: list[ToyClient]) -> DeferredBatch:
    """One process's work on the batch, from wherever it is."""
    student, judge, teacher = clients
    workload = RolloutWorkload(
        student,
        rollout(top_logprobs=2, max_new_tokens=3, asking=ASKING),
        judge=judge,
        grading=grading(asking=ASKING),
    )
    batch = await DeferredBatch.open(store, "s1", NEEDS)
    await batch.collect(workload, prompts(2, teacher=asked(ALL[3], 2)))
    await batch.judge(workload)
    await batch.score_teacher(TeacherScorer(teacher, ScorerSettings(ASKING)))
    await batch.score_student(StudentScorer(student, ScorerSettings(ASKING)))
    await batch.validate()
    await batch.publish()
    return batch


def check_invariants(store: FaultyStore) -> None:
    """Of what lies in the store, whatever has happened."""
    batch = store.inner.load("s1")
    if batch is None:
        return
    if batch.stage is not Stage.COLLECTING:
        ids = [(one.group_id, one.index) for one in batch.samples]
        assert ids == [("g0", 0), ("g0", 1), ("g1", 0), ("g1", 1)]
    for one in batch.samples:
        if Scoring.JUDGE in batch.done:
            check_reward(one)
        else:
            assert one.reward is None
        if Scoring.TEACHER in batch.done:
            check_scores(one, with_student=Scoring.STUDENT in batch.done)
        else:
            assert one.scores is None
    if batch.stage.rank >= Stage.SCORED.rank:
        assert set(batch.done) == set(NEEDS)
    assert store.num_published == (batch.stage is Stage.PUBLISHED)


def live(inner: MemoryStore | DiskStore, script: list[Fault]) -> None:
    """Processes one after the other, until one ends well; faults run out."""
    faults = Faults(script)
    store = FaultyStore(inner, faults)
    clients = [ToyClient(name, faults) for name in ("student", "judge", "teacher")]
    staged = None
    num_processes = 0
    while True:
        num_processes += 1
        try:
            batch = asyncio.run(process(store, clients))
        except (PhalanxError, ProcessEndedError, BaseExceptionGroup):
            batch = None
        check_invariants(store)
        stored = inner.load("s1")
        if staged is not None:
            check_order(staged, stored.samples)
        elif stored is not None and stored.samples:
            staged = stored.samples
        if batch is not None:
            break
        assert num_processes <= len(script), "no way forward though faults had stopped"
    assert batch.stage is Stage.PUBLISHED
    assert store.num_published == 1
    # What was answered and kept is not asked for again: a fault wastes what runs at a time, no more.
    for client, needed in zip(clients, (8, 4, 4), strict=True):
        assert needed <= client.num_answered <= needed + 2 * len(script)


SCRIPTS = st.lists(
    st.sampled_from([Fault.NONE] * 6 + list(Fault)),
    max_size=70,
)


@settings(deadline=None, max_examples=40)
@given(SCRIPTS)
def test_i103_i104_a_batch_goes_on_after_any_fault_and_is_published_once(script):
    live(MemoryStore(), script)


@settings(deadline=None, max_examples=10)
@given(SCRIPTS)
def test_the_same_on_a_disk(script):
    with tempfile.TemporaryDirectory() as directory, DiskStore(directory) as store:
        live(store, script)


@pytest.mark.long
@settings(deadline=None, max_examples=500)
@given(SCRIPTS)
def test_the_same_many_times(script):
    live(MemoryStore(), script)


def test_every_single_fault_at_every_call():
    """One fault at a time, at each call of an undisturbed life (31 of them are told apart)."""
    for fault in Fault:
        for place in range(0, 60, 7):
            live(MemoryStore(), [Fault.NONE] * place + [fault])
