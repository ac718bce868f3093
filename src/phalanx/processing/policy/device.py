"""Moves tensors to the device that the policy runs on, and floats to the dtype that it wants."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import msgspec
import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.processing.policy.step import SettingsStep, StepRecord, Surroundings
from phalanx.processing.policy.transition import Transition

NAME = "device_processor"
DTYPES = {
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
    "float64": torch.float64,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
}


class DeviceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: str = "cpu"
    float_dtype: str | None = None


@dataclass(frozen=True)
class MoveToDevice(SettingsStep[DeviceSettings]):
    """`device` is where it moves to, which the surroundings may have set instead of the file."""

    name = NAME
    settings_cls = DeviceSettings

    device: str

    @classmethod
    def read(cls, record: StepRecord, surroundings: Surroundings) -> Self:
        settings = record.settings(DeviceSettings)
        if settings.float_dtype is not None and settings.float_dtype not in DTYPES:
            raise CheckpointError(
                f"{record.where} ({NAME}): float_dtype={settings.float_dtype!r}; allowed: "
                f"{', '.join(DTYPES)} or null"
            )
        return cls(settings, surroundings.device or settings.device)

    def __call__(self, transition: Transition) -> Transition:
        moved = {name: self._move(value) for name, value in transition.observation.items()}
        actions = transition.actions
        return replace(
            transition,
            observation=moved,
            actions=None if actions is None else self._move(actions),
        )

    def _move(self, value: Tensor) -> Tensor:
        name = self.settings.float_dtype
        dtype = DTYPES[name] if name is not None and value.is_floating_point() else value.dtype
        return value.to(self.device, dtype)
