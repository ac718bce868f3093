"""What a request is conditioned on, made ready: an image, the beginning of a video, or what a robot
sees; and its actions.

Pixels come in as uint8 levels, or as float in [0, 1]; they go out as float32 in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from phalanx.errors import InvalidRequestError
from phalanx.models.cosmos3.geometry import SPATIAL_STRIDE, TEMPORAL_STRIDE
from phalanx.models.cosmos3.vae.codec import WanVae

TIERS: dict[int, tuple[tuple[int, int], ...]] = {
    256: ((256, 256), (256, 320), (320, 256), (192, 320), (320, 192)),
    480: ((640, 640), (544, 736), (736, 544), (480, 832), (832, 480)),
    704: ((960, 960), (832, 1088), (1088, 832), (704, 1280), (1280, 704)),
    720: ((960, 960), (832, 1104), (1104, 832), (720, 1280), (1280, 720)),
}
"""The canvases, height and width, of each resolution tier of robots' observations."""


@dataclass(frozen=True, eq=False)
class Observation:
    """What a robot sees, on its canvas: `pixels` [3, F, height, width] in [-1, 1].

    `content` are the rows and columns of latents that it covers; the rest of the canvas is filled
    up, is encoded with it, and is cut off then.
    """

    pixels: Tensor
    content: tuple[int, int]

    @property
    def canvas(self) -> tuple[int, int]:
        """Height and width in pixels, which an action's prompt names."""
        height, width = self.pixels.shape[2:]
        return height, width


def image_frame(image: Tensor, height: int, width: int) -> Tensor:
    """An image [3, H, W] as the first frame [3, 1, height, width] of a video.

    It is scaled to cover the frame, cut around its middle, and rounded to 8 bits.
    """
    # Scaled as levels: a float in between may be rounded to the other side.
    levels = _cover(_floats(image[None], "image") * 255, height, width).round().clamp_(0, 255)
    return _signed(levels / 255).transpose(0, 1)


def clip_frames(
    clip: Tensor,
    height: int,
    width: int,
    latent_frames: Collection[int] = (0, 1),
    keep: Literal["first", "last"] = "first",
) -> Tensor:
    """The first (or last) frames of `clip` [F, 3, H, W] that the clean `latent_frames` stand for, as
    [3, 1 + 4 * max, height, width]; a short clip's last frame is repeated.
    """
    wanted = frames_of(latent_frames)
    kept = clip[-wanted:] if keep == "last" else clip[:wanted]
    covering = _cover(_floats(kept, "video"), height, width)
    return _signed(_lasting(covering, wanted)).transpose(0, 1)


def canvas_of(height: int, width: int, tier: int) -> tuple[int, int]:
    """The canvas of `tier` whose shape is nearest to that of a picture of `height` x `width`."""
    canvases = TIERS.get(tier)
    if canvases is None:
        raise InvalidRequestError(
            f"resolution_tier={tier}; allowed: {', '.join(map(str, TIERS))}",
            field="resolution_tier",
        )
    shape = height / width
    return min(canvases, key=lambda canvas: abs(canvas[0] / canvas[1] - shape))


