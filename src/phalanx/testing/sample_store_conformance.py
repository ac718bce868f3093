"""What every store of samples does, checked step by step on an empty one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from phalanx.distill.sample import Sample, TeacherRequest, TeacherScores, TokenSelection
from phalanx.distill.stores.base import SampleStore, Scoring, Stage, StoredBatch
from phalanx.distill.token_table import SupportTable, TokenTable
from phalanx.errors import BatchStateError, InvalidRequestError
from phalanx.testing.conformance import ConformanceError, require

JUDGE, TEACHER = Scoring.JUDGE, Scoring.TEACHER


def check_sample_store(
    store: SampleStore, reopened: Callable[[SampleStore], SampleStore] | None = None
) -> None:
    """Raise `ConformanceError` where `store`, which is empty, does something else than its contract.

    `reopened` gives up a store and opens what it held anew, as a process does that follows another;
    it is called between all steps.
    """

    def again(one: SampleStore) -> SampleStore:
        return one if reopened is None else reopened(one)

    require(dict(store.stages()) == {}, "an empty store has batches")
    require(store.load("nothing") is None, "it has what was never saved")
    store = again(_check_a_life(store, again))
    store = again(_check_refusals(store))
    store = again(_check_two_batches(store, again))
    _check_one_publisher(store)


def stored_samples(count: int = 4) -> tuple[Sample, ...]:
    """Samples of two groups, with all that a sample can have."""
    return tuple(_sample(at // 2, at % 2) for at in range(count))


def scored(sample: Sample, value: float) -> Sample:
    """A copy with outputs, whose numbers say `value`."""
    length = sample.response_length
    table = TokenTable.of([[1, 2]] * length, [[value, value]] * length, 2)
    sizes = np.full(length, 2, np.int32)
    support = SupportTable.of_arrays(table.id_array, None, table.score_array, sizes)
    scores = TeacherScores(
        asked="digest",
        model="big",
        version="7",
        teacher_log_probs=(value,) * length,
        teacher_topk=table,
        support=support,
    )
    return msgspec.structs.replace(sample, scores=scores, reward=value)


def _sample(group: int, index: int) -> Sample:
    length = 3 + index
    return Sample(
        sample_id=f"group {group}/{index}",
        group_id=f"group {group}",
        index=index,
        prompt_ids=(1, 2, 2**31 - 1),
        response_ids=tuple(range(length)),
        rollout_log_probs=tuple(-0.1 * (at + 1) for at in range(length)),
        weight_versions=(("1", 1), ("2", length - 1)),
        seed=5,
        text='an answer, "quoted" — ü',
        student_topk=TokenTable.of([[3, 4]] * length, [[-1.5, -2.5]] * length, 2),
        metadata={"source": "math", "level": 3, "hard": True, "weight": 0.5, "none": None},
        teacher=TeacherRequest(selection=TokenSelection.UNION, top_k=2, prompt_ids=(9,)),
    )


def _check_a_life(store: SampleStore, again: Callable[[SampleStore], SampleStore]) -> SampleStore:
    samples = stored_samples()
    empty = StoredBatch(batch_id="step-1", stage=Stage.COLLECTING, needs=(JUDGE, TEACHER))
    store.save(empty)
    store = again(store)
    require(store.load("step-1") == empty, "it is not what was saved")
    store.note("step-1", samples[:1])
    store = again(store)
    store.note("step-1", samples[2:])
    newer = msgspec.structs.replace(samples[0], text="another")
    store.note("step-1", [newer])
    store = again(store)
    notes = {one.sample_id: one for one in (newer, *samples[2:])}
    require(store.load("step-1") == msgspec.structs.replace(empty, notes=notes), "notes are kept")

    staged = msgspec.structs.replace(empty, stage=Stage.STAGED, samples=samples)
    store.save(msgspec.structs.replace(staged, notes=notes))
    store = again(store)
    require(store.load("step-1") == staged, "a save drops notes, also those that it is given")
    store.note("step-1", [scored(samples[1], -1.0)])
    store = again(store)
    noted = {samples[1].sample_id: scored(samples[1], -1.0)}
    expected = msgspec.structs.replace(staged, notes=noted)
    require(store.load("step-1") == expected, "notes are kept, and change no sample")
    return _check_the_end(store, again, staged)


def _check_the_end(
    store: SampleStore, again: Callable[[SampleStore], SampleStore], staged: StoredBatch
) -> SampleStore:
    samples = staged.samples
    whole = tuple(scored(one, -float(at)) for at, one in enumerate(samples))
    done = msgspec.structs.replace(staged, samples=whole, done=(JUDGE,))
    store.save(done)
    store.save(done)
    store = again(store)
    require(store.load("step-1") == done, "it is not what was saved")
    done = msgspec.structs.replace(done, stage=Stage.SCORED, done=(JUDGE, TEACHER))
    for stage in (Stage.SCORED, Stage.VALIDATED):
        done = msgspec.structs.replace(done, stage=stage)
        store.save(done)
        store = again(store)
        require(store.load("step-1") == done, "it is not what was saved")
        require(dict(store.stages()) == {"step-1": stage}, "it tells another stage")
    require(store.publish("step-1"), "a validated batch is published")
    require(not store.publish("step-1"), "a batch is published once")
    store = again(store)
    require(not store.publish("step-1"), "a batch is published once, also after a restart")
    published = msgspec.structs.replace(done, stage=Stage.PUBLISHED)
    require(store.load("step-1") == published, "it is not what was published")
    refused(lambda: store.save(done))
    refused(lambda: store.note("step-1", samples))
    store.consume("step-1")
    store = again(store)
    store.consume("step-1")
    require(not store.publish("step-1"), "nor after it was consumed")
    left = store.load("step-1")
    gone = StoredBatch(batch_id="step-1", stage=Stage.CONSUMED)
    require(left == gone, "a consumed batch has samples")
    refused(lambda: store.save(msgspec.structs.replace(staged, samples=())))
    return store


def _check_refusals(store: SampleStore) -> SampleStore:
    staged = StoredBatch(
        batch_id="step-2", stage=Stage.STAGED, needs=(TEACHER,), samples=stored_samples()
    )
    for act in (store.publish, store.consume):
        refused(partial(act, "step-2"))
    refused(lambda: store.note("step-2", staged.samples))
    store.save(staged)
    for act in (store.publish, store.consume):
        refused(partial(act, "step-2"))
    for stage in (Stage.COLLECTING, Stage.SCORED, Stage.VALIDATED, Stage.PUBLISHED, Stage.CONSUMED):
        wrong = msgspec.structs.replace(staged, stage=stage)
        refused(partial(store.save, wrong))
    require(store.load("step-2") == staged, "what was refused changed nothing")
    for name in ("", "a/b", "../a", ".a", "a" * 101, "ä"):
        try:
            StoredBatch(batch_id=name, stage=Stage.STAGED)
        except InvalidRequestError:
            continue
        raise ConformanceError(f"{name!r} is taken for a batch's id")
    return store


def _check_two_batches(
    store: SampleStore, again: Callable[[SampleStore], SampleStore]
) -> SampleStore:
    for name in ("a", "a.1", "a.1.2"):
        store.save(StoredBatch(batch_id=name, stage=Stage.COLLECTING))
        store.note(name, [msgspec.structs.replace(_sample(0, 0), text=name)])
    store = again(store)
    for name in ("a", "a.1", "a.1.2"):
        found = store.load(name)
        notes = {} if found is None else found.notes
        require([one.text for one in notes.values()] == [name], "batches have own notes")
    return store


def _check_one_publisher(store: SampleStore) -> None:
    samples = tuple(scored(one, -1.0) for one in stored_samples())
    batch = StoredBatch(
        batch_id="raced", stage=Stage.VALIDATED, needs=(TEACHER,), done=(TEACHER,), samples=samples
    )
    store.save(batch)
    together, said = threading.Barrier(4), []

    def publish() -> None:
        together.wait()
        said.append(store.publish("raced"))

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    require(sorted(said) == [False, False, False, True], "one of four callers has published it")


def refused(act: Callable[[], object]) -> None:
    """Raise `ConformanceError` where `act` does not raise `BatchStateError`."""
    try:
        act()
    except BatchStateError:
        return
    raise ConformanceError("it was not refused")
