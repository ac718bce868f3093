"""Between robots and pi0.5."""

from __future__ import annotations

from phalanx.models.pi.serving import PiServing
from phalanx.models.pi05.request import PI05Request
from phalanx.schema.observation import Observation


class PI05Serving(PiServing):
    """See `PiServing`."""

    def request(self, observation: Observation) -> PI05Request:
        prepared = self.prepare(observation)
        return PI05Request(
            prepared.pixel_values,
            prepared.input_ids,
            prepared.lang_lens,
            prepared.noise,
            image_masks=prepared.image_masks,
            num_steps=prepared.num_steps,
            rtc=prepared.rtc,
        )
