"""The shared memory against a model: what is written is read, nothing unread is overwritten."""

from __future__ import annotations

import gc
import itertools
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from phalanx.engine.workers.arena import (
    MAX_LOANS,
    MAX_READERS,
    ArenaReader,
    ArenaWriter,
    FreeSpace,
    create_arena,
)

LINE = 64


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 40), st.none()), max_size=60), st.randoms())
def test_free_space_takes_the_lowest_gap_that_fits(steps, random):
    space, taken, live = FreeSpace(100), [False] * 100, []
    for size in steps:
        if size is None:
            if live:
                start, size = live.pop(random.randrange(len(live)))
                space.give_back(start, size)
                taken[start : start + size] = [False] * size
            continue
        fits = [i for i in range(101 - size) if not any(taken[i : i + size])]
        start = space.take(size)
        assert start == (fits[0] if fits else None)
        if start is not None:
            taken[start : start + size] = [True] * size
            live.append((start, size))
    for block in live:
        space.give_back(*block)
    assert space.take(100) == 0


class ArenaModel(RuleBasedStateMachine):
    """A writer and several readers; each reader's queue says what it must find next.

    An only reader keeps some payloads on loan.
    """

    @initialize(num_readers=st.integers(1, 3), capacity=st.sampled_from([4096, 12288]))
    def build(self, num_readers, capacity):
        self.capacity = capacity
        with create_arena(capacity) as file:
            self.writer = ArenaWriter(file.fileno(), num_readers)
            self.readers = [ArenaReader(file.fileno(), i) for i in range(num_readers)]
        self.queues = [[] for _ in range(num_readers)]
        self.kept = []
        self.count = 0

    def unread(self):
        """Lines that some reader still needs."""
        lines = set()
        needed = [(written, data) for written, data, _ in self.kept]
        for written, data in [*itertools.chain(*self.queues), *needed]:
            first = written.position // LINE
            lines |= set(range(first, first + -(-len(data) // LINE)))
        return lines

    @rule(size=st.integers(1, 5000), num_chunks=st.integers(1, 3))
    def write(self, size, num_chunks):
        self.count += 1
        data = np.random.default_rng(self.count).integers(0, 256, size, np.uint8).tobytes()
        cuts = [len(data) * i // num_chunks for i in range(num_chunks + 1)]
        chunks = [data[a:b] for a, b in zip(cuts, cuts[1:]) if a < b]
        unread, lines = self.unread(), -(-size // LINE)
        places = range(self.capacity // LINE - lines + 1)
        fits = [i for i in places if unread.isdisjoint(range(i, i + lines))]
        written = self.writer.write(chunks, size)
        if not fits:
            assert written is None
            return
        assert written.position == fits[0] * LINE
        for queue in self.queues:
            queue.append((written, data))

    @precondition(lambda self: any(self.queues))
    @rule(choice=st.integers(0, 100))
    def read(self, choice):
        behind = [i for i, queue in enumerate(self.queues) if queue]
        index = behind[choice % len(behind)]
        written, data = self.queues[index].pop(0)
        assert self.readers[index].view(written.position, len(data)) == data
        self.readers[index].release(written.sequence)

    @precondition(lambda self: len(self.queues) == 1 and self.queues[0])
    @rule()
    def borrow(self):
        written, data = self.queues[0].pop(0)
        on_loan = sum(len(data) for _, data, _ in self.kept)
        array = self.readers[0].borrow(written.position, len(data), written.sequence)
        self.readers[0].release(written.sequence)
        assert (array is None) == (
            len(self.kept) == MAX_LOANS or on_loan + len(data) > self.capacity // 2
        )
        if array is not None:
            self.kept.append((written, data, array[len(data) // 2 :]))

    @precondition(lambda self: self.kept)
    @rule(choice=st.integers(0, 100))
    def give_back(self, choice):
        del self.kept[choice % len(self.kept)]

    @invariant()
    def nothing_on_loan_has_changed(self):
        for _, data, array in self.kept:
            assert array.tobytes() == data[len(data) // 2 :]

    @invariant()
    def nothing_unread_has_changed(self):
        for reader, queue in zip(self.readers, self.queues):
            for written, data in queue:
                assert reader.view(written.position, len(data)) == data


ArenaModel.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestArena = ArenaModel.TestCase


def test_what_nobody_reads_is_never_overwritten_and_the_writer_is_refused():
    with create_arena(4096) as file:
        writer, reader = ArenaWriter(file.fileno(), 2), ArenaReader(file.fileno(), 0)
    first = writer.write([b"a" * 3000], 3000)
    reader.release(first.sequence)
    assert writer.write([b"b" * 3000], 3000) is None
    assert writer.write([b"b" * 1000], 1000).position == 3008


def test_a_payload_that_was_never_announced_frees_with_the_next():
    with create_arena(4096) as file:
        writer, reader = ArenaWriter(file.fileno(), 1), ArenaReader(file.fileno())
    writer.write([b"lost" * 10], 40)
    reader.release(writer.write([b"c" * 100], 100).sequence)
    assert writer.write([b"d" * 4096], 4096).position == 0


def test_an_only_reader_keeps_no_more_payloads_than_there_are_loans():
    with create_arena(1 << 16) as file:
        writer, reader = ArenaWriter(file.fileno(), 1), ArenaReader(file.fileno())
    kept = []
    for _ in range(MAX_LOANS + 1):
        written = writer.write([b"x"], 1)
        kept.append(reader.borrow(written.position, 1, written.sequence))
        reader.release(written.sequence)
    assert kept.pop() is None
    kept[5] = None
    assert writer.write([b"y"], 1).position == 5 * LINE
    assert reader.borrow(0, 1, 0) is not None


def test_impossible_sizes_places_and_readers_are_refused():
    with pytest.raises(ValueError, match="0 bytes"):
        create_arena(0)
    with create_arena(1) as file:
        for num_readers in (0, MAX_READERS + 1):
            with pytest.raises(ValueError, match=f"not {num_readers}"):
                ArenaWriter(file.fileno(), num_readers)
        ArenaWriter(file.fileno(), MAX_READERS)
        reader = ArenaReader(file.fileno(), MAX_READERS - 1)
    for position, num_bytes in ((-1, 1), (4000, 97), (4097, 0), (0, -1), (0, 4097)):
        with pytest.raises(ValueError, match=f"{num_bytes} bytes at {position}"):
            reader.view(position, num_bytes)
    assert len(reader.view(4000, 96)) == 96


def test_memory_is_taken_only_where_something_was_written():
    with create_arena(1 << 30) as file:
        writer = ArenaWriter(file.fileno(), 1)
        writer.write([bytes(10_000)], 10_000)
        assert os.fstat(file.fileno()).st_blocks * 512 < 1 << 20


def test_nothing_is_left_when_both_ends_are_gone():
    def mappings():
        with open("/proc/self/maps", encoding="ascii") as maps:
            return sum("phalanx-arena" in line for line in maps)

    gc.collect()
    before, descriptors = mappings(), len(os.listdir("/proc/self/fd"))
    with create_arena(4096) as file:
        writer, reader = ArenaWriter(file.fileno(), 1), ArenaReader(file.fileno())
    view = reader.view(0, 10)
    assert mappings() == before + 2
    del writer, reader
    assert mappings() == before + 1
    del view
    assert (mappings(), len(os.listdir("/proc/self/fd"))) == (before, descriptors)
