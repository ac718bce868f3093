"""The nodes pass the check that a plugin author runs on their own, captured steps included."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from phalanx.models.pi.building import nodes_of, specs_of
from phalanx.models.pi.request import RealTimeChunking
from phalanx.models.pi.row import PolicyRow
from phalanx.models.pi.row_maker import RowMaker
from phalanx.testing import ModelParts, SubmoduleCase, check_submodule
from tests.models.pi.stored import loaded, request, stored

ROWS = 6


class ListedRow(PolicyRow):
    """A row whose output is compared number by number."""

    def output(self, *, cancelled):
        return super().output(cancelled=cancelled).tolist()


@pytest.mark.long
@pytest.mark.parametrize("name", ["pi05_micro_f32", "pi0_tiny_f32"])
@pytest.mark.parametrize("operators", ["off", "auto"])
def test_the_nodes_of_a_policy_pass_the_check(name, operators):
    policy = loaded(name, operators)
    old = stored(name)["rtc.prev_chunk_left_over"]
    maker = RowMaker(policy.model.geometry, policy.backend.device, torch.Generator().manual_seed(0))

    def rows(asked):
        return maker.make(asked, asked.state if name.startswith("pi0_") else None)

    given = request(name, num_steps=3)
    guided = replace(given, rtc=RealTimeChunking(old, inference_delay=2, execution_horizon=6))
    kept = replace(given, num_steps=2, rtc=RealTimeChunking(old, 3, mode="trained"))
    inputs = [*rows(given), rows(guided)[0], rows(kept)[1]]
    tokens = policy.model.geometry.image_tokens

    def parts() -> ModelParts:
        return ModelParts(nodes_of(policy, ROWS), tuple(specs_of(policy, ROWS)))

    capture = "tape" if policy.operators.capturable else "off"
    requests = [partial(ListedRow, one, tokens) for one in inputs]
    check_submodule(SubmoduleCase(parts, requests, tolerance=5e-6, capture=capture))
