"""What a policy takes and gives, by the `config.json` of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from phalanx.errors import CheckpointError
from phalanx.processing.policy.normalizer import ACTION_TYPE, VISUAL, Feature
from phalanx.processing.policy.transition import ACTION, STATE

CONFIG_FILE = "config.json"


class _Config(msgspec.Struct, frozen=True):
    """The part of it that all policies have; the model reads the rest."""

    type: str
    input_features: dict[str, Feature]
    output_features: dict[str, Feature]
    chunk_size: int


@dataclass(frozen=True)
class PolicyFeatures:
    """`cameras`: (channels, height, width) of each, by the checkpoint's name, in its order."""

    policy: str
    cameras: Mapping[str, tuple[int, int, int]]
    state_dim: int | None
    action_dim: int
    horizon: int

    @classmethod
    def read(cls, directory: Path) -> PolicyFeatures:
        """Raises `CheckpointError` naming the file and what it lacks."""
        path = directory / CONFIG_FILE
        try:
            config = msgspec.json.decode(path.read_bytes(), type=_Config)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist; give the folder of a checkpoint as LeRobot saves it"
            ) from None
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{path} is no policy's configuration: {error}") from error
        action = config.output_features.get(ACTION)
        if action is None or action.type != ACTION_TYPE or len(action.shape) != 1:
            raise CheckpointError(f"{path}: output_features has no {ACTION!r} of one dimension")
        state = config.input_features.get(STATE)
        cameras: dict[str, tuple[int, int, int]] = {}
        for name, feature in config.input_features.items():
            if feature.type == VISUAL:
                if len(feature.shape) != 3:
                    raise CheckpointError(
                        f"{path}: the camera {name!r} has shape {feature.shape}, which is not "
                        "[channels, height, width]"
                    )
                channels, height, width = feature.shape
                cameras[name] = (channels, height, width)
        return cls(
            policy=config.type,
            cameras=cameras,
            state_dim=None if state is None else state.shape[0],
            action_dim=action.shape[0],
            horizon=config.chunk_size,
        )
