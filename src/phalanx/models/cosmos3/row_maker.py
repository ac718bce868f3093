"""From a valid request to what is computed of it; nothing is put on a device before that is done."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.layers.unipc import FlowSchedule, SchedulerConfig
from phalanx.models.cosmos3.action_validation import FORWARD, INVERSE
from phalanx.models.cosmos3.conditioning import padded_actions
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.models.cosmos3.geometry import MediaShape
from phalanx.models.cosmos3.guidance import Guidance
from phalanx.models.cosmos3.media import MediaRow
from phalanx.models.cosmos3.noise import NoiseSource
from phalanx.models.cosmos3.request import Cosmos3ActionRequest, Cosmos3T2VRequest
from phalanx.models.cosmos3.row import RowInputs


class RowMaker:
    """See the module. `decode_video`: whether answers to requests for actions bring pixels."""

    def __init__(
        self,
        config: Cosmos3Config,
        scheduler: SchedulerConfig,
        device: torch.device,
        *,
        decode_video: bool = False,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._device = device
        self._decode_video = decode_video

    def make(self, request: Cosmos3T2VRequest | Cosmos3ActionRequest) -> RowInputs:
        if isinstance(request, Cosmos3T2VRequest):
            return self._video(request)
        return self._action(request)

    def _video(self, request: Cosmos3T2VRequest) -> RowInputs:
        shape = MediaShape(
            request.video_shape,
            request.fps,
            sound_frames=request.sound_frames or 0,
            clean_frames=frozenset(request.cond_frame_indexes),
            patch_size=self._config.latent_patch_size,
        )
        noise = NoiseSource(request.seed)
        vision, sound = noise.take(request.noise, self._vision_size(shape)), None
        if shape.sound_frames:
            size = (self._config.sound_dim, shape.sound_frames)
            sound = noise.take(request.sound_noise, size)
        media = MediaRow(shape, 0, vision, sound)
        latents, pixels = request.cond_latents, request.cond_video_pixels
        return replace(
            self._guided(request, media),
            known=None if latents is None else latents[0].float(),
            pixels=None if pixels is None else pixels[0].float(),
            decodes=request.output == "pixels",
        )

    def _action(self, request: Cosmos3ActionRequest) -> RowInputs:
        shape, width = self._action_shape(request), self._config.action_dim
        noise = NoiseSource(request.seed)
        vision = noise.take(request.noise, self._vision_size(shape))
        drawn = noise.take(request.action_noise, (request.action_chunk, width))
        actions = torch.zeros(shape.action_rows, width)
        actions[shape.has_state :] = drawn
        media = MediaRow(shape, 0, vision, None, actions, request.domain_id)
        latents, pixels = request.cond_video_latents, request.cond_video_pixels
        return replace(
            self._guided(request, media),
            raw_action_dim=request.raw_action_dim,
            known=None if latents is None else latents[0].float(),
            known_actions=self._known_actions(request, shape),
            pixels=None if pixels is None else pixels[0].float(),
            decodes=self._decode_video,
        )

    def _action_shape(self, request: Cosmos3ActionRequest) -> MediaShape:
        frames, has_state = request.video_shape[0], request.state is not None
        rows = request.action_chunk + has_state
        of_mode = range(frames) if request.mode == INVERSE else (0,)
        return MediaShape(
            request.video_shape,
            request.fps,
            action_rows=rows,
            has_state=has_state,
            clean_frames=frozenset(request.cond_frame_indexes or of_mode),
            clean_rows=frozenset(range(rows if request.mode == FORWARD else has_state)),
            patch_size=self._config.latent_patch_size,
        )

    def _known_actions(self, request: Cosmos3ActionRequest, shape: MediaShape) -> Tensor | None:
        """The state, or the given actions; clean rows are all that is looked at."""
        width = self._config.action_dim
        if request.state is not None:
            return padded_actions(request.state, shape.action_rows, width)
        if request.cond_action is None:
            return None
        return padded_actions(request.cond_action[0], shape.action_rows, width)

    def _guided(
        self, request: Cosmos3T2VRequest | Cosmos3ActionRequest, media: MediaRow
    ) -> RowInputs:
        guidance = Guidance(request.guidance_scale, request.guidance_interval)
        negative = None
        if guidance.guides:
            assert request.neg_text_ids is not None and request.neg_text_mask is not None
            negative = _tokens(request.neg_text_ids, request.neg_text_mask)
        scheduler = self._scheduler
        if request.flow_shift is not None:
            shift = request.flow_shift
            scheduler = replace(scheduler, use_karras_sigmas=False, flow_shift=shift)
        return RowInputs(
            prompt=_tokens(request.text_ids, request.text_mask),
            negative=negative,
            shape=media.shape,
            schedule=FlowSchedule.of(scheduler, request.num_inference_steps),
            guidance=guidance,
            noise=media,
            device=self._device,
        )

    def _vision_size(self, shape: MediaShape) -> tuple[int, ...]:
        return (self._config.latent_channel, *shape.video)


def _tokens(ids: Tensor, mask: Tensor) -> tuple[int, ...]:
    """A text without its padding."""
    return tuple(ids[0, : int(mask.sum())].tolist())
