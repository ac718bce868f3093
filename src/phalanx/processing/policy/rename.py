"""Renames tensors of the observation, from a robot's names to the checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from phalanx.processing.policy.step import SettingsStep
from phalanx.processing.policy.transition import Transition

NAME = "rename_observations_processor"


class RenameSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rename_map: dict[str, str] = {}


@dataclass(frozen=True)
class RenameObservations(SettingsStep[RenameSettings]):
    """Names that are not in the map stay."""

    name = NAME
    settings_cls = RenameSettings

    def __call__(self, transition: Transition) -> Transition:
        names = self.settings.rename_map
        renamed = {names.get(name, name): value for name, value in transition.observation.items()}
        return replace(transition, observation=renamed)
