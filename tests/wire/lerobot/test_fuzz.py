"""Spoilt pickles and messages are decoded or refused: `make test-long` tries for longer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from phalanx.wire import lerobot as wire
from tests.wire.fuzzing import LONG_S, fuzz_for, mutations, outcome
from tests.wire.lerobot.malicious import CORPUS
from tests.wire.lerobot.pickles import CURRENT, config, observation, recorded

SENSORS = {
    "a": 1.5,
    "b": np.float32(2.0),
    "front": np.arange(48, dtype=np.uint8).reshape(4, 4, 3),
    "t": torch.arange(6.0),
    "task": "pick",
}
OBSERVATIONS = (
    observation(SENSORS),
    observation(SENSORS, protocol=5),
    recorded("timed_observation_variants"),
    *CORPUS.values(),
)
CONFIGS = (config(), recorded("remote_policy_config"))
ACTIONS = (
    wire.encode_actions(np.ones((3, 2), np.float32), 1.0, 4, 30.0, CURRENT),
    recorded("actions_50x6"),
)
PARTS = (wire.encode_upload_part(wire.TransferState.END, b"abc"), wire.encode_data(b"abc"))


def decode_any(data: bytes) -> None:
    for decode in (
        wire.decode_observation,
        wire.decode_policy_instructions,
        wire.decode_actions,
        wire.decode_upload_part,
        wire.decode_data,
    ):
        outcome(decode, data)


def whole(data: bytes) -> wire.TimedObservation:
    """Also whatever a policy would be given."""
    timed = wire.decode_observation(data)
    wire.to_observation(INSTRUCTIONS, timed)
    return timed


JOINTS = {"j0.pos": 0.5, "j1.pos": 1.5, "front": np.zeros((4, 6, 3), np.uint8)}
TIMED = wire.decode_observation(observation(JOINTS))
INSTRUCTIONS = wire.decode_policy_instructions(config())


@settings(max_examples=150, derandomize=True, deadline=None)
@given(mutations(OBSERVATIONS))
def test_observations(data):
    outcome(whole, data)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(mutations(CONFIGS + ACTIONS + PARTS))
def test_everything_else(data):
    decode_any(data)


@pytest.mark.long
def test_observations_for_long():
    fuzz_for(LONG_S, whole, (*[observation(SENSORS | JOINTS)] * 20, *OBSERVATIONS))


@pytest.mark.long
def test_everything_else_for_long():
    def decode(data: bytes) -> None:
        decode_any(data)
        wire.to_observation(wire.decode_policy_instructions(data), TIMED)

    fuzz_for(LONG_S, decode, CONFIGS + ACTIONS + PARTS)
