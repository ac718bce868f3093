"""What is answered once a request's latents are denoised, or as far as they were when it was
cancelled; tensors stay on the device.
"""

from __future__ import annotations

import torch

from phalanx.models.cosmos3.request import Cosmos3Action, Cosmos3Video
from phalanx.models.cosmos3.row import MediaRequest


def video_answer(row: MediaRequest) -> Cosmos3Video:
    """Pixels where they were asked for; latents of a request that was cancelled before, and where
    another rank decodes and answers.
    """
    latents = row.latents
    video = latents.vision if row.pixels is None else row.pixels
    return Cosmos3Video(video[None], None if latents.sound is None else latents.sound[None])


def action_answer(row: MediaRequest) -> Cosmos3Action:
    """The actions that were drawn, without the state in front of them; not numbers where the request
    was cancelled before they were: no robot may move by noise.
    """
    latents, inputs = row.latents, row.inputs
    action = None
    if latents.actions is not None and inputs.shape.noisy_rows:
        drawn = latents.actions[inputs.shape.has_state :, : inputs.raw_action_dim]
        action = drawn[None] if row.is_denoised else torch.full_like(drawn[None], torch.nan)
    pixels = None if row.pixels is None else row.pixels[None]
    return Cosmos3Action(action, latents.vision[None], pixels)
