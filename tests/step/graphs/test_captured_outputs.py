"""What a replay gives is the step's own, though captures share memory."""

from __future__ import annotations

import torch

from phalanx.device.cpu import CpuBackend
from phalanx.step.graphs.capturing import Captured


def test_a_later_replay_overwrites_no_outputs():
    x = torch.ones(2)
    graph = CpuBackend(capture="tape").create_graph()
    captured = Captured(graph, {"x": x}, {}, graph.capture(lambda: {"y": x + 1}))
    earlier = captured.replay()["y"]
    x.fill_(5.0)
    captured.replay()
    assert earlier.tolist() == [2.0, 2.0]
