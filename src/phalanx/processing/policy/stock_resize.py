"""Resizes images as LeRobot's own policy server does, for robots that were tuned on it."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor


def stock_resize(images: Tensor, height: int, width: int) -> Tensor:
    """uint8 images (B, H, W, C) as (B, C, height, width): stretched, on whole numbers, each alone.

    Rounding depends on the layout in memory, which is therefore kept.
    """
    rows = [
        functional.interpolate(
            image.permute(2, 0, 1).unsqueeze(0), (height, width), mode="bilinear"
        )
        for image in images
    ]
    return torch.cat(rows)
