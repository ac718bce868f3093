"""Captured steps give what eager ones give: plain, guided and drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from phalanx.device.cpu import CpuBackend
from phalanx.layers.linear import Linear
from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.models.pi.building import build_engine, nodes_of
from phalanx.models.pi.request import RealTimeChunking
from phalanx.models.pi.row import PolicyRow
from phalanx.models.pi.row_maker import RowMaker
from phalanx.models.pi05.entry import PI05
from phalanx.models.pi05.expert import PI05Expert
from phalanx.schema.events import Final
from tests.models.pi.stored import checkpoint, close, load, request, stored

NAME = "pi05_micro_f32"
ROWS = 3


class CountedExpert(PI05Expert):
    """With a value head; counts how often it is called, which a replayed step does not do."""

    def __init__(self, geometry, dtype, operators) -> None:
        super().__init__(geometry, dtype, operators, value_from="suffix")
        self.num_calls = 0

    def velocity(self, hidden):
        self.num_calls += 1
        return super().velocity(hidden)


@pytest.fixture(scope="module")
def policy():
    return load(NAME, replace(PI05, make_expert=CountedExpert))


def engine_of(policy, capture: str):
    captured = replace(policy, backend=CpuBackend(capture=capture))
    nodes = nodes_of(captured, ROWS, captures_rollouts=True)
    return build_engine(captured, nodes, ROWS)


def outputs(policy, inputs, capture: str, *, replays: bool = True, engine=None):
    """What rows come to, by an engine whose steps are captured or not."""
    engine = engine or engine_of(policy, capture)
    before = policy.model.expert.num_calls
    loop = StepLoop(engine, Budget(ROWS * policy.model.max_tokens, ROWS))
    for at, one in enumerate(inputs):
        loop.start(str(at), PolicyRow(one, policy.model.geometry.image_tokens))
    found = {}
    while loop.busy:
        found.update((one.rid, one.payload) for one in loop.tick() if isinstance(one, Final))
    assert engine.at_rest()
    replayed = policy.model.expert.num_calls == before
    assert replayed == (replays and capture == "tape")
    return [found[str(at)] for at in range(len(inputs))]


def maker(policy) -> RowMaker:
    generator = torch.Generator().manual_seed(0)
    return RowMaker(policy.model.geometry, policy.backend.device, generator)


def test_plain_and_guided_rows(policy):
    rtc = RealTimeChunking(stored(NAME)["rtc.prev_chunk_left_over"], 2, execution_horizon=6)
    rows = maker(policy).make(request(NAME))
    rows.append(maker(policy).make(request(NAME, rtc=rtc))[1])
    eager, captured = (outputs(policy, rows, capture) for capture in ("off", "tape"))
    for one, other in zip(eager, captured, strict=True):
        close(other, one)


@pytest.mark.parametrize("with_values", [True, False])
def test_rollouts(policy, with_values):
    noise = torch.randn(2, 3, 10, 32, generator=torch.Generator().manual_seed(1))
    sigmas = torch.tensor([[0.3, 0.2, 0.0], [0.1, 0.1, 0.1]])
    rows = maker(policy).make_rollout(request(NAME), sigmas, noise, with_values=with_values)
    eager, captured = (outputs(policy, rows, capture) for capture in ("off", "tape"))
    for one, other in zip(eager, captured, strict=True):
        close(other.chain, one.chain)
        close(other.log_probs, one.log_probs, 1e-4)
        assert (other.values is None) == (one.values is None) == (not with_values)
        if with_values:
            close(other.values, one.values)


def test_rows_of_both_kinds_together_are_computed_eagerly(policy):
    noise = torch.zeros(2, 3, 10, 32)
    drawn = maker(policy).make_rollout(
        request(NAME), torch.full((2, 3), 0.1), noise, with_values=False
    )
    rows = [drawn[0], maker(policy).make(request(NAME))[1]]
    eager, captured = (outputs(policy, rows, capture, replays=False) for capture in ("off", "tape"))
    close(captured[0].chain, eager[0].chain)
    close(captured[1], eager[1])


def test_captured_steps_compute_with_new_weights():
    policy = load(NAME, replace(PI05, make_expert=CountedExpert))
    for linear in policy.model.modules():
        if isinstance(linear, Linear):
            linear.unpack()  # as on a device that captures: none of those packs
    rows = maker(policy).make(request(NAME))
    engine = engine_of(policy, "tape")
    old = outputs(policy, rows, "tape", engine=engine)
    tensors = load_file(checkpoint(NAME) / "model.safetensors")
    changed = {name: 1.1 * one for name, one in tensors.items()}
    policy.weights.replace(changed)
    new = outputs(policy, rows, "tape", engine=engine)
    fresh = load(NAME, replace(PI05, make_expert=CountedExpert))
    fresh.weights.replace(changed)
    for was, found, eager in zip(old, new, outputs(fresh, rows, "off"), strict=True):
        assert not torch.allclose(found, was)
        close(found, eager)