def fit_observation(clip: Tensor, tier: int, frames: int | None = None) -> Observation:
    """`clip` [F, 3, H, W] on the canvas of `tier`: scaled down where it is larger, never up, and
    filled up to the right and below with its mirror image, or its edge where it is too small.

    `frames`: cut to so many, or its last one repeated. Sides that are no multiples of 16 pixels are
    first scaled to the next smaller ones: uint8 as images are, float by the nearest pixels.
    """
    height, width = clip.shape[2:]
    if min(height, width) < SPATIAL_STRIDE:
        raise InvalidRequestError(
            f"an observation of {height} x {width} pixels is smaller than {SPATIAL_STRIDE} x "
            f"{SPATIAL_STRIDE}; give a larger picture",
            field="cond_video_pixels",
        )
    whole = (height - height % SPATIAL_STRIDE, width - width % SPATIAL_STRIDE)
    if whole != (height, width) and clip.dtype == torch.uint8:
        clip = functional.interpolate(clip, whole, mode="bilinear", antialias=True)
    pixels = _signed(_floats(clip if frames is None else clip[:frames], "observation"))
    if pixels.shape[2:] != whole:
        pixels = functional.interpolate(pixels, whole)
    canvas = canvas_of(*whole, tier)
    scale = min(1.0, canvas[0] / whole[0], canvas[1] / whole[1])
    content = (max(1, int(whole[0] * scale + 0.5)), max(1, int(whole[1] * scale + 0.5)))
    if scale < 1:
        pixels = functional.interpolate(pixels, content, mode="bicubic", antialias=True)
    fill = (canvas[0] - content[0], canvas[1] - content[1])
    mirrors = fill[0] < content[0] and fill[1] < content[1]
    pixels = functional.pad(
        pixels, (0, fill[1], 0, fill[0]), mode="reflect" if mirrors else "replicate"
    )
    if frames is not None:
        pixels = _lasting(pixels, frames)
    rows, columns = (max(1, side // SPATIAL_STRIDE) for side in content)
    return Observation(pixels.transpose(0, 1), (rows, columns))


def frames_of(latent_frames: Collection[int]) -> int:
    """How many of a video's first frames its latents up to the last of these depend on."""
    return 1 + TEMPORAL_STRIDE * max(latent_frames, default=0)


def clean_latents(
    vae: WanVae, pixels: Tensor, clean_frames: Collection[int], content: tuple[int, int]
) -> Tensor:
    """Normalised latents [z, T', *content] of a clip [3, F, H, W] up to the last clean frame.

    Later frames cannot change them and are not looked at; of a clip that is short of them the last
    frame is repeated. What is beyond `content` rows and columns is cut off.
    """
    wanted = frames_of(clean_frames)
    frames = _lasting(pixels[:, :wanted].transpose(0, 1), wanted)
    latents = vae.encode(frames.transpose(0, 1))
    return latents[:, :, : content[0], : content[1]].contiguous()


def padded_actions(actions: Tensor, chunk: int, action_dim: int) -> Tensor:
    """Raw actions [rows, raw] as float32 [chunk, action_dim]: cut, or the last one repeated, and
    zeros in the columns that they lack.
    """
    rows, raw = actions.shape
    if raw > action_dim or not rows:
        raise InvalidRequestError(
            f"cond_action has {rows} rows of {raw} numbers; give at least one, of at most "
            f"action_dim={action_dim}",
            field="cond_action",
        )
    return functional.pad(_lasting(actions.float(), chunk), (0, action_dim - raw))


def _lasting(items: Tensor, count: int) -> Tensor:
    """The first `count` of `items`, the last of which is repeated if they are fewer."""
    missing = count - len(items)
    if missing <= 0:
        return items[:count]
    return torch.cat((items, items[-1:].expand(missing, *items.shape[1:])))


def _floats(pixels: Tensor, what: str) -> Tensor:
    """As float32 in [0, 1]."""
    if pixels.dim() != 4 or pixels.shape[1] != 3 or 0 in pixels.shape:
        raise InvalidRequestError(
            f"{what} has shape {tuple(pixels.shape)}; give colors, height and width behind the "
            "frames: [frames, 3, H, W]"
        )
    if pixels.dtype == torch.uint8:
        return pixels.float() / 255
    if not pixels.is_floating_point():
        raise InvalidRequestError(
            f"{what} is {pixels.dtype}; give uint8 levels, or floats from 0 to 1"
        )
    return pixels.float()


def _signed(pixels: Tensor) -> Tensor:
    """[0, 1] as [-1, 1]."""
    return pixels * 2 - 1


def _cover(pixels: Tensor, height: int, width: int) -> Tensor:
    """Scaled so that both sides are at least these, and cut around the middle."""
    before = pixels.shape[2:]
    scale = max(height / before[0], width / before[1])
    # A side that fits exactly may be larger by rounding.
    size = [
        max(least, _rounded_up(side * scale))
        for side, least in zip(before, (height, width), strict=True)
    ]
    if tuple(size) != tuple(before):
        pixels = functional.interpolate(pixels, size, mode="bilinear", antialias=True)
    # Half a pixel is rounded to the even side, as torchvision's crop does.
    top, left = round((size[0] - height) / 2), round((size[1] - width) / 2)
    return pixels[:, :, top : top + height, left : left + width]


def _rounded_up(side: float) -> int:
    return -int(-side // 1)
