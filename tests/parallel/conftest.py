"""Pools of ranks, started once for all tests that use them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.rank_pool import RankPool


@pytest.fixture(scope="package")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="package")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
