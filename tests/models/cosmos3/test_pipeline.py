"""From words and pictures to pixels and actions: what diffusers' own pipeline makes of the same prompt,
seed and small random checkpoint, stored as `pipeline/expected.npz` (diffusers 0.42.1, float32).
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from phalanx import Engine, EngineArgs
from phalanx.engine_config import DeviceConfig, EngineConfig, RuntimeConfig
from phalanx.models.cosmos3.args import Cosmos3Args, Cosmos3PolicyArgs
from phalanx.models.cosmos3.entry import Cosmos3, Cosmos3Policy
from phalanx.schema.observation import Observation
from phalanx.schema.videos import VideoPrompt
from phalanx.testing.tiny_cosmos3 import write_tiny_cosmos3
from tests.models.cosmos3.stored import FIXTURES

CONFIG = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1))
SETTINGS = {"width": 32, "height": 32, "num_frames": 5, "fps": 8.0, "num_inference_steps": 3}
WORDS = "a hand picks up a cube"
HALF = 1e-3
"""Pixels are stored in half precision."""


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return (np.random.RandomState(seed).rand(height, width, 3) * 255).astype(np.uint8)


@pytest.fixture(scope="module")
def expected():
    return np.load(FIXTURES / "pipeline" / "expected.npz")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = write_tiny_cosmos3(tmp_path_factory.mktemp("cosmos3"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURES / "pipeline" / name, directory / "text_tokenizer" / name)
    return directory


@pytest.fixture(scope="module")
def engine(directory):
    args = Cosmos3Args(directory, native_operators="off")
    with Engine(EngineArgs("cosmos3", args, CONFIG)) as engine:
        yield engine


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("t2v", VideoPrompt(WORDS, negative_prompt="blurred")),
        ("i2v", VideoPrompt(WORDS, image=picture(50, 70))),
        ("v2v", VideoPrompt(WORDS, num_frames=9, clip=np.stack([picture(32, 32, i) for i in range(5)]))),
        ("t2i", VideoPrompt(WORDS, num_frames=1)),
    ],
)  # fmt: skip
def test_videos_are_those_of_diffusers(engine, directory, expected, name, prompt):
    videos = Cosmos3.videos(Cosmos3Args(directory), SETTINGS)
    pixels = engine.step(videos.request(prompt)).video[0].permute(1, 0, 2, 3).numpy()
    assert np.abs(pixels - expected[name]).max() < HALF


def test_actions_are_those_of_diffusers(directory, expected):
    settings = {
        "domain": "droid_lerobot",
        "action_chunk": 8,
        "resolution_tier": 256,
        "num_inference_steps": 3,
        "guidance_scale": 3.0,
    }
    args = Cosmos3PolicyArgs(directory, native_operators="off")
    policy = Cosmos3Policy.policy(args, settings)
    seen = Observation(images={"image": picture(50, 70)}, instructions=("pick up the cube",))
    with Engine(EngineArgs("cosmos3_policy", args, CONFIG)) as engine:
        actions = policy.actions(engine.step(policy.request(seen)), seen)
    assert np.abs(actions.values - expected["action"].reshape(8, 10)).max() < 2e-4
