"""Between robots and pi policies: what they make of an observation, and of what comes back."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from phalanx.errors import CheckpointError, ConfigurationError, InvalidRequestError
from phalanx.models.pi0.args import PI0Args
from phalanx.models.pi0.config import PI0Config
from phalanx.models.pi0.entry import PI0Entry
from phalanx.models.pi05.args import PI05Args
from phalanx.models.pi05.config import PI05Config
from phalanx.models.pi05.entry import PI05Entry
from tests.processing.policy.references import (
    POLICIES,
    both,
    checkpoint,
    one,
    pixels,
    stored,
    worst,
)

MICRO, TINY, PI0 = "pi05_micro_f32", "pi05_tiny_f32", "pi0_tiny_f32"


def serving(name: str, **settings: object):
    given = {"tokenizer_dir": str(POLICIES / name / "tokenizer"), **settings}
    if name == PI0:
        return PI0Entry.policy(PI0Args(checkpoint(name), PI0Config(vision_num_heads=3)), given)
    return PI05Entry.policy(PI05Args(checkpoint(name), PI05Config(vision_num_heads=3)), given)


@pytest.fixture(scope="module")
def micro():
    return serving(MICRO)


@pytest.mark.parametrize("name", [MICRO, TINY])
def test_a_request_of_pi05_is_what_lerobot_prepared(name):
    request, io = serving(name).request(both(name)), stored(name)
    assert torch.equal(request.input_ids, io["pre.tokens"])
    assert torch.equal(request.lang_lens, io["pre.token_mask"].sum(1))
    assert worst(request.pixel_values[:, 0], io["pre.image0"]) <= 1
    # The checkpoint's empty camera is the third.
    masks = torch.stack([io[f"pre.image_mask{index}"] for index in range(3)], 1)
    assert torch.equal(request.image_masks, masks)
    assert bool((request.pixel_values[:, 2] == -1).all())
    assert (request.noise, request.num_steps, request.rtc) == (None, None, None)


def test_a_request_of_pi0_is_what_lerobot_prepared():
    request, io = serving(PI0).request(both(PI0)), stored(PI0)
    assert torch.equal(request.input_ids, io["pre.tokens"])
    assert worst(request.pixel_values[:, 0], io["pre.image0"]) <= 1
    # Cameras that are always empty are not asked for at all.
    assert request.pixel_values.shape[1] == 2 and bool(request.image_masks.all())
    assert torch.equal(request.state[:, :8], io["pre.state"])
    assert request.state.shape == (2, 32) and not bool(request.state[:, 8:].any())


def test_cameras_that_are_there_come_first(micro):
    wrist = one(MICRO).images["wrist"]
    request = micro.request(one(MICRO, images={"wrist": wrist}))
    assert request.image_masks.tolist() == [[True, False, False]]
    seen = torch.from_numpy(wrist).permute(2, 0, 1).float() / 255 * 2 - 1
    assert torch.allclose(request.pixel_values[0, 0], seen)
    assert bool((request.pixel_values[0, 1:] == -1).all())


def test_images_are_sent_in_any_order(micro):
    images = one(MICRO).images
    turned = {name: images[name] for name in ("wrist", "front")}
    first = micro.request(one(MICRO)).pixel_values
    assert torch.equal(micro.request(one(MICRO, images=turned)).pixel_values, first)


def test_the_same_seed_gives_the_same_noise(micro):
    def noise(seed: int) -> torch.Tensor:
        return micro.request(one(MICRO, parameters={"seed": seed})).noise

    assert torch.equal(noise(3), noise(3)) and noise(3).shape == (1, 10, 32)
    assert not torch.equal(noise(3), noise(4))


def test_noise_may_be_sent(micro):
    sent = stored(MICRO)["in.noise"].numpy()
    single = micro.request(one(MICRO, inputs={"noise": sent[0]}))
    assert np.array_equal(single.noise[0].numpy(), sent[0])
    batch = micro.request(both(MICRO, inputs={"noise": sent}))
    assert np.array_equal(batch.noise.numpy(), sent)


def test_parameters_reach_the_policy(micro):
    left = [[0.5] * 7, [0.25] * 7]
    asked = {
        "num_steps": 5,
        "rtc": {
            "prev_chunk_left_over": left,
            "inference_delay": 1,
            "execution_horizon": 4,
            "mode": "trained",
            "schedule": "EXP",
            "max_guidance_weight": 3.0,
        },
    }
    request = micro.request(one(MICRO, parameters=asked))
    assert request.num_steps == 5
    rtc = request.rtc
    assert rtc.prev_chunk_left_over.tolist() == [left]
    assert (rtc.inference_delay, rtc.execution_horizon, rtc.mode) == (1, 4, "trained")
    assert (rtc.schedule, rtc.max_guidance_weight) == ("EXP", 3.0)


def test_earlier_actions_may_be_in_the_robots_units(micro):
    normalized = stored(MICRO)["out.normalized_actions"][:1]
    actions = micro.actions(normalized, one(MICRO)).values
    asked = {"rtc": {"prev_actions": actions.tolist(), "inference_delay": 2}}
    rtc = micro.request(one(MICRO, parameters=asked)).rtc
    assert torch.allclose(rtc.prev_chunk_left_over, normalized, atol=1e-4)


def test_a_robot_that_goes_on_from_a_chunk_gets_it_in_the_policys_units(micro):
    normalized = stored(MICRO)["out.normalized_actions"]
    padded = torch.nn.functional.pad(normalized, (0, 25))
    observation = one(MICRO, horizon=4, parameters={"rtc": {}})
    assert micro.request(observation).rtc is None
    actions = micro.actions(padded[:1], observation)
    assert actions.values.shape == (4, 7)
    assert np.array_equal(actions.outputs["normalized_actions"], normalized[0].numpy())
    assert not micro.actions(padded[:1], one(MICRO)).outputs


@dataclass(frozen=True)
class Refused:
    words: str
    changed: dict[str, object]


@pytest.mark.parametrize(
    "case",
    [
        Refused("no camera 'top'", {"images": {"top": np.zeros((9, 9, 3), np.uint8)}}),
        Refused("6 numbers; this policy takes 8", {"state": np.zeros(6, np.float32)}),
        Refused("nun_steps.*knows num_steps, seed", {"parameters": {"nun_steps": 3}}),
        Refused("num_steps", {"parameters": {"num_steps": "many"}}),
        Refused("seed=-1", {"parameters": {"seed": -1}}),
        Refused("delay.*rtc", {"parameters": {"rtc": {"delay": 3}}}),
        Refused(
            "earlier actions have 3 numbers; this policy gives 7",
            {"parameters": {"rtc": {"prev_actions": [[1, 2, 3]]}}},
        ),
        Refused("list of numbers", {"parameters": {"rtc": {"prev_actions": [["a"]]}}}),
        Refused("list of numbers", {"parameters": {"rtc": {"prev_actions": [[10**400] * 7]}}}),
        Refused("actions of 1 rows", {"parameters": {"rtc": {"prev_actions": [1.0]}}}),
        Refused(r"float32 of shape \(10, 32\)", {"inputs": {"noise": np.zeros((2, 32))}}),
        Refused(
            "policy_type='act'.*runs 'pi05'", {"parameters": {"lerobot": {"policy_type": "act"}}}
        ),
    ],
    ids=lambda case: case.words[:20],
)
def test_what_cannot_be_used_is_said_in_words(micro, case):
    with pytest.raises(InvalidRequestError, match=case.words):
        micro.request(one(MICRO, **case.changed))


def test_sizes_of_images_are_held_where_they_are_given():
    shapes = ((33, 47, 3), (28, 28, 3))
    args = PI05Args(checkpoint(MICRO), PI05Config(vision_num_heads=3), inputs_image_shape=shapes)
    strict = PI05Entry.policy(args, {"tokenizer_dir": str(POLICIES / MICRO / "tokenizer")})
    assert strict.request(one(MICRO)).pixel_values.shape[1] == 2
    with pytest.raises(InvalidRequestError, match="takes 33 x 47"):
        strict.request(one(MICRO, images={"front": np.zeros((34, 47, 3), np.uint8)}))


def test_random_weights_are_served_to_no_robot():
    with pytest.raises(ConfigurationError, match="checkpoint_dir"):
        PI05Entry.policy(PI05Args(), {})


def change(path, edit) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def without_tokens(content) -> None:
    content["steps"] = [
        one for one in content["steps"] if one["registry_name"] != "tokenizer_processor"
    ]


def tokens(**changed):
    def edit(content) -> None:
        for step in content["steps"]:
            if step["registry_name"] == "tokenizer_processor":
                step["config"].update(changed)

    return edit


def without_state(content) -> None:
    del content["input_features"]["observation.state"]


def many_actions(content) -> None:
    content["output_features"]["action"]["shape"] = [33]


@pytest.mark.parametrize(
    ("file", "edit", "words"),
    [
        ("policy_preprocessor.json", without_tokens, "has no tokenizer_processor"),
        ("policy_preprocessor.json", tokens(max_length=64), "max_length=64 .*prompts of 200"),
        ("policy_preprocessor.json", tokens(padding="longest"), "padding='longest'"),
        ("policy_preprocessor.json", tokens(padding_side="left"), "at the left; the policy"),
        ("config.json", without_state, "names no 'observation.state'"),
        ("config.json", many_actions, "actions of 33 numbers, and the policy's have 32"),
    ],
)
def test_files_that_make_no_request_are_refused_at_the_start(tmp_path, file, edit, words):
    shutil.copytree(checkpoint(MICRO), tmp_path, dirs_exist_ok=True)
    change(tmp_path / file, edit)
    args = PI05Args(tmp_path, PI05Config(vision_num_heads=3))
    with pytest.raises(CheckpointError, match=words):
        PI05Entry.policy(args, {"tokenizer_dir": str(POLICIES / MICRO / "tokenizer")})


def test_names_of_the_robot_are_the_documents(micro):
    own = serving(MICRO, image_names=["main_images", "wrist_images"], state_dim=8, action_dim=7)
    assert own.info.cameras == ("main_images", "wrist_images")
    front, wrist = one(MICRO).images["front"], one(MICRO).images["wrist"]
    named = one(MICRO, images={"main_images": front, "wrist_images": wrist})
    assert torch.equal(own.request(named).pixel_values, micro.request(one(MICRO)).pixel_values)


def test_threads_do_not_see_each_others_requests(micro):
    rng = np.random.default_rng(1)
    observations = [
        one(MICRO, images={"front": pixels(rng, 40, 30)}, state=rng.random(8, np.float32))
        for _ in range(6)
    ]
    wanted = [micro.request(each) for each in observations]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(micro.request, observations * 5))
    for index, each in enumerate(found):
        assert torch.equal(each.pixel_values, wanted[index % 6].pixel_values)
        assert torch.equal(each.input_ids, wanted[index % 6].input_ids)
