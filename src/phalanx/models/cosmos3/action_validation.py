"""What makes a request for actions impossible, by its mode, found before it is queued."""

from __future__ import annotations

from torch import Tensor

from phalanx.models.cosmos3.geometry import TEMPORAL_STRIDE, MediaShape
from phalanx.models.cosmos3.request import MODES, Cosmos3ActionRequest
from phalanx.models.cosmos3.validation import (
    ACTION,
    PATCH,
    check_frames,
    check_guided,
    check_latents,
    check_pixels,
    check_size,
    check_tensor,
    check_whole,
    has,
    refusal,
    shape_of,
)
from phalanx.schema.limits import Limits

POLICY, FORWARD, INVERSE = MODES
MAX_CHUNK = 4096


def check_action_request(request: Cosmos3ActionRequest, limits: Limits) -> None:
    """Refuse what can never be answered, naming the field."""
    if not has(limits, ACTION):
        raise refusal("mode", f"={request.mode!r}: this checkpoint has no actions; serve `cosmos3`")
    if request.mode not in MODES:
        raise refusal("mode", f"={request.mode!r}; allowed: {', '.join(MODES)}")
    check_guided(request, limits)
    _check_rows(request, limits)
    frames, height, width = request.video_shape
    paired = request.action_chunk // TEMPORAL_STRIDE + 1
    if frames != paired:
        raise refusal(
            "video_shape",
            f"={tuple(request.video_shape)} has {frames} latent frames; action_chunk="
            f"{request.action_chunk} goes with {request.action_chunk + 1} frames, which are {paired}",
        )
    has_state = request.state is not None
    rows = request.action_chunk + has_state
    check_size(
        MediaShape(request.video_shape, request.fps, action_rows=rows, has_state=has_state), limits
    )
    check_frames(request.cond_frame_indexes, frames)
    _check_observation(request, limits)
    if request.noise is not None:
        channels = shape_of(limits, PATCH)[0]
        check_tensor(request.noise, "noise", (1, channels, frames, height, width))


def _check_rows(request: Cosmos3ActionRequest, limits: Limits) -> None:
    """Embodiment, chunk, widths, and the tensors that are made of them."""
    domains, width = shape_of(limits, ACTION)
    check_whole("domain_id", request.domain_id, 0, domains - 1)
    check_whole("action_chunk", request.action_chunk, 1, MAX_CHUNK)
    if request.action_dim != width:
        raise refusal(
            "action_dim", f"={request.action_dim}; this checkpoint's actions have {width} numbers"
        )
    check_whole("raw_action_dim", request.raw_action_dim, 1, width)
    if request.mode == FORWARD:
        _check_given_actions(request)
    elif request.cond_action is not None:
        raise refusal("cond_action", f"is given, and mode={request.mode!r} gives the actions")
    if request.state is not None:
        if request.mode != POLICY:
            raise refusal("state", f"is for mode='policy', not {request.mode!r}; leave it out")
        check_tensor(request.state, "state", (1, request.raw_action_dim))
    if request.action_noise is not None:
        if request.mode == FORWARD:
            raise refusal("action_noise", "is given, and mode='forward_dynamics' draws no actions")
        check_tensor(request.action_noise, "action_noise", (1, request.action_chunk, width))


def _check_given_actions(request: Cosmos3ActionRequest) -> None:
    given = request.cond_action
    if given is None:
        raise refusal(
            "cond_action", "is None; mode='forward_dynamics' shows what given actions lead to"
        )
    count = given.shape[1] if isinstance(given, Tensor) and given.dim() == 3 else 0
    if not 1 <= count <= request.action_chunk:
        shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise refusal(
            "cond_action",
            f"is {shape}; give (1, 1 to {request.action_chunk} actions, {request.raw_action_dim}), "
            "of which the last one is repeated to the end of the chunk",
        )
    check_tensor(given, "cond_action", (1, count, request.raw_action_dim))


def _check_observation(request: Cosmos3ActionRequest, limits: Limits) -> None:
    latents, pixels = request.cond_video_latents, request.cond_video_pixels
    if (latents is None) == (pixels is None):
        both = "are both given" if latents is not None else "are both None"
        raise refusal(
            "cond_video_pixels", f"and cond_video_latents {both}; give what was seen as one of them"
        )
    frames = request.video_shape[0]
    of_mode = tuple(range(frames)) if request.mode == INVERSE else (0,)
    kept = request.cond_frame_indexes or of_mode
    if latents is not None:
        channels = shape_of(limits, PATCH)[0]
        check_latents(latents, "cond_video_latents", request.video_shape, channels, kept)
    else:
        check_pixels(pixels, request.video_shape, max(kept))
