"""Stores of samples: one contract for all, and what a disk adds to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from phalanx.distill import DiskStore, MemoryStore, Scoring, Stage, StoredBatch
from phalanx.errors import ConfigurationError, SampleStoreError
from phalanx.testing.sample_store_conformance import check_sample_store, scored, stored_samples

COLLECTING = StoredBatch(batch_id="one", stage=Stage.COLLECTING, needs=(Scoring.TEACHER,))
STAGED = msgspec.structs.replace(COLLECTING, stage=Stage.STAGED, samples=stored_samples())


def reopened(store: DiskStore) -> DiskStore:
    store.close()
    return DiskStore(store.directory)


def test_memory_does_what_a_store_does():
    check_sample_store(MemoryStore())


@pytest.mark.parametrize("again", [None, reopened])
def test_a_disk_does_what_a_store_does(tmp_path, again):
    store = DiskStore(tmp_path / "samples")
    check_sample_store(store, again)


def test_a_disk_is_one_process_at_a_time(tmp_path):
    with DiskStore(tmp_path) as store:
        store.save(STAGED)
        with pytest.raises(SampleStoreError, match="is in use"):
            DiskStore(tmp_path)
    with pytest.raises(SampleStoreError, match="is closed"):
        store.load("one")
    with DiskStore(tmp_path) as store:
        assert store.load("one") == STAGED


@pytest.mark.parametrize("kept", [1, 3, 11, 12, 13, 200, -1])
def test_a_note_that_is_torn_is_none_and_the_next_takes_its_place(tmp_path, kept):
    samples = stored_samples()
    with DiskStore(tmp_path) as store:
        store.save(COLLECTING)
        store.note("one", samples[:1])
        store.note("one", samples[1:2])
    [path] = tmp_path.glob("*.notes")
    whole = path.read_bytes()
    first = (len(whole) - len(framed(samples[1]))) if kept >= 0 else len(whole)
    path.write_bytes(whole[: first + kept] if kept >= 0 else whole[:-1] + b"?")
    with DiskStore(tmp_path) as store:
        assert set(store.load("one").notes) == {samples[0].sample_id}
        store.note("one", samples[2:3])
    with DiskStore(tmp_path) as store:
        wanted = {samples[0].sample_id, samples[2].sample_id}
        assert set(store.load("one").notes) == wanted


def test_what_lies_behind_a_damaged_note_does_not_come_back(tmp_path):
    """The next note is as long as the damaged one, and what follows it would be whole."""
    samples = stored_samples()
    with DiskStore(tmp_path) as store:
        store.save(COLLECTING)
        store.note("one", samples[:3])
    [path] = tmp_path.glob("*.notes")
    data = bytearray(path.read_bytes())
    first, second = (len(framed(one)) for one in samples[:2])
    assert second == len(framed(samples[3]))
    data[first + second - 1] ^= 0xFF
    path.write_bytes(bytes(data))
    with DiskStore(tmp_path) as store:
        store.note("one", samples[3:])
    with DiskStore(tmp_path) as store:
        assert set(store.load("one").notes) == {samples[0].sample_id, samples[3].sample_id}


def framed(sample) -> bytes:
    from phalanx.distill.stores.records import framed as record

    return record(msgspec.msgpack.encode(sample))


@pytest.mark.parametrize("where", [5, -5])
def test_a_damaged_batch_is_told_with_its_file(tmp_path, where):
    with DiskStore(tmp_path) as store:
        store.save(STAGED)
    path = tmp_path / "one.batch"
    data = bytearray(path.read_bytes())
    data[where] ^= 0xFF
    path.write_bytes(bytes(data))
    with (
        pytest.raises(SampleStoreError, match=r"one\.batch is damaged"),
        DiskStore(tmp_path) as store,
    ):
        store.load("one")


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_stores_are_bounded(tmp_path, kind):
    store = MemoryStore(2) if kind == "memory" else DiskStore(tmp_path, max_batches=2)
    for name in ("a", "b"):
        store.save(msgspec.structs.replace(STAGED, batch_id=name))
    with pytest.raises(SampleStoreError, match="consume one"):
        store.save(msgspec.structs.replace(STAGED, batch_id="c"))
    store.save(msgspec.structs.replace(STAGED, batch_id="a"))
    whole = tuple(scored(one, -1.0) for one in STAGED.samples)
    done = {"stage": Stage.VALIDATED, "done": STAGED.needs, "samples": whole}
    store.save(msgspec.structs.replace(STAGED, batch_id="a", **done))
    store.publish("a")
    store.consume("a")
    store.save(msgspec.structs.replace(STAGED, batch_id="c"))


def test_a_disk_is_bounded_in_bytes(tmp_path):
    with DiskStore(tmp_path, max_bytes=2000) as store:
        store.save(COLLECTING)
        with pytest.raises(SampleStoreError, match="raise max_bytes"):
            store.save(msgspec.structs.replace(STAGED, samples=STAGED.samples * 10))
        with pytest.raises(SampleStoreError, match="raise max_bytes"):
            store.note("one", STAGED.samples * 10)
        assert store.load("one") == COLLECTING
    with pytest.raises(ConfigurationError, match="max_bytes=0"):
        DiskStore(tmp_path, max_bytes=0)


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SampleStoreError, match="cannot be used"):
        DiskStore(tmp_path / "file" / "below")


KILLED = Path(__file__).with_name("killed_store.py")
STEPS = 28


@pytest.mark.parametrize("nth", [10, 25])
def test_killed_at_a_write_the_store_is_as_before_it_or_as_after_it(tmp_path, nth):
    """The process kills itself at its `nth` system call that changes a file, and prints what it had
    done by then; whatever it was at work on is whole or not there."""
    check_kill(tmp_path, nth)


@pytest.mark.long
@pytest.mark.parametrize("nth", range(1, STEPS, 2))
def test_killed_at_every_write(tmp_path, nth):
    check_kill(tmp_path, nth)


def check_kill(directory: Path, nth: int) -> None:
    command = [sys.executable, str(KILLED), str(directory), str(nth)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode in (0, -signal.SIGKILL), ran.stderr
    done = ran.stdout.split()
    published = done.count("published")
    with DiskStore(directory) as store:
        batch = store.load("one")
        expected = EXPECTED[len(done)] if len(done) < len(EXPECTED) else EXPECTED[-1]
        before, after = expected
        assert shape(batch) in (before, after), (done, shape(batch))
        if batch is not None and batch.stage is Stage.VALIDATED:
            assert published == 0
            assert store.publish("one")
        elif batch is not None and batch.stage.rank >= Stage.PUBLISHED.rank:
            assert not store.publish("one")
        assert not list(directory.glob("*.new"))


def shape(batch: StoredBatch | None) -> tuple[object, ...] | None:
    """What can be told apart of a batch in the run of `killed_store`."""
    if batch is None:
        return None
    return (str(batch.stage), len(batch.samples), len(batch.notes), len(batch.done))


LIFE = [
    None,
    ("collecting", 0, 0, 0),
    ("collecting", 0, 1, 0),
    ("collecting", 0, 2, 0),
    ("staged", 4, 0, 0),
    ("staged", 4, 1, 0),
    ("scored", 4, 0, 1),
    ("validated", 4, 0, 1),
    ("published", 4, 0, 1),
    ("consumed", 0, 0, 0),
]
EXPECTED = [*zip(LIFE, [*LIFE[1:], LIFE[-1]], strict=True)]
assert os.name == "posix"


def test_a_directory_that_could_not_be_read_is_free_again(tmp_path):
    """The same process may mend it and open it: nobody keeps its lock."""
    with DiskStore(tmp_path) as store:
        store.save(STAGED)
    whole = (tmp_path / "one.batch").read_bytes()
    (tmp_path / "one.batch").write_bytes(b"")
    with pytest.raises(SampleStoreError, match="is damaged"):
        DiskStore(tmp_path)
    (tmp_path / "one.batch").write_bytes(whole)
    with DiskStore(tmp_path) as store:
        assert store.load("one") == STAGED


def test_a_closed_store_is_free_though_a_child_of_its_process_lives_on(tmp_path):
    """Workers of a data loader are forked, with all files that are open."""
    store = DiskStore(tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        store.close()
        DiskStore(tmp_path).close()
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_room_is_asked_of_the_files_of_batches_that_are_kept(tmp_path):
    """What is left of consumed ones has no bytes, and grows with every step."""
    with DiskStore(tmp_path, max_bytes=1 << 20) as store:
        store.save(COLLECTING)
        (tmp_path / "of-somebody-else").write_bytes(bytes(2 << 20))
        store.note("one", STAGED.samples)
        assert len(store.load("one").notes) == len(STAGED.samples)
