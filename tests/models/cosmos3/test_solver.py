"""Schedules equal to the bit, and each step of the solver on diffusers' own velocities."""

from __future__ import annotations

import pytest
import torch

from phalanx.errors import ConfigurationError
from phalanx.layers.unipc import FlowSchedule, SchedulerConfig, UniPCSolver, UniPCState
from tests.models.cosmos3.loops import LOOPS, MODALITIES, Loop, largest
from tests.models.cosmos3.stored import document, tensors

KINDS = {
    "karras": SchedulerConfig(),
    "shift5": SchedulerConfig(use_karras_sigmas=False, flow_shift=5.0),
    "shift10": SchedulerConfig(use_karras_sigmas=False, flow_shift=10.0),
    "native5": SchedulerConfig(use_karras_sigmas=False, flow_shift=5.0, native=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [1, 2, 4, 10, 35])
def test_schedules_are_equal_to_the_bit(kind, num_steps):
    made = FlowSchedule.of(KINDS[kind], num_steps)
    stored = {
        name: tensors("schedules")[f"{kind}.{num_steps}.{name}"] for name in ("sigmas", "timesteps")
    }
    assert made.sigmas.dtype == torch.float32 and torch.equal(made.sigmas, stored["sigmas"])
    assert made.timesteps.dtype == torch.int64 and torch.equal(made.timesteps, stored["timesteps"])
    assert made.num_steps == num_steps


@pytest.mark.parametrize("name", LOOPS)
def test_each_step_is_that_of_diffusers(name):
    """From its own latents and velocities, so that no error is carried from step to step."""
    loop = Loop(name)
    solver = UniPCSolver(loop.schedule())
    for modality in MODALITIES:
        state = UniPCState()
        for step in range(loop.num_steps):
            sample, velocity, after = (
                loop.stored(step, what, modality) for what in ("latents_in", "velocity", "latents")
            )
            if velocity is None:
                continue
            found, state = solver.step(state, step, velocity, sample)
            assert found.dtype == torch.float32
            assert largest(found - after) < 2e-6


def test_orders_begin_and_end_with_1():
    solver = UniPCSolver(FlowSchedule.karras(SchedulerConfig(), 4))
    assert [solver.order(at) for at in range(4)] == [1, 2, 2, 1]
    assert UniPCSolver(FlowSchedule.karras(SchedulerConfig(), 1)).order(0) == 1


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_the_flow_to_one_point_ends_there(num_steps):
    """A velocity of exact data leads there in any number of steps."""
    schedule = FlowSchedule.shifted(SchedulerConfig(flow_shift=3.0), num_steps)
    solver, state = UniPCSolver(schedule), UniPCState()
    data, sample = torch.tensor([0.25, -2.0]), torch.tensor([1.0, 3.0])
    for at in range(num_steps):
        velocity = (sample - data) / schedule.sigmas[at]
        sample, state = solver.step(state, at, velocity, sample)
    torch.testing.assert_close(sample, data, rtol=0, atol=1e-5)


def test_the_stored_scheduler_is_what_is_shipped():
    assert SchedulerConfig.from_json(document("scheduler")) == SchedulerConfig()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"solver_order": 3}, "solver_order=3; only 2"),
        ({"solver_type": "bh1"}, "solver_type='bh1'; only 'bh2'"),
        ({"prediction_type": "epsilon"}, "prediction_type='epsilon'"),
        ({"use_flow_sigmas": False}, "use_flow_sigmas=False"),
        ({"disable_corrector": [1]}, r"disable_corrector=\[1\]"),
        ({"use_beta_sigmas": True}, "use_beta_sigmas=True; only False"),
        ({"use_exponential_sigmas": True}, "use_exponential_sigmas=True; only False"),
        ({"use_dynamic_shifting": True}, "use_dynamic_shifting=True; only False"),
        ({"shift_terminal": 0.1}, "shift_terminal=0.1; only None"),
        ({"final_sigmas_type": "sigma_min"}, "final_sigmas_type='sigma_min'"),
        ({"flow_shift": 0}, "flow_shift=0.0 must be a positive number"),
        ({"sigma_max": 0.1}, "sigma_min not above sigma_max"),
        ({"sigma_min": None}, "use_karras_sigmas and no sigma_min"),
    ],
    ids=str,
)
def test_another_solver_is_refused_by_name(changes, named):
    with pytest.raises(ConfigurationError, match=named):
        SchedulerConfig.from_json({**document("scheduler"), **changes})
