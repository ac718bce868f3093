"""Rows of different requests share forwards, whatever differs between them, and come out as alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.models.pi.building import nodes_of
from phalanx.models.pi.expert_node import ExpertNode
from phalanx.models.pi.prefix_nodes import PrefixNode, VisionNode
from phalanx.models.pi.request import RealTimeChunking
from phalanx.models.pi.row import EXPERT_NODE, PREFIX_NODE, VISION_NODE
from tests.models.pi.stored import close, loaded, request, run, stored


def row_of(asked, at: int, **changed):
    """One row of a request of two."""
    fields = {
        name: getattr(asked, name)[at : at + 1]
        for name in ("pixel_values", "input_ids", "lang_lens", "noise")
    }
    masks = asked.image_masks
    fields["image_masks"] = None if masks is None else masks[at : at + 1]
    if hasattr(asked, "state"):
        fields["state"] = asked.state[at : at + 1]
    return replace(asked, **{**fields, **changed})


def mixed(name: str):
    """Other cameras, prompts, numbers of steps and old chunks in each."""
    both, old = request(name), stored(name)["rtc.prev_chunk_left_over"]
    cameras = both.pixel_values.shape[1]
    only_first = torch.zeros(1, cameras, dtype=torch.bool)
    only_first[:, 0] = True
    blind = torch.zeros(1, cameras, dtype=torch.bool)
    return [
        row_of(both, 0),
        row_of(both, 1, num_steps=4),
        row_of(both, 0, image_masks=only_first, lang_lens=torch.tensor([5]), num_steps=7),
        row_of(both, 1, image_masks=blind, num_steps=3),
        row_of(both, 1, rtc=RealTimeChunking(old[1:], inference_delay=2, execution_horizon=6)),
        row_of(both, 0, rtc=RealTimeChunking(old[:1], inference_delay=3, mode="trained")),
    ]


@pytest.mark.parametrize("operators", ["off", "auto"])
@pytest.mark.parametrize("name", ["pi05_micro_f32", "pi0_tiny_f32"])
def test_a_batch_of_mixed_requests_equals_singles(name, operators):
    policy, asked = loaded(name, operators), mixed(name)
    together = run(policy, *asked).finish()
    for one, found in zip(asked, together, strict=True):
        (alone,) = run(policy, one).finish()
        close(found, alone)


def test_rows_that_arrive_together_share_each_forward():
    policy = loaded("pi05_micro_f32")
    calls: list[tuple[str, int]] = []

    class Seeing(VisionNode):
        def preprocess(self, engine, inputs):
            calls.append((engine.walk, len(inputs)))
            return super().preprocess(engine, inputs)

    class Reading(PrefixNode):
        def preprocess(self, engine, inputs):
            calls.append((engine.walk, len(inputs)))
            return super().preprocess(engine, inputs)

    class Denoising(ExpertNode):
        def preprocess(self, engine, inputs):
            calls.append((engine.walk, len(inputs)))
            return super().preprocess(engine, inputs)

    own = {VISION_NODE: Seeing, PREFIX_NODE: Reading, EXPERT_NODE: Denoising}
    nodes = {name: node(policy.model, policy.backend) for name, node in own.items()}
    assert nodes.keys() == nodes_of(policy).keys()
    asked = mixed("pi05_micro_f32")
    run(policy, *asked, nodes=nodes).finish()
    assert calls[:3] == [("see", 5), ("read", 6), ("denoise", 6)]
    assert [count for walk, count in calls[3:]] == [6, 6, 5, 4, 4, 4, 3, 3, 3]


def test_a_row_that_comes_later_joins_at_its_own_time():
    policy = loaded("pi05_micro_f32")
    first, second = (row_of(request("pi05_micro_f32"), at) for at in range(2))
    running = run(policy, first, second)
    # The second one waits outside while the first has begun to denoise.
    late = running.rows[1]
    running.loop.cancel("1")
    for _ in range(5):
        running.loop.tick()
    assert 1 <= len(running.rows[0].velocities) < 10
    running.loop.start("1", late)
    outputs = running.finish()
    for at, one in enumerate((first, second)):
        close(outputs[at], run(policy, one).finish()[0])


def test_a_row_that_is_pushed_back_is_computed_again():
    policy, asked = loaded("pi0_tiny_f32"), request("pi0_tiny_f32")
    running = run(policy, asked)
    for _ in range(6):
        running.loop.tick()
    running.loop.push_back_all()
    plain = run(policy, asked).finish()
    for found, expected in zip(running.finish(), plain, strict=True):
        close(found, expected)
    assert running.engine.at_rest()
