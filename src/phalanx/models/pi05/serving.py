"""Between robots and pi0.5."""

from __future__ import annotations

from torch import Tensor

from phalanx.models.pi.serving import PiServing
from phalanx.models.pi05.request import PI05Request
from phalanx.schema.observation import Actions, Observation, PolicyInfo


class PI05Serving:
    """A `PolicyAdapter`."""

    def __init__(self, serving: PiServing) -> None:
        self._serving = serving

    @property
    def info(self) -> PolicyInfo:
        return self._serving.info

    def request(self, observation: Observation) -> PI05Request:
        prepared = self._serving.prepare(observation)
        return PI05Request(
            prepared.pixel_values,
            prepared.input_ids,
            prepared.lang_lens,
            prepared.noise,
            image_masks=prepared.image_masks,
            num_steps=prepared.num_steps,
            rtc=prepared.rtc,
        )

    def actions(self, output: Tensor, observation: Observation) -> Actions:
        return self._serving.actions(output, observation)
