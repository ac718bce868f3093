"""What pi0.5 is asked: a prepared observation."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import torch
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
    """A rollout for training, of `Engine.rollout_step`; its output is a `PI05RolloutOutput`.

    `sigmas`: float (B, steps), how noisy each step is; it says how many steps there are. All 0 is
    plain sampling. `step_noise`: float (B, steps, chunk, actions), None: drawn by the engine.
    `compute_values` needs `PI05Config(add_value_head=True)`.
    """

    sigmas: Tensor = field(default_factory=lambda: torch.empty(0))
    step_noise: Tensor | None = None
    compute_values: bool = False
