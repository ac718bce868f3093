"""Whole loops against what diffusers computed, step by step."""

from __future__ import annotations

import pytest
import torch

from tests.models.cosmos3.loops import LOOPS, TOLERANCE, Drive, Loop, errors, model_of


@pytest.fixture(scope="module")
def model(folders):
    return model_of(folders["silu"])


@pytest.mark.parametrize("name", LOOPS)
def test_r19_every_tensor_of_every_stored_loop(model, name):
    loop = Loop(name)
    (row,) = Drive(model).run(loop.inputs(), traced=True)
    found = errors(loop, row)
    assert len(found) >= 3 * loop.num_steps
    assert max(found.values()) < TOLERANCE, found
    assert torch.equal(row.inputs.schedule.sigmas, loop.io["sigmas"])
    assert torch.equal(row.inputs.schedule.timesteps, loop.io["timesteps"])
