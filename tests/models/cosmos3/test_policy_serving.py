"""Between a robot and the plugin `cosmos3_policy`."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from phalanx.errors import CheckpointError, ConfigurationError, InvalidRequestError
from phalanx.models.cosmos3.action_validation import check_action_request
from phalanx.models.cosmos3.args import Cosmos3PolicyArgs
from phalanx.models.cosmos3.checkpoint import read_config
from phalanx.models.cosmos3.entry import Cosmos3Policy
from phalanx.models.cosmos3.policy_serving import Cosmos3PolicyServing
from phalanx.models.cosmos3.policy_settings import policy_settings
from phalanx.models.cosmos3.request import Cosmos3Action
from phalanx.models.cosmos3.validation import limits_of
from phalanx.processing.text import TextTokenizer
from phalanx.schema.observation import Observation
from phalanx.testing.tiny_cosmos3 import write_tiny_cosmos3

SETTINGS = {"domain": "droid_lerobot", "action_chunk": 8, "resolution_tier": 256}
IMAGE = np.zeros((48, 64, 3), np.uint8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_cosmos3(tmp_path_factory.mktemp("cosmos3"))


@pytest.fixture
def policy(directory):
    def make(**settings: object) -> Cosmos3PolicyServing:
        args = Cosmos3PolicyArgs(directory)
        return Cosmos3PolicyServing(args, policy_settings({**SETTINGS, **settings}))

    return make


def seen(**changes: object) -> Observation:
    given = {"images": {"front": IMAGE}, "instructions": ("pick up the cube",), **changes}
    return Observation(**given)


def text_of(directory, ids) -> str:
    return TextTokenizer(directory / "text_tokenizer").decode(ids[0].tolist())


def test_a_picture_and_an_instruction_are_a_request(policy, directory):
    request = policy().request(seen())
    assert request.mode == "policy"
    assert (request.domain_id, request.raw_action_dim, request.action_dim) == (8, 10, 12)
    assert (request.video_shape, request.action_chunk) == ((3, 3, 4), 8)
    assert request.cond_video_pixels.shape == (1, 3, 1, 256, 320)
    assert (request.num_inference_steps, request.guidance_scale, request.flow_shift) == (
        30,
        1.0,
        5.0,
    )
    turn = text_of(directory, request.text_ids).partition("user\n")[2]
    caption, _ = json.JSONDecoder().raw_decode(turn)
    assert caption["actions"][0]["description"] == "pick up the cube."
    assert caption["resolution"] == {"H": 256, "W": 320}


def test_every_request_that_it_makes_is_valid(policy, directory):
    limits = limits_of(read_config(directory), Cosmos3PolicyArgs(directory))
    clip = np.zeros((9, 48, 64, 3), np.uint8)
    for one, observation in (
        (policy(), seen()),
        (policy(state_dim=10), seen(state=np.zeros(10, np.float32))),
        (policy(guidance_scale=3.0, guidance_interval=[960, 1001]), seen()),
        (
            policy(),
            seen(parameters={"mode": "inverse_dynamics"}, images={}, inputs={"video": clip}),
        ),
        (
            policy(),
            seen(
                parameters={"mode": "forward_dynamics"},
                inputs={"actions": np.zeros((3, 10), np.float32)},
            ),
        ),
    ):
        check_action_request(one.request(observation), limits)


def test_an_observation_may_say_how_it_is_computed(policy):
    request = policy().request(
        seen(parameters={"seed": 5, "num_steps": 2, "guidance_scale": 2.0, "lerobot": {}})
    )
    assert (request.seed, request.num_inference_steps, request.guidance_scale) == (5, 2, 2.0)


def test_a_state_and_actions_are_in_the_robots_units(policy):
    one = policy(state_dim=10, state_range=[[0, 4]], action_range=[[-2, 6]] * 10)
    request = one.request(seen(state=np.full(10, 3, np.float32)))
    assert torch.allclose(request.state, torch.full((1, 10), 0.5))
    output = Cosmos3Action(torch.full((1, 8, 10), 0.5), torch.zeros(1, 6, 3, 3, 4))
    actions = one.actions(output, seen(horizon=5))
    assert actions.values.shape == (5, 10)
    assert np.allclose(actions.values, 4)
    given = one.request(
        seen(
            parameters={"mode": "forward_dynamics"},
            inputs={"actions": np.full((2, 10), 2, np.float32)},
        )
    )
    assert torch.allclose(given.cond_action, torch.zeros(1))


def test_what_is_decoded_comes_beside_the_actions(policy):
    output = Cosmos3Action(
        torch.zeros(1, 8, 10), torch.zeros(1, 6, 3, 3, 4), torch.ones(1, 3, 9, 48, 64)
    )
    answer = policy().actions(output, seen())
    assert answer.outputs["video"].shape == (9, 48, 64, 3)
    assert answer.outputs["video"].dtype == np.uint8


def test_forward_dynamics_answers_with_what_is_seen(policy):
    output = Cosmos3Action(None, torch.zeros(1, 6, 3, 3, 4))
    answer = policy().actions(output, seen())
    assert answer.values.shape == (0, 10)
    assert answer.outputs["video_latents"].shape == (6, 3, 3, 4)


def test_a_batch_of_one_keeps_its_row(policy):
    batched = Observation(
        images={"front": IMAGE[None]},
        instructions=("pick",),
        batched=True,
    )
    assert policy().request(batched).video_shape == (3, 3, 4)
    output = Cosmos3Action(torch.zeros(1, 8, 10), torch.zeros(1, 6, 3, 3, 4))
    assert policy().actions(output, batched).values.shape == (1, 8, 10)


def test_the_camera_is_the_one_that_is_named(policy):
    one = policy(image_name="front")
    assert one.info.cameras == ("front",)
    images = {"wrist": IMAGE, "observation.images.front": IMAGE}
    assert one.request(seen(images=images)).mode == "policy"


@pytest.mark.parametrize(
    ("field", "message", "settings", "changes"),
    [
        ("images", "of no camera; this policy takes one image", {}, {"images": {}}),
        ("images", "'a', 'b'; this policy takes one image", {}, {"images": {"a": IMAGE, "b": IMAGE}}),
        ("images", "takes the image 'top'", {"image_name": "top"}, {}),
        ("images", "has 1 channels", {}, {"images": {"front": IMAGE[:, :, :1]}}),
        ("state", "there is no state; this policy takes 10", {"state_dim": 10}, {}),
        ("parameters", "mode", {}, {"parameters": {"mode": "dream"}}),
        ("parameters", "knows mode, seed", {}, {"parameters": {"steps": 3}}),
        ("policy_type", "runs 'cosmos3_policy'", {}, {"parameters": {"lerobot": {"policy_type": "pi0"}}}),
        ("actions", "needs the input 'actions'", {}, {"parameters": {"mode": "forward_dynamics"}}),
        ("video", "no input 'video' in mode 'policy'", {}, {"inputs": {"video": IMAGE}}),
        (
            "video",
            "of 9 frames",
            {},
            {"parameters": {"mode": "inverse_dynamics"}, "inputs": {"video": IMAGE[None]}},
        ),
        (
            "actions",
            "give (1 to 8, 10)",
            {},
            {
                "parameters": {"mode": "forward_dynamics"},
                "inputs": {"actions": np.zeros((3, 4), np.float32)},
            },
        ),
        (
            "actions",
            "give numbers",
            {},
            {
                "parameters": {"mode": "forward_dynamics"},
                "inputs": {"actions": np.full((3, 10), "left")},
            },
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(policy, field, message, settings, changes):
    with pytest.raises(InvalidRequestError) as refused:
        policy(**settings).request(seen(**changes))
    assert refused.value.field == field
    assert message in str(refused.value)


@pytest.mark.parametrize("chunk", [1, 4, 6])
def test_actions_of_a_clip_need_no_chunk_of_whole_latents(policy, directory, chunk):
    """The frames behind the last whole latent are not looked at."""
    clip = np.arange((chunk + 1) * 48 * 64 * 3, dtype=np.uint8).reshape(chunk + 1, 48, 64, 3)
    told = {"inputs": {"video": clip}, "parameters": {"mode": "inverse_dynamics"}}
    request = policy(action_chunk=chunk).request(Observation(**told))
    args = Cosmos3PolicyArgs(directory)
    check_action_request(request, limits_of(read_config(directory), args))
    assert request.cond_video_pixels.shape[2] == 1 + chunk // 4 * 4


@pytest.mark.parametrize(
    ("mode", "name", "value"),
    [
        ("forward_dynamics", "actions", np.ones((8, 10), np.float32)),
        ("inverse_dynamics", "video", np.zeros((9, 48, 64, 3), np.uint8)),
    ],
)
def test_inputs_of_a_batch_have_its_row(policy, mode, name, value):
    told = {"instructions": ("push",), "parameters": {"mode": mode}}
    alone = Observation(images={"front": IMAGE}, inputs={name: value}, **told)
    rows = {"images": {"front": IMAGE[None]}, "inputs": {name: value[None]}, "batched": True}
    of_batch = policy().request(Observation(**rows, **told))
    assert torch.equal(of_batch.cond_video_pixels, policy().request(alone).cond_video_pixels)
    if mode == "forward_dynamics":
        assert torch.equal(of_batch.cond_action, policy().request(alone).cond_action)


def test_several_observations_are_sent_one_by_one(policy):
    two = Observation(
        images={"front": np.stack([IMAGE, IMAGE])}, instructions=("a", "b"), batched=True
    )
    with pytest.raises(InvalidRequestError, match="send one each"):
        policy().request(two)


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("allowed: no_action, av", {"domain": "moon"}),
        ("give action_dim", {"domain": 30}),
        ("give action_dim", {"domain": "libero"}),
        ("as many numbers as an action, 10", {"state_dim": 7}),
        ("allowed: 256, 480, 704, 720", {"resolution_tier": 512}),
        ("allowed: ego_view", {"viewpoint": "above"}),
        ("has 3 pairs; give 10", {"action_range": [[0, 1]] * 3}),
        ("the lower one comes first", {"action_range": [[1, 1]]}),
        ("known: domain, action_dim", {"chunk": 3}),
        ("action_chunk=0", {"action_chunk": 0}),
        ("fps=0.0", {"fps": 0.0}),
        ("fps=nan", {"fps": float("nan")}),
        ("num_inference_steps=0", {"num_inference_steps": 0}),
        ("guidance_scale=-1.0", {"guidance_scale": -1.0}),
        ("flow_shift=0.0", {"flow_shift": 0.0}),
        ("guidance_interval=(9, 2)", {"guidance_interval": [9, 2]}),
        ("domain=-1", {"domain": -1, "action_dim": 7}),
        ("has [0.0, inf]", {"action_range": [[0, float("inf")]]}),
    ],
)
def test_settings_are_checked(message, settings):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        policy_settings({**SETTINGS, **settings})


def test_a_checkpoint_that_does_not_fit_is_refused(directory):
    with pytest.raises(CheckpointError, match="actions of up to 12 numbers and 16 domains"):
        Cosmos3Policy.policy(Cosmos3PolicyArgs(directory), {"domain": 31, "action_dim": 7})
