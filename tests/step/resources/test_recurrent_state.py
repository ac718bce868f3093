"""Recurrent state: slots of fixed size, zeroed and counted, forked by copying, padded by the sink."""

from __future__ import annotations

import pytest
import torch

from phalanx.device.cpu import CpuBackend
from phalanx.errors import ConfigurationError
from phalanx.step.declaration import Fork, Segment, StepContext
from phalanx.step.lease import BucketKey, BufferClaim, SlotLease
from phalanx.step.outcomes import AllocationFailed, RequestOffloading
from phalanx.step.resources.base import BuildInfo
from phalanx.step.resources.recurrent_state import RecurrentStateSpec, StateBlock, StateStep

BLOCKS = {"recurrent": StateBlock((2, 3)), "convolution": StateBlock((4,), torch.float64)}


def make(max_slots=3, host=2):
    spec = RecurrentStateSpec("state", frozenset({"node"}), BLOCKS, 2, max_slots, host)
    state = spec.build(BuildInfo(CpuBackend()))
    for rid in "abcd":
        state.ingest_request(rid, None)
    return state


def step_of(*segments, **options) -> StateStep:
    return StateStep(tuple(Segment(*segment) for segment in segments), **options)


def begun(state, step, lease=None) -> StepContext:
    ctx = StepContext(tuple({one.request_id: None for one in step.segments}), "walk", lease)
    assert state.admit(step, ctx).ok
    ctx.plan_results["state"] = state.plan(step, ctx)
    state.begin(step, ctx)
    return ctx


def add(state, value: float, label: str = "main") -> None:
    """The forward: `value` onto every block of every row, more in the second layer."""
    state.select(label)
    for layer in range(2):
        here = state.next_layer()
        for name in BLOCKS:
            here.write(name, here.read(name) + value + layer)


def run(state, step, value: float, label: str = "main") -> None:
    ctx = begun(state, step)
    add(state, value, label)
    state.commit(step, ctx)


def numbers(state, rid, label="main") -> list[float]:
    """One number a layer, which all of a stream's blocks must hold."""
    blocks = state.contents(rid)[label]
    found = [whole[:, 0].flatten(1) for whole in blocks.values()]
    for values in found:
        assert (values == values[:, :1]).all()
        assert values[:, 0].tolist() == found[0][:, 0].tolist()
    return found[0][:, 0].tolist()


def test_tensors_have_a_block_for_every_layer_and_slot_and_one_for_the_sink():
    tensors = make().contents("a"), make()._storage.tensors
    assert tensors[0] == {}
    assert tensors[1]["recurrent"].shape == (2, 4, 2, 3)
    assert tensors[1]["convolution"].shape == (2, 4, 4)
    assert tensors[1]["convolution"].dtype is torch.float64


def test_state_goes_on_from_step_to_step():
    state = make()
    run(state, step_of(("a", 5), ("b", 1)), 1.0)
    run(state, step_of(("b", 1)), 10.0)
    assert numbers(state, "a") == [1.0, 2.0]
    assert numbers(state, "b") == [11.0, 13.0]


def test_a_row_knows_whether_it_has_state():
    state = make()
    run(state, step_of(("a", 1)), 1.0)
    ctx = begun(state, step_of(("b", 1), ("a", 1)))
    assert ctx.plan_results["state"].by_label["main"].has_state.tolist() == [False, True]
    assert state.next_layer().read("recurrent").flatten(1)[:, 0].tolist() == [0.0, 1.0]


def test_reading_alone_gives_no_state():
    state = make()
    ctx = begun(state, step_of(("a", 0)))
    state.commit(step_of(("a", 0)), ctx)
    assert not begun(state, step_of(("a", 1))).plan_results["state"].by_label["main"].has_state


@pytest.mark.parametrize("free", ["remove_request", "offload"])
def test_a_slot_is_cleared_by_the_next_holders_first_step_and_by_nobody_before(free):
    """Who frees a slot may be on another stream of the device than the steps."""
    state = make(max_slots=1)
    run(state, step_of(("a", 1)), 5.0)
    before = {name: tensor.clone() for name, tensor in state._storage.tensors.items()}
    getattr(state, free)("a")
    assert all(tensor.equal(before[name]) for name, tensor in state._storage.tensors.items())
    begun(state, step_of(("b", 1)))
    assert all(not tensor.any() for tensor in state._storage.tensors.values())


