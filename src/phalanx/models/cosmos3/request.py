"""What Cosmos3 is asked, and what it answers: videos with or without sound, and robots' actions."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from phalanx.schema.videos import DenoiseProgress

__all__ = [
    "MODES",
    "OUTPUTS",
    "Cosmos3Action",
    "Cosmos3ActionRequest",
    "Cosmos3T2VRequest",
    "Cosmos3Video",
    "DenoiseProgress",
]

MODES = ("policy", "forward_dynamics", "inverse_dynamics")
OUTPUTS = ("pixels", "latents")


@dataclass(frozen=True, eq=False)
class Cosmos3T2VRequest:
    """A video of a prompt, and of an image or a clip where `cond_latents` are given.

    `text_ids`, `neg_text_ids`: int64 (1, S) with the two markers behind the text; `text_mask`,
    `neg_text_mask`: int64 (1, S), 0 for padding on the right. The negative prompt may be None where
    nothing is guided. `video_shape`: latent frames, rows and columns. `noise`: float
    (1, C, T, H, W) to begin with; None: drawn from `seed` on the CPU. `cond_latents`: float
    (1, C, T', H, W), normalized, or `cond_video_pixels`, float (1, 3, F, height, width) in [-1, 1], of
    which the latent frames `cond_frame_indexes` are kept as they are. With `sound_frames` the answer has that many latents of sound.

    `guidance_scale` 1 computes no negative branch. `guidance_interval`: the integer timesteps, both
    ends included, that are guided; None: all. `flow_shift`: a schedule that is shifted by so much;
    None: the checkpoint's own. `output`: `pixels`, or `latents` as they are.
    """

    text_ids: Tensor
    text_mask: Tensor
    neg_text_ids: Tensor | None
    neg_text_mask: Tensor | None
    video_shape: tuple[int, int, int]
    fps: float = 24.0
    num_inference_steps: int = 35
    guidance_scale: float = 6.0
    noise: Tensor | None = None
    seed: int = 42
    cond_latents: Tensor | None = None
    cond_frame_indexes: tuple[int, ...] = ()
    sound_frames: int | None = None
    sound_dim: int = 64
    sound_latent_fps: float = 25.0
    _: KW_ONLY
    sound_noise: Tensor | None = None
    guidance_interval: tuple[int, int] | None = None
    flow_shift: float | None = None
    cond_video_pixels: Tensor | None = None
    output: str = "pixels"


@dataclass(frozen=True, eq=False)
class Cosmos3ActionRequest:
    """Actions of a robot, or what it would see.

    Text as in `Cosmos3T2VRequest`. `mode` policy: actions (and the video) of the first frame;
    forward_dynamics: the video that `cond_action` leads to; inverse_dynamics: the actions that lead
    to the clip. `domain_id` names the embodiment. `action_chunk` rows of `raw_action_dim` numbers,
    in the model's normalized units, of the model's own `action_dim`. The observation is
    `cond_video_latents`, float (1, C, T', H, W), normalized, or `cond_video_pixels`, float
    (1, 3, F, height, width) in [-1, 1], of which the frames `cond_frame_indexes` (empty: those of the
    mode) are kept.
    `cond_action`: float (1, up to action_chunk, raw_action_dim).

    `state`: float (1, raw_action_dim), a current state in front of the actions; only of checkpoints
    that were trained with one. `noise`, `action_noise`: to begin with, None: drawn from `seed`.
    """

    text_ids: Tensor
    text_mask: Tensor
    neg_text_ids: Tensor | None
    neg_text_mask: Tensor | None
    video_shape: tuple[int, int, int]
    mode: str
    domain_id: int
    action_chunk: int
    raw_action_dim: int
    action_dim: int = 64
    cond_video_latents: Tensor | None = None
    cond_video_pixels: Tensor | None = None
    cond_action: Tensor | None = None
    cond_frame_indexes: tuple[int, ...] = ()
    fps: float = 24.0
    num_inference_steps: int = 30
    guidance_scale: float = 1.0
    seed: int = 42
    _: KW_ONLY
    state: Tensor | None = None
    noise: Tensor | None = None
    action_noise: Tensor | None = None
    guidance_interval: tuple[int, int] | None = None
    flow_shift: float | None = None


@dataclass(frozen=True, eq=False)
class Cosmos3Video:
    """`video`: pixels, float32 (1, 3, frames, height, width) in [0, 1], or the latents that were
    asked for. `sound`: latents (1, dim, length), None where none was asked for.
    """

    video: Tensor
    sound: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Cosmos3Action:
    """`action`: float32 (1, chunk, raw_action_dim), None of forward dynamics. `video`: the latents;
    `pixels`: they, decoded, where the plugin was made with `decode_video`.
    """

    action: Tensor | None
    video: Tensor
    pixels: Tensor | None = None
