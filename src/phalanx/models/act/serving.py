"""Between robots and ACT: all of the checkpoint's cameras, each in the size it was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.models.act.request import ACTArgs, ACTRequest
from phalanx.processing.policy import PolicyProcessor, adapter_settings
from phalanx.processing.policy.parameters import check_parameters
from phalanx.processing.policy.transition import STATE
from phalanx.schema.observation import Actions, Observation, PolicyInfo


class ACTServing:
    """A `PolicyAdapter`; the weights are not read."""

    def __init__(self, args: ACTArgs, settings: Mapping[str, Any]) -> None:
        self._processor = PolicyProcessor.from_checkpoint(
            Path(args.checkpoint_dir), adapter_settings(settings), strict_cameras=True
        )

    @property
    def info(self) -> PolicyInfo:
        return self._processor.info

    def request(self, observation: Observation) -> ACTRequest:
        check_parameters(observation, self.info.policy)
        seen = self._processor.prepare(observation).observation
        return ACTRequest({key: seen[key] for key in self._processor.features.cameras}, seen[STATE])

    def actions(self, output: Tensor, observation: Observation) -> Actions:
        return self._processor.actions(output, observation)
