"""A row whose forward fails, after it has written its state in place, ends alone."""

from __future__ import annotations

import pytest
import torch

from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.schema.events import Failed, Final
from phalanx.testing import ModelParts
from phalanx.testing.watched_node import FaultStage, NodeFault, StruckError, watched
from tests.testing.models import CASES


def ended(case, fault: NodeFault | None, requests):
    parts = case.parts()
    nodes = {name: watched(node, fault=fault) for name, node in parts.submodules.items()}
    engine = ModelParts(nodes, parts.specs).engine()
    loop = StepLoop(engine, Budget(256, 8))
    for rid, request in requests.items():
        loop.start(rid, request())
    found = {}
    while loop.busy:
        events = loop.tick()
        found |= {event.rid: event for event in events if isinstance(event, (Final, Failed))}
    assert engine.at_rest()
    return found, sum(node.num_shared for node in nodes.values())


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("name", ["recurrent", "guided flow", "encoder-decoder"])
def test_defect_8_6_9_a_failed_forward_is_not_its_neighbours_fault(name, after):
    case = CASES[name]
    requests = {f"r{index}": request for index, request in enumerate(case.requests)}
    well, _ = ended(case, None, requests)
    found, num_shared = ended(case, NodeFault("r1", FaultStage.FORWARD, after), requests)
    assert num_shared > 0, "nobody shared a forward"
    failed = found.pop("r1")
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, StruckError)
    for rid, event in found.items():
        torch.testing.assert_close(event.payload, well[rid].payload, rtol=1e-5, atol=1e-5)
