"""What pi0 is asked: a prepared observation with a state."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from phalanx.models.pi.request import RealTimeChunking


@dataclass(frozen=True, eq=False)
class PI0Request:
    """Prepared observations, as in `PI05Request`, with `state`: float (B, size), normalized and
    padded with zeros. `pixel_values` has no row for cameras that the checkpoint says are always
    empty.
    """

    pixel_values: Tensor
    input_ids: Tensor
    lang_lens: Tensor
    state: Tensor
    noise: Tensor | None = None
    _: KW_ONLY
    image_masks: Tensor | None = None
    num_steps: int | None = None
    rtc: RealTimeChunking | None = None
