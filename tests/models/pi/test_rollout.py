"""Rollouts of pi0.5 through an engine, on LeRobot's tiny checkpoint, and new weights for it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phalanx import Engine, EngineArgs, InvalidRequestError
from phalanx.errors import ConfigurationError
from phalanx.models.pi05.main_pi05 import (
    PI05Args,
    PI05Config,
    PI05Request,
    PI05RolloutOutput,
    PI05RolloutRequest,
)

FIXTURE = Path(__file__).parents[2] / "fixtures" / "policies" / "pi05_micro_f32"
CHECKPOINT = FIXTURE / "checkpoint"
STEPS = 4


def args(*, value_head: bool = False) -> EngineArgs:
    config = PI05Config(vision_num_heads=3, add_value_head=value_head)
    return EngineArgs("pi05", PI05Args(CHECKPOINT, config=config, max_batch_size=2))


@pytest.fixture(scope="module")
def engine():
    with Engine(args()) as engine:
        yield engine


@pytest.fixture(scope="module")
def critic():
    with Engine(args(value_head=True)) as engine:
        yield engine


@pytest.fixture(scope="module")
def fields() -> dict[str, torch.Tensor]:
    """Two observations, as LeRobot prepared them."""
    stored = load_file(FIXTURE / "io.safetensors")
    tokens = stored["pre.tokens"]
    return {
        "pixel_values": torch.stack([stored[f"pre.image{at}"] for at in range(3)], dim=1),
        "image_masks": torch.stack([stored[f"pre.image_mask{at}"] for at in range(3)], dim=1),
        "input_ids": tokens,
        "lang_lens": stored["pre.token_mask"].sum(1),
        "noise": stored["in.noise"],
    }


def rollout(fields: dict[str, torch.Tensor], sigma: float, **more: object) -> PI05RolloutRequest:
    return PI05RolloutRequest(**fields, sigmas=torch.full((2, STEPS), sigma), **more)


def noise(seed: int = 5) -> torch.Tensor:
    return torch.randn(2, STEPS, 10, 32, generator=torch.Generator().manual_seed(seed))


def test_without_deviation_a_rollout_is_plain_sampling(engine, fields):
    plain = engine.step(PI05Request(**fields, num_steps=STEPS))
    out = engine.rollout_step(rollout(fields, 0.0, step_noise=noise()))
    assert isinstance(out, PI05RolloutOutput)
    assert torch.equal(out.actions, plain)
    assert torch.equal(out.chains[:, 0], fields["noise"])
    assert torch.equal(out.chains[:, -1], out.actions)
    assert out.chains.shape == (2, STEPS + 1, 10, 32)
    assert torch.equal(out.transition_logprobs, torch.zeros(2, STEPS, 10, 32))
    assert out.raw_values is None


@pytest.mark.parametrize("step", range(STEPS))
def test_each_step_has_the_mean_deviation_and_probability_of_the_formula(engine, fields, step):
    """In doubles; the velocity is that of a chain without deviation, which is the same until then."""
    sigma, drawn, length = 0.3, noise(), 1 / STEPS
    straight = engine.rollout_step(rollout(fields, 0.0)).chains.double()
    sigmas = torch.zeros(2, STEPS)
    sigmas[:, step] = sigma
    out = engine.rollout_step(PI05RolloutRequest(**fields, sigmas=sigmas, step_noise=drawn))
    assert torch.equal(out.chains[:, : step + 1].double(), straight[:, : step + 1])
    x, v = straight[:, step], (straight[:, step] - straight[:, step + 1]) / length
    time = 1 - step * length
    later = time - length
    x0, x1 = x - v * time, x + v * (1 - time)
    mean = x0 * (1 - later) + x1 * (later - sigma**2 * length / (2 * time))
    std = sigma * math.sqrt(length)
    expected = mean + drawn[:, step].double() * std
    assert torch.allclose(out.chains[:, step + 1].double(), expected, atol=5e-6, rtol=5e-6)
    log_probs = torch.distributions.Normal(mean, std).log_prob(expected)
    assert torch.allclose(out.transition_logprobs[:, step].double(), log_probs, atol=1e-4)
    others = [other for other in range(STEPS) if other != step]
    assert not out.transition_logprobs[:, others].any()


def test_rollouts_and_plain_requests_share_steps_and_change_nothing_for_each_other(engine, fields):
    alone = engine.rollout_step(rollout(fields, 0.2, step_noise=noise()))
    rows = [{name: value[at : at + 1] for name, value in fields.items()} for at in range(2)]
    plain = engine.submit(PI05Request(**rows[1], num_steps=7))
    single = PI05RolloutRequest(
        **rows[0], sigmas=torch.full((1, STEPS), 0.2), step_noise=noise()[:1]
    )
    out = engine.rollout_step(single)
    assert torch.allclose(out.chains, alone.chains[:1], atol=5e-6)
    assert torch.allclose(out.transition_logprobs, alone.transition_logprobs[:1], atol=1e-4)
    assert torch.allclose(
        plain.result(), engine.step(PI05Request(**rows[1], num_steps=7)), atol=5e-6
    )


def test_noise_that_is_not_given_is_drawn_anew(engine, fields):
    first, second = (engine.rollout_step(rollout(fields, 0.2)) for _ in range(2))
    assert not torch.equal(first.chains, second.chains)


def test_a_new_critic_expects_nothing_and_a_trained_one_something_of_each_step(critic, fields):
    out = critic.rollout_step(rollout(fields, 0.1, compute_values=True))
    assert torch.equal(out.raw_values, torch.zeros(2, STEPS))
    critic.begin_weight_update()
    critic.update_weights(
        {
            "value_head.out_proj.weight": torch.full((1, 16), 0.5),
            "value_head.out_proj.bias": torch.tensor([2.0]),
        }
    )
    critic.finish_weight_update()
    values = critic.rollout_step(rollout(fields, 0.1, compute_values=True)).raw_values
    assert values.shape == (2, STEPS)
    assert len(values.unique()) == 2 * STEPS
    assert critic.rollout_step(rollout(fields, 0.1)).raw_values is None


def test_new_weights_change_the_actions_and_the_old_ones_bring_them_back(engine, fields):
    old = load_file(CHECKPOINT / "model.safetensors")
    names = [name for name in old if "gemma_expert" in name or "time_mlp" in name]
    request = PI05Request(**fields)
    before = engine.step(request)
    for weights, same in (({name: old[name] * 1.5 for name in names}, False), (old, True)):
        engine.begin_weight_update()
        engine.update_weights(weights)
        engine.finish_weight_update()
        assert torch.equal(engine.step(request), before) is same


def test_a_weight_of_another_shape_or_name_is_refused(engine):
    engine.begin_weight_update()
    with pytest.raises(InvalidRequestError, match="it takes floats of shape"):
        engine.update_weights({"model.action_in_proj.weight": torch.zeros(3, 3)})
    engine.abort_weight_update()
    engine.begin_weight_update()
    with pytest.raises(InvalidRequestError, match="'no.such' is not one of this policy"):
        engine.update_weights({"no.such": torch.zeros(1)})
    engine.abort_weight_update()


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"sigmas": torch.zeros(2)}, "sigmas"),
        ({"sigmas": torch.zeros(1, STEPS)}, "sigmas"),
        ({"sigmas": torch.full((2, STEPS), -0.1)}, "sigmas"),
        ({"sigmas": torch.full((2, STEPS), math.nan)}, "sigmas"),
        ({"step_noise": torch.zeros(2, STEPS + 1, 10, 32)}, "step_noise"),
        ({"num_steps": STEPS + 1}, "num_steps"),
        ({"compute_values": True}, "compute_values"),
    ],
)
def test_a_rollout_that_cannot_be_computed_is_refused_by_field(engine, fields, more, field):
    with pytest.raises(InvalidRequestError) as caught:
        engine.rollout_step(
            PI05RolloutRequest(**{**fields, "sigmas": torch.zeros(2, STEPS), **more})
        )
    assert caught.value.field == field


def test_step_takes_no_rollout(engine, fields):
    with pytest.raises(TypeError, match="takes PI05Request, not PI05RolloutRequest"):
        engine.step(rollout(fields, 0.1))


def test_the_prefix_is_valued_once_where_the_critic_is_on_it(engine, fields):
    config = PI05Config(vision_num_heads=3, add_value_head=True, value_from="prefix")
    with Engine(
        EngineArgs("pi05", PI05Args(CHECKPOINT, config=config, max_batch_size=2))
    ) as critic:
        asked = rollout(fields, 0.1, step_noise=noise(), compute_values=True)
        assert torch.equal(critic.rollout_step(asked).raw_values, torch.zeros(2, 1))
        critic.begin_weight_update()
        critic.update_weights({"value_head.out_proj.weight": torch.full((1, 32), 0.5)})
        critic.finish_weight_update()
        out = critic.rollout_step(asked)
        values = out.raw_values
        assert values.shape == (2, 1)
        assert values[0] != values[1]
        # One observation is worth the same alone, and whatever noise its actions begin with.
        rows = {name: value[:1] for name, value in fields.items() if name != "noise"}
        alone = PI05RolloutRequest(**rows, sigmas=torch.full((1, STEPS), 0.1), compute_values=True)
        assert torch.allclose(critic.rollout_step(alone).raw_values, values[:1], atol=5e-6)
        # Its last layer is whole, and the actions are those of a policy where it is not.
        plain = engine.rollout_step(rollout(fields, 0.1, step_noise=noise()))
        assert torch.allclose(out.chains, plain.chains, atol=5e-6)
        assert critic.rollout_step(rollout(fields, 0.1)).raw_values is None
        # Nothing of the last layer's feed-forward reaches an action; it reaches the value.
        name = "model.paligemma_with_expert.paligemma.model.language_model.norm.weight"
        critic.begin_weight_update()
        critic.update_weights({name: 2 * load_file(CHECKPOINT / "model.safetensors")[name]})
        critic.finish_weight_update()
        assert not torch.allclose(critic.rollout_step(asked).raw_values, values, atol=1e-4)


def test_a_critic_values_the_prefix_or_the_suffix():
    with pytest.raises(ConfigurationError, match="value_from='both'; allowed: prefix, suffix"):
        PI05Config(value_from="both")
