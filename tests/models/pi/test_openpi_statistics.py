"""Checkpoints of openpi: their statistics, cameras and prompts, as a robot meets them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from phalanx.errors import CheckpointError, ConfigurationError, InvalidRequestError
from phalanx.models.pi0.args import PI0Args
from phalanx.models.pi0.config import PI0Config
from phalanx.models.pi0.entry import PI0Entry
from phalanx.models.pi05.args import PI05Args
from phalanx.models.pi05.config import PI05Config
from phalanx.models.pi05.entry import PI05Entry
from tests.processing.policy.references import POLICIES, both, checkpoint, stored

MICRO, PI0 = "pi05_micro_f32", "pi0_tiny_f32"
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


def statistics(name: str) -> dict[str, dict[str, list[float]]]:
    """The fixture's, as openpi writes them."""
    [path] = checkpoint(name).glob("policy_preprocessor*.safetensors")
    found = load_file(path)
    return {
        key: {each: found[f"{own}.{each}"].tolist() for each in ("mean", "std", "q01", "q99")}
        for key, own in (("state", "observation.state"), ("actions", "action"))
    }


def openpi(folder: Path, name: str, stats: object = None, asset: str = "robots/arm") -> Path:
    """The fixture's weights in a folder of openpi."""
    folder.mkdir(exist_ok=True)
    weights = folder / "model.safetensors"
    if not weights.exists():
        weights.symlink_to((checkpoint(name) / "model.safetensors").resolve())
    sizes = {"action_dim": 32, "action_horizon": 10 if name == MICRO else 50}
    (folder / "config.json").write_text(json.dumps(sizes))
    own = folder / "assets" / asset
    own.mkdir(parents=True)
    content = {"norm_stats": statistics(name) if stats is None else stats}
    (own / "norm_stats.json").write_text(json.dumps(content))
    return folder


def serving(folder: Path, name: str = MICRO, **settings: object):
    given = {"tokenizer_dir": str(POLICIES / name / "tokenizer"), **settings}
    if name == PI0:
        return PI0Entry.policy(PI0Args(folder, PI0Config(vision_num_heads=3)), given)
    return PI05Entry.policy(PI05Args(folder, PI05Config(vision_num_heads=3)), given)


def seen(name: str):
    """The fixture's observation by openpi's cameras."""
    images = both(name).images
    return both(name, images={"base_0_rgb": images["front"], "left_wrist_0_rgb": images["wrist"]})


def test_pi05_is_served_by_openpis_statistics(tmp_path):
    adapter = serving(openpi(tmp_path, MICRO))
    info = adapter.info
    assert (info.policy, info.cameras) == ("pi05", CAMERAS)
    assert (info.state_dim, info.action_dim, info.horizon) == (8, 7, 10)
    request, io = adapter.request(seen(MICRO)), stored(MICRO)
    # The same prompts as LeRobot's: 1e-6 of a state moves it to another bin at the edge alone.
    assert torch.equal(request.input_ids, io["pre.tokens"])
    assert request.image_masks.tolist() == [[True, True, False]] * 2


@pytest.mark.parametrize("name", [MICRO, PI0])
def test_actions_come_back_in_the_robots_units(tmp_path, name):
    adapter = serving(openpi(tmp_path, name), name)
    output = torch.randn(2, adapter.info.horizon, 32, generator=torch.Generator().manual_seed(1))
    found = adapter.actions(output, seen(name)).values
    own = {key: np.array(values) for key, values in statistics(name)["actions"].items()}
    given = output[..., :7].double().numpy()
    if name == PI0:
        wanted = given * (own["std"] + 1e-6) + own["mean"]
    else:
        wanted = (given + 1) / 2 * (own["q99"] - own["q01"] + 1e-6) + own["q01"]
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-5)


