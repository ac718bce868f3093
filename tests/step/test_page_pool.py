from __future__ import annotations

import pytest

from phalanx.step.resources.page_pool import SINK_PAGE, PagePool


def test_hands_out_every_page_but_the_sink_once():
    pool = PagePool(5)
    taken = pool.take(2) + pool.take(3)
    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert SINK_PAGE not in taken
    assert pool.num_free == 0


def test_the_pages_given_back_last_are_taken_first_in_their_order():
    pool = PagePool(3)
    pool.take(3)
    pool.give_back([2])
    pool.give_back([3, 1])
    assert pool.take(3) == [3, 1, 2]


def test_more_than_there_is_is_our_own_mistake():
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="3 pages wanted, 2 free"):
        pool.take(3)
    assert pool.num_free == 2


def test_nothing_of_nothing():
    pool = PagePool(2)
    assert pool.take(0) == []
    pool.give_back([])
    assert pool.num_free == pool.num_pages == 2