def test_exhaustion_is_a_refusal_of_one_slot():
    state = make()
    run(state, step_of(("a", 1), ("b", 1)), 1.0)
    outcome = state.admit(step_of(("c", 1), ("d", 1)), StepContext(("c", "d"), "walk"))
    assert isinstance(outcome.reason, AllocationFailed)
    assert (outcome.reason.pages_short, outcome.reason.request_id) == (1, "d")
    assert state.num_free_slots == 1
    assert state.fits({"a": 9, "b": 9, "c": 9})
    assert not state.fits({"c": 1, "d": 1})


def test_a_fork_is_a_copy():
    state = make()
    run(state, step_of(("a", 1)), 1.0)
    fork = Fork("a", "main", "branch")
    run(state, step_of(("a", 1, "branch"), pre_forks=(fork,)), 10.0, "branch")
    assert numbers(state, "a", "branch") == [11.0, 13.0]
    assert numbers(state, "a") == [1.0, 2.0], "the source is as it was"
    run(state, step_of(("a", 1), post_forks=(Fork("a", "main", "kept"),)), 100.0)
    assert numbers(state, "a", "kept") == numbers(state, "a") == [101.0, 103.0]
    assert state.num_free_slots == 0


def test_a_fork_is_copied_when_its_step_begins_and_not_when_it_is_planned():
    state = make()
    run(state, step_of(("a", 1)), 1.0)
    fork = Fork("a", "main", "branch")
    step, ctx = step_of(("a", 1, "branch"), pre_forks=(fork,)), StepContext(("a",), "walk")
    assert state.admit(step, ctx).ok
    ctx.plan_results["state"] = state.plan(step, ctx)
    assert numbers(state, "a", "branch") == [0.0, 0.0]
    assert ctx.plan_results["state"].by_label["branch"].has_state.tolist() == [True]
    state.begin(step, ctx)
    assert numbers(state, "a", "branch") == [1.0, 2.0]
    state.unadmit(step, ctx)
    assert list(state.contents("a")) == ["main"]
    assert state.num_free_slots == 2


def test_forks_follow_each_other():
    state = make()
    run(state, step_of(("a", 1)), 1.0)
    forks = (Fork("a", "main", "one"), Fork("a", "one", "two"))
    run(state, step_of(("a", 1, "two"), pre_forks=forks), 5.0, "two")
    assert numbers(state, "a", "one") == [1.0, 2.0]
    assert numbers(state, "a", "two") == [6.0, 8.0]


def test_what_a_failed_forward_wrote_is_undone_in_every_row():
    state = make()
    run(state, step_of(("a", 1)), 1.0)
    fork = Fork("a", "main", "branch")
    run(state, step_of(("a", 1, "branch"), pre_forks=(fork,)), 10.0, "branch")
    step = step_of(("a", 1), ("b", 1), pre_forks=(fork,))
    ctx = begun(state, step)
    add(state, 50.0)
    state.unadmit(step, ctx)
    assert numbers(state, "a") == [1.0, 2.0]
    assert numbers(state, "a", "branch") == [11.0, 13.0]
    assert state.contents("b") == {}
    run(state, step_of(("b", 1)), 1.0)
    assert numbers(state, "b") == [1.0, 2.0], "its slot was zeroed"


def test_a_request_that_left_in_its_step_gets_nothing_back():
    state = make(max_slots=2)
    run(state, step_of(("a", 1), ("b", 1)), 1.0)
    step = step_of(("a", 1), ("b", 1))
    ctx = begun(state, step)
    add(state, 50.0)
    state.remove_request("a")
    run(state, step_of(("c", 1)), 7.0)
    state.unadmit(step, ctx)
    assert numbers(state, "c") == [7.0, 8.0], "its slot was the one of the removed request"
    assert numbers(state, "b") == [1.0, 2.0]


def test_combined_labels_list_their_sources_one_after_another():
    state = make(max_slots=4)
    segments = (("a", 1), ("a", 1, "guide"), ("b", 1), ("b", 1, "guide"))
    step = step_of(*segments, combined_labels={"both": ("guide", "main")})
    ctx = begun(state, step)
    plan = ctx.plan_results["state"].by_label
    found = [(row.request_id, row.label) for row in plan["both"].rows]
    assert found == [("a", "guide"), ("b", "guide"), ("a", "main"), ("b", "main")]
    parts = plan["guide"].slots.tolist() + plan["main"].slots.tolist()
    assert plan["both"].slots.tolist() == parts


