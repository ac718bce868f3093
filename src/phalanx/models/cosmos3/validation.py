"""What makes a request to Cosmos3 impossible, found before it is queued: each refusal names the
field, its value, what is allowed, and what to do.

Texts, times and guidance are checked alike for both plugins, and here; a video's own fields too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from phalanx.errors import InvalidRequestError
from phalanx.models.cosmos3.args import Cosmos3Args
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.models.cosmos3.geometry import SPATIAL_STRIDE, TEMPORAL_STRIDE, MediaShape
from phalanx.models.cosmos3.request import OUTPUTS, Cosmos3T2VRequest
from phalanx.schema.limits import Limits

MAX_STEPS = 1000
MAX_SEED = 2**63
MAX_TIMESTEP = 1000

TEXT, PATCH, SOUND, ACTION = "text_ids", "patch", "sound", "action"
"""Rows of `limits.row_shapes`: (longest prompt,), (channels, patch, patch), (numbers of a latent,
latents in 1000 s), (embodiments, numbers of a row); the last two where the checkpoint has them."""


def limits_of(config: Cosmos3Config, args: Cosmos3Args) -> Limits:
    """Everything that `check_video_request` and `check_action_request` ask for."""
    patch = config.latent_patch_size
    shapes: dict[str, tuple[int, ...]] = {
        TEXT: (args.max_text_tokens,),
        PATCH: (config.latent_channel, patch, patch),
    }
    if config.sound_gen:
        shapes[SOUND] = (config.sound_dim, round(1000 * config.sound_latent_fps))
    if config.action_gen:
        shapes[ACTION] = (config.num_embodiment_domains, config.action_dim)
    return Limits(
        context_length=args.max_tokens,
        pool_tokens=args.num_pool_tokens,
        vocab_size=config.vocab_size,
        max_batch_size=args.max_batch_size,
        row_shapes=shapes,
    )


class GuidedRequest(Protocol):
    """What both kinds of requests have."""

    @property
    def text_ids(self) -> Tensor: ...
    @property
    def text_mask(self) -> Tensor: ...
    @property
    def neg_text_ids(self) -> Tensor | None: ...
    @property
    def neg_text_mask(self) -> Tensor | None: ...
    @property
    def video_shape(self) -> tuple[int, int, int]: ...
    @property
    def fps(self) -> float: ...
    @property
    def num_inference_steps(self) -> int: ...
    @property
    def guidance_scale(self) -> float: ...
    @property
    def guidance_interval(self) -> tuple[int, int] | None: ...
    @property
    def flow_shift(self) -> float | None: ...
    @property
    def seed(self) -> int: ...


def check_video_request(request: Cosmos3T2VRequest, limits: Limits) -> None:
    """Refuse a video that can never be made."""
    check_guided(request, limits)
    frames, height, width = request.video_shape
    channels = shape_of(limits, PATCH)[0]
    sound = _sound_frames(request, limits)
    check_size(MediaShape(request.video_shape, request.fps, sound or 0), limits)
    if request.noise is not None:
        check_tensor(request.noise, "noise", (1, channels, frames, height, width))
    check_frames(request.cond_frame_indexes, frames)
    _check_condition(request, channels)
    if request.output not in OUTPUTS:
        raise refusal("output", f"={request.output!r}; allowed: {', '.join(OUTPUTS)}")


def check_guided(request: GuidedRequest, limits: Limits) -> None:
    """Texts, steps, guidance, and whether `video_shape` are three numbers."""
    _check_text(request.text_ids, request.text_mask, "", limits)
    if request.neg_text_ids is not None or request.neg_text_mask is not None:
        _check_text(request.neg_text_ids, request.neg_text_mask, "neg_", limits)
    elif request.guidance_scale != 1:
        raise refusal(
            "neg_text_ids",
            f"is None beside guidance_scale={request.guidance_scale}; give the negative prompt (of "
            "an empty text, where there is none), or guidance_scale=1",
        )
    check_sampling(
        request.num_inference_steps,
        request.guidance_scale,
        request.flow_shift,
        request.guidance_interval,
    )
    check_whole("seed", request.seed, 0, MAX_SEED - 1)
    check_number("fps", request.fps)
    shape = request.video_shape
    if not _is_whole_tuple(shape) or len(shape) != 3 or min(shape) < 1:
        raise refusal(
            "video_shape",
            f"={shape!r} must be latent frames, rows and columns: for F frames of H x W pixels "
            "((F - 1) // 4 + 1, H // 16, W // 16)",
        )


def check_sampling(
    num_inference_steps: object,
    guidance_scale: object,
    flow_shift: object,
    guidance_interval: object,
) -> None:
    """How a request is denoised."""
    check_whole("num_inference_steps", num_inference_steps, 1, MAX_STEPS)
    check_number("guidance_scale", guidance_scale, least=0)
    if flow_shift is not None:
        check_number("flow_shift", flow_shift)
    _check_interval(guidance_interval)


def check_size(shape: MediaShape, limits: Limits) -> None:
    """Refuse more tokens than memory was made ready for."""
    most = limits.context_length
    assert most is not None
    shape = replace(shape, patch_size=shape_of(limits, PATCH)[1])
    rows, columns = shape.patch_grid
    if shape.num_tokens > most:
        raise refusal(
            "video_shape",
            f"={tuple(shape.video)} is {shape.video[0]} x {rows} x {columns} = "
            f"{shape.num_vision_tokens} tokens, with sound and actions {shape.num_tokens}; the "
            f"plugin takes max_tokens={most}: make the video smaller or shorter, or raise "
            "max_tokens where there is memory for it",
        )


def check_latents(
    latents: object, field: str, video: tuple[int, int, int], channels: int, kept: Sequence[int]
) -> None:
    """Refuse latents of another size than the video's, or without the frames that are `kept`."""
    frames, height, width = video
    given = latents.shape[2] if isinstance(latents, Tensor) and latents.dim() == 5 else frames
    if not 1 <= given <= frames:
        raise refusal(field, f"has {given} frames beside video_shape={video}; give 1 to {frames}")
    check_tensor(latents, field, (1, channels, given, height, width))
    last = max(kept, default=0)
    if last >= given:
        raise refusal(field, f"has the latent frames 0 to {given - 1}; frame {last} is to be kept")


