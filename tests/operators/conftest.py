from __future__ import annotations

import pytest
import torch

from phalanx.device.operators import create_operators


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["off", "required"], ids=["torch", "native"])
def operators(request):
    return create_operators(request.param, "cpu", torch.float32)
