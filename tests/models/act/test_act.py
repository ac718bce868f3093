"""ACT: LeRobot's own actions on the fixture's observations, through the engine and its adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx import DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.errors import CheckpointError, InvalidRequestError
from phalanx.models.act.entry import ACTEntry
from phalanx.models.act.model import plane_positions
from phalanx.models.act.request import ACTArgs, ACTRequest
from tests.models.act.weights import write_checkpoint
from tests.processing.policy.references import POLICIES, both, one, processor, stored

SOURCE = Path(__file__).parents[3] / "src" / "phalanx" / "models" / "act"
MAX_LINES = 350
TOLERANCE = 1e-5
FRONT, WRIST = "observation.images.front", "observation.images.wrist"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(POLICIES / "act", tmp_path_factory.mktemp("act") / "checkpoint")


def engine_of(checkpoint: Path) -> Engine:
    config = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1))
    return Engine(EngineArgs("act", ACTArgs(checkpoint), config))


@pytest.fixture(scope="module")
def engine(checkpoint):
    with engine_of(checkpoint) as running:
        yield running


@pytest.fixture(scope="module")
def serving(checkpoint):
    return ACTEntry.policy(ACTArgs(checkpoint), {})


@pytest.fixture(scope="module")
def lerobots() -> torch.Tensor:
    """What LeRobot answers with the same weights, see `make_reference.py`."""
    return load_file(Path(__file__).parent / "lerobot.safetensors")["normalized_actions"]


def prepared(rows: slice = slice(None)) -> ACTRequest:
    io = stored("act")
    images = {name: io[f"pre.{name}"][rows] for name in (FRONT, WRIST)}
    return ACTRequest(images, io["pre.observation.state"][rows])


def test_actions_are_lerobots(engine, lerobots):
    actions = engine.step(prepared())
    assert actions.dtype == torch.float32
    assert float((actions - lerobots).abs().max()) <= TOLERANCE


def test_a_row_of_a_batch_is_what_it_is_alone(engine, lerobots):
    for row in range(2):
        alone = engine.step(prepared(slice(row, row + 1)))
        assert float((alone[0] - lerobots[row]).abs().max()) <= TOLERANCE


def test_a_robot_gets_lerobots_actions_in_its_own_units(engine, serving, lerobots):
    wanted = processor("act").actions(lerobots, both("act")).values
    actions = serving.actions(engine.step(serving.request(both("act"))), both("act")).values
    scale = np.maximum(1, np.abs(wanted))
    assert float((np.abs(actions - wanted) / scale).max()) <= TOLERANCE
    single = serving.actions(engine.step(serving.request(one("act"))), one("act", horizon=5))
    assert single.values.shape == (5, 6)


def test_every_input_matters(engine, lerobots):
    """That of an image is far above the tolerance; which camera saw it, ACT itself does not tell."""
    request = prepared()
    blind = ACTRequest({**request.images, WRIST: torch.zeros(2, 3, 48, 64)}, request.state)
    assert float((engine.step(blind) - lerobots).abs().max()) > 100 * TOLERANCE
    still = ACTRequest(request.images, torch.zeros_like(request.state))
    assert float((engine.step(still) - lerobots).abs().max()) > 100 * TOLERANCE


def test_the_adapter_says_what_a_robot_must_send(serving):
    info = serving.info
    assert (info.policy, info.cameras, info.state_dim) == ("act", ("front", "wrist"), 6)
    assert (info.action_dim, info.horizon) == (6, 20)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"images": {"front": np.zeros((48, 64, 3), np.uint8)}}, "no image of wrist.*needs all"),
        ({"images": {"top": np.zeros((48, 64, 3), np.uint8)}}, "no camera 'top'"),
        ({"state": np.zeros(8, np.float32)}, "8 numbers; this policy takes 6"),
        ({"parameters": {"num_steps": 3}}, "num_steps.*knows lerobot"),
        ({"parameters": {"lerobot": {"policy_type": "pi05"}}}, "runs 'act'"),
    ],
)
def test_what_act_cannot_use_is_said_in_words(serving, changed, words):
    with pytest.raises(InvalidRequestError, match=words):
        serving.request(one("act", **changed))


def test_images_of_another_size_are_resized_for_lerobots_clients_only(serving):
    images = {name: np.zeros((96, 128, 3), np.uint8) for name in ("front", "wrist")}
    with pytest.raises(InvalidRequestError, match="'front' is 96 x 128.*takes 48 x 64"):
        serving.request(one("act", images=images))
    stretched = serving.request(one("act", images=images, parameters={"lerobot": {}}))
    assert stretched.images[FRONT].shape == (1, 3, 48, 64)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ACTRequest({FRONT: torch.zeros(1, 3, 48, 64)}, torch.zeros(1, 6)), "takes .*wrist"),
        (ACTRequest(prepared().images, torch.zeros(2, 7)), r"shape \(2, 6\)"),
        (ACTRequest(prepared().images, torch.full((2, 6), torch.nan)), "not finite"),
        (ACTRequest(prepared().images, torch.zeros(2, 6, dtype=torch.int64)), "give floats"),
        (
            ACTRequest(
                {name: torch.zeros(9, 3, 48, 64) for name in (FRONT, WRIST)}, torch.zeros(9, 6)
            ),
            "9 rows; this policy takes 1 to max_batch_size=8",
        ),
    ],
    ids=["camera", "width", "nan", "dtype", "rows"],
)
def test_tensors_that_cannot_be_served_are_refused(engine, request_, words):
    with pytest.raises(InvalidRequestError, match=words):
        engine.step(request_)


def edited(checkpoint: Path, tmp_path: Path, **fields: object) -> Path:
    shutil.copytree(checkpoint, tmp_path / "edited")
    path = tmp_path / "edited" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return tmp_path / "edited"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vision_backbone": "resnet50"}, "resnet50"),
        ({"replace_final_stride_with_dilation": True}, "without dilation"),
        ({"type": "pi05"}, "this plugin loads ACT"),
        ({"dim_model": 32}, "size mismatch"),
    ],
)
def test_a_checkpoint_that_is_not_supported_is_refused(checkpoint, tmp_path, fields, words):
    with pytest.raises(CheckpointError, match=words):
        engine_of(edited(checkpoint, tmp_path, **fields))


def test_a_tensor_that_is_missing_is_named(checkpoint, tmp_path):
    path = edited(checkpoint, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.action_head.bias"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"action_head\.bias"):
        engine_of(path.parent)


def test_positions_of_a_feature_map_tell_rows_and_columns_apart():
    at = plane_positions(torch.zeros(1, 1, 2, 3), 8)
    assert at.shape == (6, 8)
    assert torch.equal(at[0, :4], at[1, :4]) and not torch.equal(at[0, 4:], at[1, 4:])
    assert not torch.equal(at[0, :4], at[3, :4]) and torch.equal(at[0, 4:], at[3, 4:])


def test_a_policy_is_a_small_plugin():
    assert sum(len(path.read_text().splitlines()) for path in SOURCE.glob("*.py")) < MAX_LINES
