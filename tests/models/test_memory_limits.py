"""Memory that is not there when it is to be taken again, and where what is freed goes."""

from __future__ import annotations

from dataclasses import replace as changed

import pytest

from phalanx.device.cpu import CpuBackend
from phalanx.errors import RequestFailedError
from phalanx.schema.control import ALL_TAGS, MemoryTag, Sleep, Wake
from tests.models.driver import Drive, load
from tests.models.operated import answer, answer_of, drive, save

KV = frozenset({MemoryTag.KV_CACHE})


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    base = tmp_path_factory.mktemp("limits")
    return save(base / "a", 0), save(base / "b", 1)


def sleep(driven: Drive, tags=ALL_TAGS) -> None:
    assert driven.service.control(Sleep(tags))


def wake(driven: Drive, tags=ALL_TAGS) -> None:
    assert driven.service.control(Wake(tags))


class Watched(CpuBackend):
    """Counts how often what was freed is given back to the device, and notes what was held then."""

    def __init__(self):
        super().__init__()
        self.driven = None
        self.held = []

    def release_cached_memory(self):
        if self.driven is not None:
            storage = self.driven.service._cache._storage
            self.held.append((storage.released, self.driven.service.weights.packed_bytes))
        super().release_cached_memory()


def test_what_was_freed_goes_back_to_the_device_when_all_of_it_is_free(two):
    backend = Watched()
    driven = Drive(changed(load(two[0]), backend=backend), page_size=4)
    backend.driven = driven
    sleep(driven)
    sleep(driven)
    assert backend.held == [(True, 0)]


def test_what_weights_were_made_of_goes_back_to_the_device_when_they_are_there_again(two):
    backend = Watched()
    driven = Drive(changed(load(two[0]), backend=backend), page_size=4)
    packed_bytes = driven.service.weights.packed_bytes
    sleep(driven)
    backend.driven = driven
    wake(driven, KV)
    assert backend.held == []
    wake(driven, ALL_TAGS - KV)
    assert backend.held == [(False, packed_bytes)]


class ShortOfMemory(CpuBackend):
    """A device of which others have taken everything, while `short` is set."""

    short = False
    num_taken = 0

    def zeros(self, shape, dtype):
        if self.short:
            self.num_taken += 1
            if self.num_taken > 2:
                raise MemoryError(f"no room for {shape}")
        return super().zeros(shape, dtype)


def test_a_wake_without_room_says_so_and_leaves_all_asleep(two):
    backend = ShortOfMemory()
    driven = Drive(changed(load(two[0]), backend=backend), page_size=4)
    sleep(driven)
    backend.short = True
    for _ in range(2):
        backend.num_taken = 0
        with pytest.raises(RequestFailedError, match=r"no room for .*"):
            driven.service.control(Wake())
        assert driven.service.statistics().asleep == ALL_TAGS
        assert driven.service._cache._storage.released
        assert driven.service.weights.packed_bytes == 0
    backend.short = False
    wake(driven)
    assert answer(driven) == answer_of(two[0])


class NoRoomForWeights:
    """Operators that cannot pack a weight any more."""

    def pack_weight(self, weight, quantization):
        raise MemoryError("no room for a packed weight")


def test_a_wake_that_has_room_for_a_part_takes_none_of_it(two):
    driven = drive(two[0])
    weights, storage = driven.service.weights, driven.service._cache._storage
    sleep(driven)
    good, weights._operators = weights._operators, NoRoomForWeights()
    with pytest.raises(RequestFailedError, match="no room for a packed weight"):
        driven.service.control(Wake())
    assert driven.service.statistics().asleep == ALL_TAGS
    assert storage.released
    assert all(parameter.is_meta for parameter in driven.service._node.decoder.parameters())
    weights._operators = good
    wake(driven)
    assert answer(driven) == answer_of(two[0])


def test_host_memory_of_the_cache_goes_with_it(two):
    driven = drive(two[0], host_pool_tokens=64)
    host = driven.service._cache._host
    assert host._layers
    sleep(driven, KV)
    assert not host._layers
    wake(driven, KV)
    assert answer(driven) == answer_of(two[0])
