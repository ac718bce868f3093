"""Tensors of one's own: what a request starts with, and what its steps make of it."""

from __future__ import annotations

import pytest
import torch

from phalanx.device.cpu import CpuBackend
from phalanx.errors import ConfigurationError
from phalanx.step.resources.base import BuildInfo
from phalanx.step.resources.slot_state import SlotStateConfig, SlotStateSpec, StateBlock
from tests.step.resources.test_recurrent_state import begun, step_of

TENSORS = {"latent": StateBlock((2,)), "count": StateBlock((), torch.int64)}


@pytest.fixture
def state():
    made = SlotStateSpec("state", frozenset({"node"}), TENSORS, max_slots=3).build(
        BuildInfo(CpuBackend())
    )
    made.ingest_request("a", SlotStateConfig({"latent": torch.tensor([4.0, 5.0])}))
    made.ingest_request("b", None)
    return made


def run(state, *rids) -> None:
    step = step_of(*((rid, 1) for rid in rids))
    ctx = begun(state, step)
    state.write("latent", state.read("latent") * 2)
    state.write("count", state.read("count") + 1)
    state.commit(step, ctx)


def latent(state, rid) -> list[float]:
    return state.contents(rid)["main"]["latent"][0].tolist()


def test_tensors_have_one_slot_more_than_requests(state):
    assert state.tensor("latent").shape == (4, 2)
    assert state.tensor("count").shape == (4,)


def test_a_request_starts_with_what_it_was_given(state):
    run(state, "a", "b")
    assert latent(state, "a") == [8.0, 10.0]
    assert latent(state, "b") == [0.0, 0.0]
    run(state, "b", "a")
    assert latent(state, "a") == [16.0, 20.0]
    assert state.contents("a")["main"]["count"].tolist() == [2]


def test_a_step_given_up_starts_again_from_it(state):
    step = step_of(("a", 1))
    ctx = begun(state, step)
    state.write("latent", state.read("latent") * 100)
    state.unadmit(step, ctx)
    run(state, "a")
    assert latent(state, "a") == [8.0, 10.0]


def test_defect_8_6_15_a_second_ingest_does_not_start_again(state):
    run(state, "a")
    state.ingest_request("a", SlotStateConfig({"latent": torch.tensor([1.0, 1.0])}))
    run(state, "a")
    assert latent(state, "a") == [16.0, 20.0]


@pytest.mark.parametrize("name, shape", [("latent", (3,)), ("other", (2,))])
def test_what_does_not_fit_is_refused(state, name, shape):
    with pytest.raises(ConfigurationError, match=f"initial '{name}' of shape .*'latent': \\(2,\\)"):
        state.ingest_request("c", SlotStateConfig({name: torch.zeros(shape)}))


def test_a_spec_without_tensors_is_refused():
    with pytest.raises(ConfigurationError, match="0 tensors and 3 slots"):
        SlotStateSpec("state", frozenset({"node"}), {}, max_slots=3)
