"""What stands between a robot and a policy: the checkpoint's steps, with the robot's own names.

It keeps nothing of a request, so any number of threads may use it at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phalanx.errors import ConfigurationError, InvalidRequestError
from phalanx.processing.policy.adapter_settings import AdapterSettings
from phalanx.processing.policy.camera_names import CameraNames
from phalanx.processing.policy.features import PolicyFeatures
from phalanx.processing.policy.normalizer import Normalizer
from phalanx.processing.policy.observation_reader import ObservationReader
from phalanx.processing.policy.pipeline import Processors
from phalanx.processing.policy.processor_files import read_processors
from phalanx.processing.policy.relative import RelativeActions
from phalanx.processing.policy.rename import RenameObservations
from phalanx.processing.policy.step import Surroundings
from phalanx.processing.policy.transition import STATE, Transition
from phalanx.schema.observation import Actions, Observation, PolicyInfo


@dataclass(frozen=True)
class PolicyProcessor:
    """`info` is what clients are told; `features` what the checkpoint says."""

    features: PolicyFeatures
    processors: Processors
    reader: ObservationReader
    info: PolicyInfo

    @classmethod
    def from_checkpoint(
        cls,
        directory: Path,
        settings: AdapterSettings,
        *,
        sizes: Sequence[tuple[int, int]] = (),
        strict_cameras: bool = False,
        inputs: Sequence[str] = (),
    ) -> PolicyProcessor:
        """Read the checkpoint's processors; its weights are not needed.

        Further arguments as of `of`. Raises `CheckpointError` naming file and step, and what `of`
        does.
        """
        features = PolicyFeatures.read(directory)
        tokenizer_dir = None if settings.tokenizer_dir is None else Path(settings.tokenizer_dir)
        processors = read_processors(Surroundings(directory, tokenizer_dir, device="cpu"))
        return cls.of(
            features,
            processors,
            settings,
            sizes=sizes,
            strict_cameras=strict_cameras,
            inputs=inputs,
        )

    @classmethod
    def of(
        cls,
        features: PolicyFeatures,
        processors: Processors,
        settings: AdapterSettings,
        *,
        sizes: Sequence[tuple[int, int]] = (),
        strict_cameras: bool = False,
        inputs: Sequence[str] = (),
    ) -> PolicyProcessor:
        """`sizes`: (height, width) that images must have, in the order of the cameras; with
        `strict_cameras` those of the checkpoint, all of whose cameras must then be there. `inputs`:
        names of further arrays that the policy's own adapter reads. Raises `ConfigurationError` for
        settings that the checkpoint does not fit.
        """
        names = CameraNames(features.cameras, settings.image_names, _renamed(processors))
        if strict_cameras:
            sizes = [(height, width) for _, height, width in features.cameras.values()]
        state_dim = _state_dim(features, processors, settings.state_dim)
        reader = ObservationReader(
            names=names,
            cameras=features.cameras,
            sizes=dict(zip(features.cameras, sizes, strict=False)),
            state_dim=state_dim,
            state_names=tuple(settings.state_names),
            inputs=tuple(inputs),
            all_cameras=strict_cameras,
        )
        info = PolicyInfo(
            policy=features.policy,
            cameras=names.shown,
            state_dim=state_dim,
            action_dim=_action_dim(features, settings.action_dim),
            horizon=features.horizon,
        )
        return cls(features, processors, reader, info)

    def prepare(self, observation: Observation) -> Transition:
        """What the policy sees. Raises `InvalidRequestError` naming what it cannot use."""
        return self.processors.before(self.reader.read(observation))

    def actions(self, output: Tensor, observation: Observation) -> Actions:
        """The robot's actions of a policy's output (B, horizon, at least action_dim)."""
        own = output[..., : self.features.action_dim].detach().to("cpu", torch.float32)
        state = self._reference_state(observation)
        done = self.processors.after(Transition(actions=own, reference_state=state))
        assert done.actions is not None
        values = done.actions[:, : observation.horizon, : self.info.action_dim].numpy()
        return Actions(values if observation.batched else values[0])

    def normalized_actions(self, actions: Tensor, observation: Observation) -> Tensor:
        """Actions in the robot's units as the policy gives them, for what it is to go on from.

        Raises `InvalidRequestError` where they have another width than the checkpoint's.
        """
        if actions.shape[-1] != self.features.action_dim:
            raise InvalidRequestError(
                f"earlier actions have {actions.shape[-1]} numbers; this policy gives "
                f"{self.features.action_dim}",
                field="rtc",
            )
        state = self._reference_state(observation)
        seen = Transition({} if state is None else {STATE: state}, actions=actions)
        for step in self.processors.before.steps:
            if isinstance(step, RelativeActions | Normalizer):
                seen = step(seen)
        assert seen.actions is not None
        return seen.actions

    def _reference_state(self, observation: Observation) -> Tensor | None:
        """The state that relative actions are relative to: the robot's own."""
        if self.reader.state_dim is None:
            return None
        return self.reader.state(observation)


def _renamed(processors: Processors) -> Mapping[str, str]:
    renamed: dict[str, str] = {}
    for step in processors.before.steps:
        if isinstance(step, RenameObservations):
            renamed.update(step.settings.rename_map)
    return renamed


def _state_dim(features: PolicyFeatures, processors: Processors, given: int | None) -> int | None:
    """The width of the robot's state, which statistics fix and a checkpoint without them bounds."""
    if features.state_dim is None:
        if given is not None:
            raise ConfigurationError(f"state_dim={given}: this checkpoint takes no state")
        return None
    if given is None:
        return features.state_dim
    fixed = given > features.state_dim or any(
        isinstance(step, Normalizer) and STATE in step.statistics
        for step in processors.before.steps
    )
    if fixed and given != features.state_dim:
        raise ConfigurationError(
            f"state_dim={given}: this checkpoint takes a state of {features.state_dim} numbers; "
            "leave it out, or give that"
        )
    return given


def _action_dim(features: PolicyFeatures, given: int | None) -> int:
    if given is not None and given > features.action_dim:
        raise ConfigurationError(
            f"action_dim={given}: this checkpoint gives actions of {features.action_dim} numbers; "
            "leave it out, or give at most that"
        )
    return features.action_dim if given is None else given
