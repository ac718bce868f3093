"""Operations over the ranks of one replica: all do the same, or none does anything."""

from __future__ import annotations

import pytest

from tests.models.operated import drive, save, save_changed, tiny_llama, weights_of
from tests.models.operated_in_each_rank import (
    WANTED,
    changed_on_one_rank,
    every_way,
    memory_of_the_slower_rank,
    no_room_on_one_rank,
    refusal_of_one_rank,
)
from tests.models.test_tensor_parallel import uneven
from tests.parallel.rank_pool import RankPool


@pytest.fixture(scope="module")
def two_ranks():
    pool = RankPool(2)
    yield pool
    pool.close()


def said_by_one_rank(directory):
    return drive(directory).run(WANTED)[0].completions[0].token_ids


@pytest.mark.parametrize("make", [pytest.param(tiny_llama, marks=pytest.mark.long), uneven])
def test_two_ranks_take_new_weights_as_one_does(two_ranks, tmp_path, make):
    first, second = (save(tmp_path / name, seed, make) for seed, name in enumerate("ab"))
    results = two_ranks.run(every_way, first, second)
    assert results[0] == results[1]
    tokens, read, different, same, _ = results[0]
    before, loaded, replaced, awaited, noise, back = tokens
    assert before == replaced == awaited == back == said_by_one_rank(first)
    assert loaded == said_by_one_rank(second) != before
    assert noise != before
    for name, tensor in weights_of(first).items():
        assert list(read[name].values) == tensor.flatten()[:200].tolist()
        assert read[name].shape == tuple(tensor.shape)
    assert set(different) == set(weights_of(first))
    assert same == ()


def test_what_one_rank_refuses_all_refuse(two_ranks, tmp_path):
    first = save(tmp_path / "a", 0)
    results = two_ranks.run(refusal_of_one_rank, first, [first, tmp_path / "nowhere"])
    assert results[0] == results[1]
    assert "nowhere" in results[0]


def test_a_wake_for_which_one_rank_has_no_room_leaves_all_asleep(two_ranks, tmp_path):
    first = save(tmp_path / "a", 0)
    results = two_ranks.run(no_room_on_one_rank, first)
    assert results[0] == results[1]
    message, asleep = results[0]
    assert "rank 1 has no room" in message
    assert asleep == ["cuda_graph", "kv_cache", "weights"]


def test_memory_is_free_on_all_ranks_when_a_sleep_returns_on_one(two_ranks, tmp_path):
    first = save(tmp_path / "a", 0)
    results = two_ranks.run(memory_of_the_slower_rank, first, tmp_path)
    assert results == [[True, True], [True, True]]


def test_all_ranks_wait_for_weights_that_one_cannot_bring_back(two_ranks, tmp_path):
    first = save(tmp_path / "a", 0)
    copies = [save_changed(first, tmp_path / name, lambda found: None) for name in ("x", "y")]
    other = save(tmp_path / "b", 1)
    assert two_ranks.run(changed_on_one_rank, copies, other) == [True, True]
