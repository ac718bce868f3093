"""The tolerance of loops is narrow enough: each mistake that a port can make exceeds it.

The errors next to each mistake are known, so that it is the one that is meant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from phalanx.layers.unipc import FlowSchedule, SchedulerConfig, UniPCSolver, UniPCState
from phalanx.models.cosmos3.denoise_node import DenoiseNode
from phalanx.models.cosmos3.geometry import media_positions
from phalanx.models.cosmos3.guidance import Guidance
from phalanx.models.cosmos3.row import ACTIONS, VISION, DenoiseTurn, MediaRequest, RowInputs
from phalanx.schema.events import Failed
from tests.models.cosmos3.loops import TOLERANCE, Drive, Loop, final, largest, model_of

T2V, I2V, POLICY = Loop("loop_t2v"), Loop("loop_i2v_karras"), Loop("loop_policy")


@pytest.fixture(scope="module")
def model(folders):
    return model_of(folders["silu"])


def worst(loop: Loop, row: MediaRequest) -> list[float]:
    """The largest errors of the last latents: of vision, and of actions where there are some."""
    found, last = final(row), loop.num_steps - 1
    theirs = {VISION: loop.stored(last, "latents", "vision")}
    if ACTIONS in found:
        theirs[ACTIONS] = loop.stored(last, "latents", "action")
    return [largest(found[name] - part) for name, part in theirs.items()]


def check(found: list[float], known: list[float]) -> None:
    assert min(found) > 5 * TOLERANCE
    assert found == pytest.approx(known, rel=0.06)


class Euler(UniPCSolver):
    def step(self, state, at, velocity, sample):
        sigmas = self._sigmas
        return sample + (sigmas[at + 1] - sigmas[at]) * velocity, UniPCState(sample, sample)


class Uncorrected(UniPCSolver):
    def step(self, state, at, velocity, sample):
        return super().step(replace(state, begun=None), at, velocity, sample)


class Wide(UniPCSolver):
    """In float64: no mistake."""

    def step(self, state, at, velocity, sample):
        sample, after = super().step(state, at, velocity.double(), sample.double())
        return sample.float(), after


def solved(solver: type[UniPCSolver]) -> type[MediaRequest]:
    class Solved(MediaRequest):
        def __init__(self, inputs: RowInputs, num_branches: int) -> None:
            super().__init__(inputs, num_branches)
            self._solver = solver(inputs.schedule)

    return Solved


class FloatTime(MediaRequest):
    def turn(self) -> DenoiseTurn:
        turn = super().turn()
        time = self._time(turn.at)
        return replace(turn, media=replace(turn.media, timestep=time))

    def _time(self, at: int) -> float:
        return float(self.inputs.schedule.sigmas[at]) * 1000


class OnePlace(DenoiseTurn):
    def context(self, label: str) -> int:
        return len(self.inputs.prompt)


class OnePlaceRow(MediaRequest):
    def turn(self) -> DenoiseTurn:
        turn = super().turn()
        return OnePlace(*(getattr(turn, name) for name in DenoiseTurn.__dataclass_fields__))


class OneState(MediaRequest):
    """One solver for all modalities."""

    def turn(self) -> DenoiseTurn:
        turn = super().turn()
        first = next(iter(turn.states.values()))
        return replace(turn, states=dict.fromkeys(turn.states, first))


def karras(loop: Loop) -> FlowSchedule:
    return FlowSchedule.karras(SchedulerConfig(), loop.num_steps)


@dataclass(frozen=True)
class Mistake:
    """What is wrong, by loop, and the errors that it makes there."""

    name: str
    known: dict[Loop, list[float]]
    changes: Callable[[Loop], dict] = lambda loop: {}
    row: type[MediaRequest] = MediaRequest

    def __str__(self) -> str:
        return self.name


def swapped(loop: Loop) -> dict:
    right = loop.inputs()
    return {"prompt": right.negative, "negative": right.prompt}


MISTAKES = [
    Mistake("Euler", {T2V: [1.13], I2V: [4.51], POLICY: [0.31, 0.23]}, row=solved(Euler)),
    Mistake(
        "no corrector", {T2V: [0.35], I2V: [0.16], POLICY: [0.12, 0.07]}, row=solved(Uncorrected)
    ),
    Mistake(
        # To begin at the prompt's velocity is to go one more time the whole way.
        "guided from the wrong end",
        {T2V: [1.53], I2V: [2.43], POLICY: [1.35, 0.66]},
        lambda loop: {"guidance": Guidance(loop.inputs().guidance.scale + 1)},
    ),
    Mistake("branches swapped", {T2V: [14.4], I2V: [12.9], POLICY: [5.0, 3.3]}, swapped),
    Mistake(
        "float timestep",
        {T2V: [2.6e-3], I2V: [7.1e-3], POLICY: [1.4e-3, 1.1e-3]},
        row=FloatTime,
    ),
    Mistake(
        "the prompt's positions for both branches",
        {T2V: [5.14], I2V: [3.92], POLICY: [0.63, 0.46]},
        row=OnePlaceRow,
    ),
    Mistake("karras for shifted", {T2V: [4.23]}, lambda loop: {"schedule": karras(loop)}),
    Mistake(
        "another shift",
        {POLICY: [1.14, 0.48]},
        lambda loop: {"schedule": loop.schedule(flow_shift=10.0)},
    ),
    Mistake(
        "native for shifted",
        {POLICY: [8.9e-3, 4.2e-3]},
        lambda loop: {
            "schedule": FlowSchedule.native(
                SchedulerConfig(use_karras_sigmas=False, flow_shift=5.0), loop.num_steps
            )
        },
    ),
    Mistake("tail of actions", {POLICY: [0.43, 2.69]}, lambda loop: {"raw_action_dim": 12}),
    Mistake(
        "actions begin with the first frame",
        {POLICY: [0.19, 0.40]},
        lambda loop: {"shape": replace(loop.inputs().shape, has_state=True)},
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_seen(model, mistake):
    for loop, known in mistake.known.items():
        inputs = loop.inputs(**mistake.changes(loop))
        if inputs.shape is not inputs.noise.shape:
            inputs = replace(inputs, noise=replace(inputs.noise, shape=inputs.shape))
        (row,) = Drive(model).run(inputs, make=mistake.row)
        check(worst(loop, row), known)


def test_a_solver_in_float64_is_no_mistake(model):
    for loop in (T2V, I2V, POLICY):
        (row,) = Drive(model).run(loop.inputs(), make=solved(Wide))
        assert max(worst(loop, row)) < TOLERANCE


def test_one_solver_for_all_modalities_cannot_be(model):
    drive = Drive(model)
    drive.start("row", POLICY.inputs(), OneState)
    drive.finish()
    assert isinstance(drive.ended["row"], Failed)


def test_actions_at_the_rate_of_frames_are_seen(model):
    def positions(config, shape, num_text) -> Tensor:
        found = media_positions(config, shape, num_text)
        start = num_text + config.unified_3d_mrope_temporal_modality_margin
        items = torch.arange(shape.action_rows, dtype=torch.float32) + 1
        found[0, shape.num_vision_tokens :] = items / shape.fps * config.base_fps + start
        return found

    drive = Drive(model)
    node = DenoiseNode(
        model.transformer, model.backend, model.branches, model.lockstep, 1, positions
    )
    drive.nodes["denoise"]._rotaries = node._rotaries
    (row,) = drive.run(POLICY.inputs())
    check(worst(POLICY, row), [0.75, 1.01])


def test_actions_that_do_not_say_what_they_are_are_seen(folders):
    model = model_of(folders["silu"])
    model.transformer.media.actions.kind.zero_()
    (row,) = Drive(model).run(POLICY.inputs())
    check(worst(POLICY, row), [1.54, 0.93])


def test_a_guidance_interval_that_is_ignored_is_seen(model):
    """What the stored loop does, which guides every step, beside one that guides its first only."""
    guidance = Guidance(3.0, (960, 1001))
    (row,) = Drive(model).run(POLICY.inputs(guidance=guidance))
    check(worst(POLICY, row), [2.20, 1.46])
