"""Renames tensors of the observation, from a robot's names to the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
from torch import Tensor

from phalanx.processing.policy.step import StepRecord, Surroundings, as_config
from phalanx.processing.policy.transition import Transition

NAME = "rename_observations_processor"


class RenameSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rename_map: dict[str, str] = {}


@dataclass(frozen=True)
class RenameObservations:
    """Names that are not in the map stay."""

    settings: RenameSettings

    @classmethod
    def read(cls, record: StepRecord, _: Surroundings) -> RenameObservations:
        return cls(record.settings(RenameSettings))

    @property
    def registry_name(self) -> str:
        return NAME

    @property
    def config(self) -> dict[str, object]:
        return as_config(self.settings)

    @property
    def state(self) -> Mapping[str, Tensor]:
        return {}

    def __call__(self, transition: Transition) -> Transition:
        names = self.settings.rename_map
        renamed = {names.get(name, name): value for name, value in transition.observation.items()}
        return replace(transition, observation=renamed)