def test_pi0_reads_the_state_by_mean_and_deviation(tmp_path):
    adapter = serving(openpi(tmp_path, PI0), PI0)
    request = adapter.request(seen(PI0))
    own = {key: np.array(values) for key, values in statistics(PI0)["state"].items()}
    wanted = (stored(PI0)["in.state"].numpy() - own["mean"]) / (own["std"] + 1e-6)
    np.testing.assert_allclose(request.state[:, :8].numpy(), wanted, rtol=1e-5, atol=1e-5)
    # openpi puts underscores and newlines out of the way, LeRobot's pi0 does not.
    plain = "pick up the red cube and put it in the box"
    tasks = adapter.request(
        both(PI0, images=seen(PI0).images, instructions=(plain, "fold"))
    ).input_ids
    assert torch.equal(request.input_ids, tasks)


def test_statistics_without_spread_divide_by_what_openpi_adds(tmp_path):
    stats = statistics(PI0)
    stats["state"]["std"][0] = 0.0
    adapter = serving(openpi(tmp_path, PI0, stats), PI0)
    mean = stats["state"]["mean"][0]
    off = stored(PI0)["in.state"][:, 0].double() - mean
    request = adapter.request(seen(PI0))
    np.testing.assert_allclose(request.state[:, 0].numpy(), off.numpy() / 1e-6, rtol=1e-3)


def test_a_robot_may_have_fewer_numbers_than_the_statistics(tmp_path):
    adapter = serving(openpi(tmp_path, MICRO), state_dim=5, action_dim=3)
    assert (adapter.info.state_dim, adapter.info.action_dim) == (5, 3)
    observation = both(MICRO, images=seen(MICRO).images, state=both(MICRO).state[:, :5])
    adapter.request(observation)
    actions = adapter.actions(torch.zeros(2, 10, 32), observation)
    assert actions.values.shape == (2, 10, 3)
    with pytest.raises(ConfigurationError, match="9 numbers are more than the 8 of 'state'"):
        serving(tmp_path, state_dim=9)


def test_of_several_statistics_one_is_chosen(tmp_path):
    openpi(tmp_path, MICRO)
    other = statistics(MICRO)
    other["actions"] = {name: values[:6] for name, values in other["actions"].items()}
    openpi(tmp_path, MICRO, other, asset="hand")
    with pytest.raises(ConfigurationError, match="asset_id in adapter.args: 'hand', 'robots/arm'"):
        serving(tmp_path)
    with pytest.raises(ConfigurationError, match="asset_id='foot'.*'hand', 'robots/arm'"):
        serving(tmp_path, asset_id="foot")
    assert serving(tmp_path, asset_id="hand").info.action_dim == 6
    assert serving(tmp_path, asset_id="robots/arm").info.action_dim == 7


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda stats: stats.pop("actions"), "has no 'actions'; it has 'state'"),
        (lambda stats: stats["state"].pop("q99"), "'state' has no q99.*compute the statistics"),
        (lambda stats: stats["state"].pop("mean"), "has no statistics as openpi writes them"),
        (lambda stats: stats["state"]["q01"].pop(), "of 'state' differ in length"),
        (lambda stats: stats.update(actions={"mean": "x"}), "has no statistics as openpi"),
    ],
)
def test_broken_statistics_are_named(tmp_path, spoil, words):
    stats = statistics(MICRO)
    spoil(stats)
    openpi(tmp_path, MICRO, stats)
    with pytest.raises(CheckpointError, match=words):
        serving(tmp_path)


def test_without_any_statistics_both_kinds_of_files_are_named(tmp_path):
    openpi(tmp_path, MICRO)
    (tmp_path / "assets/robots/arm/norm_stats.json").unlink()
    (tmp_path / "config.json").write_bytes((checkpoint(MICRO) / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"LeRobot writes .* or openpi's assets/<id>/norm_"):
        serving(tmp_path)


def test_an_instruction_that_would_cut_off_the_state_is_refused(tmp_path):
    for adapter in (serving(checkpoint(MICRO)), serving(openpi(tmp_path, MICRO))):
        images = seen(MICRO).images if adapter.info.cameras == CAMERAS else both(MICRO).images
        long = both(MICRO, images=images, instructions=("fold", "pick it up and " * 20))
        with pytest.raises(
            InvalidRequestError, match=r"a prompt of \d+ tokens.*takes 200; shorten"
        ):
            adapter.request(long)