def test_a_request_on_the_host_cannot_step():
    state = make()
    run(state, step_of(("a", 1)), 1.0)
    assert state.offload("a") == 1
    reason = state.admit(step_of(("a", 1)), StepContext(("a",), "walk")).reason
    assert reason == RequestOffloading("its state is on the host", "a", "main")
    assert state.reload("a")
    assert numbers(state, "a") == [1.0, 2.0]


def test_what_the_host_has_no_room_for_stays():
    state = make(host=1)
    run(state, step_of(("a", 1)), 1.0)
    run(state, step_of(("a", 1, "branch"), pre_forks=(Fork("a", "main", "branch"),)), 4.0, "branch")
    assert state.offload("a") == 1
    assert (state.reclaimable("a"), state.is_offloaded("a")) == (1, True)
    run(state, step_of(("b", 1)), 1.0)
    assert state.offload("b") == 0
    assert not state.is_offloaded("b")
    assert state.reload("a")
    assert numbers(state, "a") == [1.0, 2.0]
    assert numbers(state, "a", "branch") == [5.0, 7.0]


def leased(state, step, rows=4, slot=0) -> StepContext:
    return begun(state, step, SlotLease(BucketKey("walk", rows, rows), slot))


def test_defect_8_6_13_padding_rows_take_no_slot_and_address_the_sink():
    state = make()
    state.claim_buffers(BufferClaim(num_slots=2, max_rows=4, max_tokens=4))
    run(state, step_of(("a", 1)), 1.0)
    step = step_of(("b", 1), ("a", 1))
    ctx = leased(state, step)
    plan = ctx.plan_results["state"].by_label["main"]
    assert plan.slots.tolist()[2:] == [0, 0]
    assert plan.has_state.tolist() == [False, True, False, False]
    add(state, 3.0)
    state.commit(step, ctx)
    assert state.num_free_slots == 1
    assert numbers(state, "a") == [4.0, 6.0]
    for rid in "abcd":
        state.remove_request(rid)
    assert state.at_rest()


def test_every_plan_of_a_slot_fills_the_same_buffers_to_the_end():
    state = make()
    state.claim_buffers(BufferClaim(num_slots=2, max_rows=4, max_tokens=4))
    first = leased(state, step_of(("a", 1), ("b", 1), ("c", 1))).plan_results["state"]
    second = leased(state, step_of(("a", 1))).plan_results["state"]
    other = leased(state, step_of(("b", 1)), slot=1).plan_results["state"]
    for name in ("slots", "has_state"):
        tensors = [getattr(plan.by_label["main"], name) for plan in (first, second, other)]
        assert tensors[0].data_ptr() == tensors[1].data_ptr() != tensors[2].data_ptr()
    assert second.by_label["main"].slots.tolist()[1:] == [0, 0, 0], "nobody's old slot is left"


def test_a_capture_has_its_labels_without_any_row():
    state = make()
    state.claim_buffers(BufferClaim(num_slots=1, max_rows=2, max_tokens=2))
    step = step_of(combined_labels={"both": ("main", "guide")}, labels=("main", "guide"))
    plan = leased(state, step, rows=2).plan_results["state"].by_label
    assert {label: rows.slots.tolist() for label, rows in plan.items()} == {
        "main": [0, 0],
        "guide": [0, 0],
        "both": [0, 0, 0, 0],
    }
    assert state.num_free_slots == 3


def test_captured_sources_of_a_combined_label_are_padded_each():
    state = make()
    state.claim_buffers(BufferClaim(num_slots=1, max_rows=2, max_tokens=2))
    step = step_of(("a", 1), ("a", 1, "guide"), combined_labels={"both": ("main", "guide")})
    plan = leased(state, step, rows=2).plan_results["state"].by_label
    one, other = plan["main"].slots[0].item(), plan["guide"].slots[0].item()
    assert plan["both"].slots.tolist() == [one, 0, other, 0]


@pytest.mark.parametrize(
    "options", [{"blocks": {}}, {"num_layers": 0}, {"max_slots": 0}], ids=lambda one: str(one)
)
def test_a_spec_of_nothing_is_refused(options):
    given = {"blocks": BLOCKS, "num_layers": 1, "max_slots": 1, **options}
    with pytest.raises(ConfigurationError, match="each must be at least 1"):
        RecurrentStateSpec("state", frozenset({"node"}), **given)
