"""Whole loops: against what diffusers computed, against a loop written out, alone and together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.layers.unipc import FlowSchedule, SchedulerConfig
from phalanx.models.cosmos3.answers import action_answer
from phalanx.models.cosmos3.building import nodes_of, specs_of
from phalanx.models.cosmos3.guidance import Guidance
from phalanx.models.cosmos3.request import DenoiseProgress
from phalanx.models.cosmos3.row import MediaRequest
from phalanx.testing import ModelParts, SubmoduleCase, check_submodule
from tests.models.cosmos3.loops import (
    LOOPS,
    MODALITIES,
    TOLERANCE,
    Drive,
    Loop,
    args_of,
    errors,
    final,
    largest,
    model_of,
    same,
)
from tests.models.cosmos3.plain import plain_loop
from tests.models.cosmos3.random_rows import rows

POLICY = Loop("loop_policy")
ALONE = 1e-4
"""How far one float32 loop may be from another that adds in another order."""


@pytest.fixture(scope="module")
def model(folders):
    return model_of(folders["silu"])


@pytest.mark.parametrize("name", LOOPS)
def test_r19_every_tensor_of_every_stored_loop(model, name):
    loop = Loop(name)
    drive = Drive(model)
    row = drive.start("row", loop.inputs(), traced=True)
    begun = row.turn().media
    for theirs, ours in MODALITIES.items():
        stored = loop.stored(0, "latents_in", theirs)
        if stored is not None:
            assert torch.equal(getattr(begun, ours), stored)
    drive.finish()
    found = errors(loop, row)
    assert len(found) >= 3 * loop.num_steps
    assert max(found.values()) < TOLERANCE, found
    assert torch.equal(row.inputs.schedule.sigmas, loop.io["sigmas"])
    assert torch.equal(row.inputs.schedule.timesteps, loop.io["timesteps"])


def test_what_is_computed_twice_is_equal_to_the_bit(model):
    """By two services, each of several requests together."""
    inputs = [Loop(name).inputs() for name in LOOPS]
    first, second = (Drive(model, max_batch_size=8, max_tokens=256).run(*inputs) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(part, final(other)[name]) for name, part in final(one).items())


def test_requests_of_all_kinds_share_their_steps_and_each_is_as_alone(model):
    """Of other sizes, step counts, schedules and guidance; some with sound, some with actions."""
    inputs = [Loop(name).inputs() for name in LOOPS]
    inputs[1] = replace(inputs[1], schedule=FlowSchedule.karras(SchedulerConfig(), 6))
    drive = Drive(model, max_batch_size=8, max_tokens=256)
    together = drive.run(*inputs, traced=True)
    # One step reads all texts; of six steps of the longest, four are shared by nearly all.
    assert drive.batches == [7, 7, 7, 7, 6, 1, 1]
    assert drive.nodes["denoise"].num_forwards == 6
    for name, row in zip(LOOPS, together, strict=True):
        (alone,) = Drive(model).run(row.inputs)
        same(row, alone, ALONE)
        if name != LOOPS[1]:
            assert max(errors(Loop(name), row).values()) < TOLERANCE


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(rows(), min_size=1, max_size=3))
def test_any_requests_come_to_what_a_plain_loop_comes_to(model, inputs):
    _check_against_plain_loops(model, inputs)


@pytest.mark.long
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(rows(), min_size=1, max_size=4))
def test_many_requests_come_to_what_a_plain_loop_comes_to(model, inputs):
    _check_against_plain_loops(model, inputs)


def _check_against_plain_loops(model, inputs) -> None:
    found = Drive(model, max_tokens=96).run(*inputs)
    for row in found:
        expected = plain_loop(model.transformer, row.inputs)
        for name, latents in final(row).items():
            scale = 1 + largest(expected[name])
            assert largest(latents - expected[name]) < TOLERANCE * scale, name


@pytest.mark.parametrize("loop", [Loop("loop_t2v_sound"), POLICY], ids=str)
def test_the_other_family_comes_to_what_a_plain_loop_comes_to(folders, loop):
    """Its text reads other keys than media do, so nothing of it is shared."""
    model = model_of(folders["relu2"])
    drive, long = Drive(model), tuple(range(40))
    inputs = loop.inputs(prompt=long, negative=long[20:])
    (first,), (second,) = drive.run(inputs), drive.run(inputs)
    expected = plain_loop(model.transformer, first.inputs)
    for name, latents in final(first).items():
        assert largest(latents - expected[name]) < TOLERANCE
    same(first, second)
    assert drive.nodes["text"].num_found == 0


def test_r91_a_text_is_read_once_and_not_again_by_steps_or_by_requests(model):
    long = tuple(range(40))
    inputs = POLICY.inputs(prompt=long, negative=long[20:])
    drive = Drive(model)
    (first,) = drive.run(inputs)
    text = drive.nodes["text"]
    assert (text.num_read, text.num_found) == (60, 0)  # both branches, not once a step
    (second,) = drive.run(inputs)
    # Of each text all whole pages of 16 tokens are there: 32 of 40, and 16 of 20.
    assert (text.num_read, text.num_found) == (72, 48)
    same(first, second)
    (third,) = drive.run(replace(inputs, prompt=(95, *long), negative=long))
    # The negative prompt is now what the prompt was.
    assert (text.num_read, text.num_found) == (72 + 41 + 8, 48 + 32)
    (alone,) = Drive(model).run(third.inputs)
    same(third, alone)


def test_what_was_read_is_kept_with_room_for_other_requests_and_forgotten_when_asked(model):
    long = tuple(range(40))
    inputs = POLICY.inputs(prompt=long, negative=long[20:])
    drive = Drive(model)
    drive.run(inputs)
    assert drive.service.statistics().pool_cached_tokens == 48
    drive.service._engine.prefixes.forget()
    drive.run(inputs)
    assert drive.nodes["text"].num_found == 0


def test_an_interval_guides_five_passes_of_four_steps(model):
    """Those of the first step: both branches; and of three more one each."""
    guidance = Guidance(3.0, (960, 1001))
    tokens = POLICY.inputs().shape.num_tokens
    drive = Drive(model)
    (row,) = drive.run(POLICY.inputs(guidance=guidance), traced=True)
    assert (
        drive.nodes["denoise"].num_tokens == Loop("loop_policy_interval").case["forwards"] * tokens
    )
    assert [("away.vision" in step) for step in row.trace] == [True, False, False, False]
    expected = plain_loop(model.transformer, row.inputs)
    for name, latents in final(row).items():
        assert largest(latents - expected[name]) < TOLERANCE


@pytest.mark.parametrize(("low", "high"), [(999, 999), (833, 833), (999, 1001), (0, 998)])
def test_both_ends_of_an_interval_are_in_it(low, high):
    guidance = Guidance(3.0, (low, high))
    for timestep in POLICY.io["timesteps"].tolist():
        assert guidance.guides_at(timestep) == (low <= timestep <= high)
    assert not Guidance(1.0, (low, high)).guides_at(low)


def test_without_guidance_there_is_one_branch(model):
    inputs = POLICY.inputs(guidance=Guidance(1.0), negative=None)
    drive = Drive(model)
    drive.run(inputs)
    assert drive.nodes["denoise"].num_tokens == 4 * inputs.shape.num_tokens
    assert drive.nodes["text"].num_read == len(inputs.prompt)


def test_each_step_is_reported_with_its_timestep(model):
    drive = Drive(model)
    (row,) = drive.run(POLICY.inputs())
    timesteps = POLICY.io["timesteps"].tolist()
    assert drive.deltas["row 0"] == [
        DenoiseProgress(at + 1, 4, timestep) for at, timestep in enumerate(timesteps)
    ]
    assert row.next_work() is None


@pytest.mark.parametrize("num_ticks", range(6))
def test_a_request_is_cancelled_at_any_step_and_its_neighbour_goes_on(model, num_ticks):
    drive = Drive(model, max_tokens=64)
    cut = drive.start("cut", Loop("loop_t2v").inputs())
    other = drive.start("other", POLICY.inputs())
    for _ in range(num_ticks):
        drive.tick()
    ended = drive.service.busy and "cut" not in drive.ended
    drive.service.cancel("cut")
    drive.finish()
    assert drive.ended["cut"].cancelled == ended
    assert len(drive.deltas["cut"]) == max(0, min(num_ticks - 1, 4))
    assert final(cut)["vision"].shape == (6, 3, 3, 4)
    (alone,) = Drive(model).run(POLICY.inputs())
    same(other, alone)


@pytest.mark.parametrize("num_ticks", range(5))
def test_actions_of_a_cancelled_request_are_no_numbers(model, num_ticks):
    drive = Drive(model)
    cut = drive.start("cut", POLICY.inputs())
    for _ in range(num_ticks):
        drive.tick()
    drive.service.cancel("cut")
    drive.finish()
    action = action_answer(cut).action
    assert action is not None
    assert not cut.is_denoised
    assert bool(action.isnan().all())


@pytest.mark.parametrize("num_ticks", range(5))
def test_a_request_that_is_pushed_back_at_any_step_begins_again(model, num_ticks):
    drive = Drive(model)
    rows = [drive.start(name, Loop(name).inputs(), traced=True) for name in LOOPS[:3]]
    for _ in range(num_ticks):
        drive.tick()
    drive.service._loop.push_back_all()
    drive.finish()
    for name, row in zip(LOOPS, rows, strict=False):
        assert max(errors(Loop(name), row).values()) < TOLERANCE


class ListedRow(MediaRequest):
    """A row whose output is compared number by number."""

    def output(self, *, cancelled):
        return {name: part.tolist() for name, part in final(self).items()}


@pytest.mark.long
@pytest.mark.parametrize("family", ["silu", "relu2"])
def test_the_nodes_pass_the_check(folders, family):
    model = model_of(folders[family])
    inputs = [Loop(name).inputs() for name in ("loop_policy", "loop_t2v_sound", "loop_t2i")]
    inputs.append(POLICY.inputs(prompt=tuple(range(40)), guidance=Guidance(3.0, (960, 1001))))
    args = args_of("unused", max_batch_size=8)

    def parts() -> ModelParts:
        return ModelParts(nodes_of(model, 8), tuple(specs_of(model, args)))

    requests = [partial(ListedRow, one) for one in inputs]
    check_submodule(SubmoduleCase(parts, requests, tolerance=2e-5, capture="off"))
