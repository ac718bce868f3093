"""The formulas, by hand; and statistics that are missing or of another shape."""

from __future__ import annotations

import pytest
import torch

from phalanx.errors import CheckpointError
from phalanx.processing.policy.normalization import NormalizationMode, normalize, unnormalize
from phalanx.processing.policy.normalizer import Normalizer, Unnormalizer
from phalanx.processing.policy.step import StepRecord, Surroundings
from phalanx.processing.policy.transition import Transition

VALUES = torch.tensor([[0.0, 4.0], [2.0, 4.0]])
STATISTICS = {
    "mean": torch.tensor([1.0, 4.0]),
    "std": torch.tensor([2.0, 0.0]),
    "min": torch.tensor([0.0, 4.0]),
    "max": torch.tensor([4.0, 4.0]),
    "q01": torch.tensor([1.0, 4.0]),
    "q99": torch.tensor([3.0, 4.0]),
    "q10": torch.tensor([0.0, 4.0]),
    "q90": torch.tensor([2.0, 4.0]),
}


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        (NormalizationMode.IDENTITY, [0.0, 4.0]),
        (NormalizationMode.MEAN_STD, [-0.5, 0.0]),
        (NormalizationMode.MIN_MAX, [-1.0, -1.0]),
        # Nothing is clipped: below the quantile is below -1.
        (NormalizationMode.QUANTILES, [-2.0, -1.0]),
        (NormalizationMode.QUANTILE10, [-1.0, -1.0]),
    ],
)
def test_each_mode_and_its_inverse(mode, wanted):
    scaled = normalize(mode, VALUES, STATISTICS, 1e-8)
    assert torch.allclose(scaled[0], torch.tensor(wanted))
    assert torch.allclose(unnormalize(mode, scaled, STATISTICS, 1e-8), VALUES)


def record(mode: str, state: dict[str, torch.Tensor], **extra: object) -> StepRecord:
    config = {
        "eps": 1e-8,
        "features": {
            "observation.state": {"type": "STATE", "shape": [2]},
            "observation.images.front": {"type": "VISUAL", "shape": [3, 4, 4]},
            "action": {"type": "ACTION", "shape": [2]},
        },
        "norm_map": {"STATE": mode, "VISUAL": mode, "ACTION": mode},
        **extra,
    }
    return StepRecord("normalizer_processor", config, "the file, step 3", state)


def stats(feature: str) -> dict[str, torch.Tensor]:
    return {f"{feature}.{name}": value for name, value in STATISTICS.items()}


def test_features_without_statistics_stay_as_they_are():
    step = Normalizer.read(record("MEAN_STD", stats("action")), Surroundings(None))
    images = torch.rand(1, 3, 4, 4)
    seen = {"observation.state": VALUES[:1], "observation.images.front": images}
    done = step(Transition(seen))
    assert torch.equal(done.observation["observation.state"], VALUES[:1])
    assert torch.equal(done.observation["observation.images.front"], images)


def test_flat_statistics_of_images_are_of_their_channels():
    flat = {
        "observation.images.front.mean": torch.tensor([0.0, 0.5, 1.0]),
        "observation.images.front.std": torch.ones(3),
    }
    step = Normalizer.read(record("MEAN_STD", flat), Surroundings(None))
    done = step(Transition({"observation.images.front": torch.ones(1, 3, 4, 4)}))
    channels = done.observation["observation.images.front"][0, :, 0, 0]
    assert torch.allclose(channels, torch.tensor([1.0, 0.5, 0.0]))


def test_only_chosen_keys_are_normalized():
    chosen = record("MEAN_STD", stats("observation.state"), normalize_observation_keys=[])
    step = Normalizer.read(chosen, Surroundings(None))
    done = step(Transition({"observation.state": VALUES}))
    assert torch.equal(done.observation["observation.state"], VALUES)
    assert step.config["normalize_observation_keys"] == []


def test_actions_are_unnormalized():
    step = Unnormalizer.read(record("QUANTILES", stats("action")), Surroundings(None))
    done = step(Transition(actions=torch.zeros(1, 5, 2)))
    assert torch.allclose(done.actions, torch.tensor([2.0, 4.0]).expand(1, 5, 2))


def test_missing_statistics_are_named():
    lacking = stats("observation.state")
    del lacking["observation.state.q99"]
    with pytest.raises(CheckpointError, match=r"the file, step 3.*QUANTILES.*q01 and q99"):
        Normalizer.read(record("QUANTILES", lacking), Surroundings(None))


def test_statistics_of_another_width_are_refused():
    wide = {f"observation.state.{name}": torch.zeros(5) for name in STATISTICS}
    with pytest.raises(CheckpointError, match=r"5 numbers for a feature of shape \[2\]"):
        Normalizer.read(record("MEAN_STD", wide), Surroundings(None))


def test_an_unknown_mode_is_refused():
    with pytest.raises(CheckpointError, match="SIGMOID"):
        Normalizer.read(record("SIGMOID", {}), Surroundings(None))
