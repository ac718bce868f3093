"""Everything that LeRobot stored of its own computation comes out again, within rounding."""

from __future__ import annotations

import pytest
import torch

from phalanx.layers.flow_matching import flow_time
from phalanx.layers.real_time_chunking import Schedule, prefix_weights
from phalanx.models.pi.request import RealTimeChunking
from phalanx.models.pi.row import Walk
from phalanx.models.pi05.expert import PI05Expert
from phalanx.step.resources.kv_cache import KVCache
from tests.models.pi.stored import close, loaded, request, run, stored

NAMES = ("pi05_micro_f32", "pi05_tiny_f32", "pi0_tiny_f32")
ACTIONS = 7


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.mark.parametrize("operators", ["off", "auto"])
def test_actions_are_those_of_lerobot(name, operators):
    for row, actions in enumerate(run(loaded(name, operators), request(name)).finish()):
        close(actions, stored(name)["out.x_final_padded"][row])


def test_five_steps_are_those_of_lerobot(name):
    for row, actions in enumerate(run(loaded(name), request(name, num_steps=5)).finish()):
        close(actions[:, :ACTIONS], stored(name)["out.normalized_actions_5steps"][row])


def test_velocities_and_times_of_every_step(name):
    io, done = stored(name), run(loaded(name), request(name))
    done.finish()
    for row, one in enumerate(done.rows):
        assert len(one.velocities) == 10
        for step, velocity in enumerate(one.velocities):
            assert flow_time(step, 10) == float(io["steps.t"][step, row])
            close(velocity, io["steps.v"][step, row])
        close(one.inputs.noise - 0.1 * one.velocities[0], io["steps.x1"][row])


def test_keys_and_values_of_the_prefix(name):
    """Rows of valid tokens; those of empty cameras and padding are not there."""
    io, running = stored(name), run(loaded(name), request(name))
    cache = running.engine.resource("kv")
    assert isinstance(cache, KVCache)
    while running.rows[0].next_work().walk in (Walk.SEE.value, Walk.READ.value):
        running.loop.tick()
    for row, one in enumerate(running.rows):
        valid = io["prefix.pad_mask"][row]
        count = one.num_prefix
        assert count == int(valid.sum())
        (page,) = cache.pages(str(row), "main", count).pages
        for layer in range(running.policy.model.geometry.num_layers):
            keys, values = (part[page, :count, 0] for part in cache.layer(layer))
            close(keys, io[f"kv.{layer}.k"][row, 0, valid])
            close(values, io[f"kv.{layer}.v"][row, 0, valid])
    running.finish()


def test_embeddings_of_the_prefix(name):
    """Tokens as they enter the language model: the first 64 whole, of all their mean."""
    io, model = stored(name), loaded(name).model
    given = request(name)
    with torch.inference_mode():
        for row in range(2):
            text = model.language.embed(given.input_ids[row, : int(given.lang_lens[row])])
            seen = model.eye.forward(given.pixel_values[row, :2])
            tokens, valid = torch.cat((seen, text)), io["prefix.pad_mask"][row]
            close(tokens.mean(1), io["prefix.embs_mean"][row, valid])
            first = int(valid[:64].sum())
            close(tokens[:first], io["prefix.embs_first64"][row, :64][valid[:64]])


@pytest.mark.parametrize("name", ["pi05_micro_f32", "pi05_tiny_f32"], ids=str)
def test_conditions_of_every_step(name):
    io, expert = stored(name), loaded(name).model.expert
    assert isinstance(expert, PI05Expert)
    with torch.inference_mode():
        for step in range(10):
            condition = expert.time_condition(flow_time(step, 10))
            close(condition[0], io["steps.adarms_cond"][step, 0])


def delay_and_horizon(name: str) -> tuple[int, int]:
    """What LeRobot was given, which its weights tell."""
    io = stored(name)
    return int(io["rtc.weights.ZEROS"].sum()), int(io["rtc.weights.ONES"].sum())


@pytest.mark.parametrize("schedule", [one.value for one in Schedule])
def test_guided_real_time_chunking(name, schedule):
    io = stored(name)
    delay, horizon = delay_and_horizon(name)
    weights = prefix_weights(Schedule(schedule), delay, horizon, len(io["rtc.weights.EXP"]))
    close(weights, io[f"rtc.weights.{schedule}"])
    rtc = RealTimeChunking(
        io["rtc.prev_chunk_left_over"], delay, execution_horizon=horizon, schedule=schedule
    )
    given = request(name, noise=io["in.noise"] * io["rtc.noise_scale"], rtc=rtc)
    for row, actions in enumerate(run(loaded(name), given).finish()):
        close(actions[:, :ACTIONS], io[f"rtc.out.{schedule}"][row])


def test_trained_real_time_chunking_keeps_the_first_actions(name):
    io, policy = stored(name), loaded(name)
    old = io["rtc.prev_chunk_left_over"]
    rtc = RealTimeChunking(old, inference_delay=3, mode="trained")
    chunks = run(policy, request(name, rtc=rtc)).finish()
    plain = run(policy, request(name)).finish()
    for row, actions in enumerate(chunks):
        assert torch.equal(actions[:3, :ACTIONS], old[row, :3])
        assert float((actions[3:] - plain[row][3:]).abs().max()) > 1e-3
    unbound = RealTimeChunking(old, inference_delay=0, mode="trained")
    for row, actions in enumerate(run(policy, request(name, rtc=unbound)).finish()):
        close(actions, plain[row])
