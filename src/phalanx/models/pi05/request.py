"""What pi0.5 is asked: a prepared observation."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from phalanx.models.pi.request import RealTimeChunking


@dataclass(frozen=True, eq=False)
class PI05Request:
    """Prepared observations, one a row; nothing is resized or tokenized.

    `pixel_values`: float (B, cameras, 3, S, S) in [-1, 1], computed with in float32. `input_ids`:
    int64 (B, L), padded on the right; `lang_lens`: int64 (B,), how many are no padding. `noise`:
    float (B, chunk, actions) to begin with; None: drawn by the engine. `image_masks`: bool (B,
    cameras), False for a camera that is not there; None: all are. `num_steps`: Euler steps; None:
    the checkpoint's number. `rtc` binds the actions to what is left of the chunk before.

    The output is the normalized actions, float32 (B, chunk, actions).
    """

    pixel_values: Tensor
    input_ids: Tensor
    lang_lens: Tensor
    noise: Tensor | None = None
    _: KW_ONLY
    image_masks: Tensor | None = None
    num_steps: int | None = None
    rtc: RealTimeChunking | None = None


@dataclass(frozen=True, eq=False)
class PI05RolloutRequest(PI05Request):
    """A request of a training rollout; `Engine.step` does not take it."""
