from __future__ import annotations

import pytest
import torch

from tests.loop.ledger import Bench, bench_of
from tests.loop.threaded import ThreadedLoop


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def benches():
    """Makes benches whose loops look ahead, and closes them."""
    made: list[Bench] = []

    def make(*args, **options) -> Bench:
        made.append(bench_of(*args, kind=ThreadedLoop, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.loop.close()
