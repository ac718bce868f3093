from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_thread():
    # pytest reads this file before all others, also in the process that runs no test.
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