def check_pixels(pixels: object, video: tuple[int, int, int], last: int) -> None:
    """Frames of a canvas of whole latents, which holds the video's own in its upper left."""
    field = "cond_video_pixels"
    if not isinstance(pixels, Tensor) or pixels.dim() != 5:
        shape = tuple(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
        raise refusal(field, f"is {shape}; give float (1, 3, frames, height, width)")
    count, height, width = pixels.shape[2:]
    check_tensor(pixels, field, (1, 3, count, height, width))
    frames = video[0]
    least, most = TEMPORAL_STRIDE * last + 1, TEMPORAL_STRIDE * (frames - 1) + 1
    if not least <= count <= most:
        raise refusal(
            field,
            f"has {count} frames; latent frame {last} is to be kept: give {least} to {most} frames",
        )
    for name, side, latent in (("height", height, video[1]), ("width", width, video[2])):
        if side % SPATIAL_STRIDE or side < latent * SPATIAL_STRIDE:
            raise refusal(
                field,
                f"has a {name} of {side}; give a multiple of {SPATIAL_STRIDE}, of at least "
                f"{latent * SPATIAL_STRIDE} for video_shape={video}",
            )
    if pixels.min() < -1.001 or pixels.max() > 1.001:
        raise refusal(
            field,
            f"has values from {float(pixels.min()):.4g} to {float(pixels.max()):.4g}; give pixels in "
            "[-1, 1]",
        )


def check_frames(indexes: Sequence[int], frames: int) -> None:
    """Refuse conditioning frames that the video does not have."""
    if not _is_whole_tuple(indexes):
        raise refusal("cond_frame_indexes", f"={indexes!r} must be a tuple of integers")
    wrong = [index for index in indexes if not 0 <= index < frames]
    if wrong or len(set(indexes)) < len(indexes):
        raise refusal(
            "cond_frame_indexes",
            f"={tuple(indexes)} must be different latent frames from 0 to {frames - 1}",
        )


def check_tensor(value: object, field: str, shape: tuple[int, ...]) -> None:
    """Refuse all but finite floating-point numbers of this shape."""
    if not isinstance(value, Tensor):
        raise refusal(field, f"is {type(value).__name__}; give a float tensor of shape {shape}")
    if not value.is_floating_point():
        raise refusal(field, f"is {value.dtype}; give a float tensor of shape {shape}")
    if tuple(value.shape) != shape:
        raise refusal(field, f"has shape {tuple(value.shape)}; give {shape}")
    if not bool(torch.isfinite(value).all()):
        bad = (~torch.isfinite(value)).nonzero()[0].tolist()
        raise refusal(
            field, f"is not finite at {bad} ({value[tuple(bad)].item()}); give finite numbers"
        )


def check_whole(field: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise refusal(field, f"={value!r} must be an integer from {least} to {most}")


def check_number(field: str, value: object, *, least: float | None = None) -> None:
    """Refuse what is not a finite number, of at least `least`; None: more than 0."""
    real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    assert isinstance(value, int | float) or not real
    if not real or (value <= 0 if least is None else value < least):  # type: ignore[operator]
        allowed = "more than 0" if least is None else f"at least {least}"
        raise refusal(field, f"={value!r} must be a number, {allowed}")


def shape_of(limits: Limits, row: str) -> tuple[int, ...]:
    assert limits.row_shapes is not None
    return limits.row_shapes[row]


def has(limits: Limits, row: str) -> bool:
    assert limits.row_shapes is not None
    return row in limits.row_shapes


def refusal(field: str, what: str) -> InvalidRequestError:
    """`what` goes on from the field's name: "=3 must ..." or "is None; ..."."""
    return InvalidRequestError(f"{field}{'' if what[0] == '=' else ' '}{what}", field=field)


def _check_condition(request: Cosmos3T2VRequest, channels: int) -> None:
    latents, pixels, kept = (
        request.cond_latents,
        request.cond_video_pixels,
        request.cond_frame_indexes,
    )
    if latents is not None and pixels is not None:
        raise refusal("cond_video_pixels", "is given beside cond_latents; give one of both")
    if (latents is None and pixels is None) != (not kept):
        raise refusal(
            "cond_frame_indexes",
            f"={tuple(kept)} must name the latent frames of cond_latents or cond_video_pixels that "
            "are kept, where there are any",
        )
    if latents is not None:
        check_latents(latents, "cond_latents", request.video_shape, channels, kept)
    if pixels is not None:
        check_pixels(pixels, request.video_shape, max(kept))


def _check_text(ids: object, mask: object, prefix: str, limits: Limits) -> None:
    for name, value in ((f"{prefix}text_ids", ids), (f"{prefix}text_mask", mask)):
        if not isinstance(value, Tensor):
            raise refusal(name, f"is {type(value).__name__}; give an int64 tensor (1, tokens)")
        if value.dtype != torch.int64 or value.dim() != 2 or len(value) != 1 or 0 in value.shape:
            raise refusal(
                name,
                f"is {value.dtype} of shape {tuple(value.shape)}; give int64 of shape (1, tokens): "
                "one request is one prompt",
            )
    assert isinstance(ids, Tensor) and isinstance(mask, Tensor)
    if mask.shape != ids.shape:
        raise refusal(
            f"{prefix}text_mask",
            f"has shape {tuple(mask.shape)} beside {prefix}text_ids of {tuple(ids.shape)}",
        )
    count = int(mask.sum())
    if not torch.equal(mask, (torch.arange(mask.shape[1]) < count).long()[None]) or count < 1:
        raise refusal(
            f"{prefix}text_mask",
            "must be ones and then zeros, at least one of them 1: padding is on the right",
        )
    _check_ids(ids[0, :count], f"{prefix}text_ids", limits)


def _check_ids(ids: Tensor, field: str, limits: Limits) -> None:
    (longest,), vocabulary = shape_of(limits, TEXT), limits.vocab_size
    assert vocabulary is not None
    if len(ids) > longest:
        raise refusal(
            field,
            f"has {len(ids)} tokens; the plugin takes max_text_tokens={longest}: shorten the "
            "prompt, or raise max_text_tokens",
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise refusal(
            field,
            f"holds {low if low < 0 else high}; token ids are integers from 0 to {vocabulary - 1}",
        )


def _check_interval(interval: object) -> None:
    if interval is None:
        return
    whole = _is_whole_tuple(interval)
    assert isinstance(interval, tuple) or not whole
    if whole and len(interval) == 2 and 0 <= interval[0] <= interval[1]:  # type: ignore[arg-type,index]
        return
    raise refusal(
        "guidance_interval",
        f"={interval!r} must be two integer timesteps of {MAX_TIMESTEP}, the lower one first",
    )


def _sound_frames(request: Cosmos3T2VRequest, limits: Limits) -> int | None:
    sound = request.sound_frames
    if sound is None:
        if request.sound_noise is not None:
            raise refusal("sound_noise", "is given without sound_frames; say how many there are")
        return None
    if not has(limits, SOUND):
        raise refusal("sound_frames", f"={sound}: this checkpoint makes no sound; leave it out")
    dim, rate = shape_of(limits, SOUND)
    assert limits.context_length is not None
    check_whole("sound_frames", sound, 1, limits.context_length)
    if request.sound_dim != dim:
        raise refusal("sound_dim", f"={request.sound_dim}; this checkpoint's sound has {dim}")
    if round(1000 * request.sound_latent_fps) != rate:
        raise refusal(
            "sound_latent_fps",
            f"={request.sound_latent_fps}; this checkpoint's sound has {rate / 1000} latents a "
            "second",
        )
    if request.sound_noise is not None:
        check_tensor(request.sound_noise, "sound_noise", (1, dim, sound))
    return sound


def _is_whole_tuple(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(one, int) and not isinstance(one, bool) for one in value
    )
