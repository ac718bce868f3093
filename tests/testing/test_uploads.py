"""Host values are staged once: whoever hands an array to the device never writes to it again.

A device may copy at any time after the call, so that a reused host buffer would show the next
step's values in this one's plan.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.device.cpu import CpuBackend
from phalanx.loop.pipelined_loop import PipelinedLoop
from phalanx.loop.scheduler import Budget
from tests.testing.models import CASES


class Remembering(CpuBackend):
    """Copies at once, and keeps what arrays held then."""

    def __init__(self, capture: str) -> None:
        super().__init__(capture=capture)
        self.uploads = []

    def upload(self, values):
        copied = values.copy()
        self.uploads.append((values, copied))
        return torch.from_numpy(copied)


@pytest.mark.parametrize("capture", ["off", "tape"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "stateless"])
def test_nothing_that_was_uploaded_is_written_to_again(name, capture):
    case = CASES[name]
    backend = Remembering(capture)
    engine = case.parts().engine(backend)
    engine.warm_up()
    loop = PipelinedLoop(engine, Budget(16, 8))
    events = []
    for index, request in enumerate(case.requests):
        loop.start(f"r{index}", request())
        events += loop.tick()
    while loop.busy:
        events += loop.tick()
    loop.close()
    assert [event for event in events if hasattr(event, "error")] == []
    assert len(backend.uploads) > 10
    for values, copied in backend.uploads:
        np.testing.assert_array_equal(values, copied)
    assert engine.at_rest()
