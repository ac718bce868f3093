"""Between robots and pi0, whose expert reads the state itself."""

from __future__ import annotations

from phalanx.models.pi.serving import PiServing
from phalanx.models.pi0.request import PI0Request
from phalanx.schema.observation import Observation


class PI0Serving(PiServing):
    """See `PiServing`."""

    def request(self, observation: Observation) -> PI0Request:
        prepared = self.prepare(observation)
        return PI0Request(
            prepared.pixel_values,
            prepared.input_ids,
            prepared.lang_lens,
            prepared.state,
            prepared.noise,
            image_masks=prepared.image_masks,
            num_steps=prepared.num_steps,
            rtc=prepared.rtc,
        )
