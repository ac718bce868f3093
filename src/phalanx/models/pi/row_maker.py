"""Cuts a request into its rows, on the device where they are computed with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.layers.real_time_chunking import Schedule, prefix_weights
from phalanx.models.pi.geometry import PiGeometry
from phalanx.models.pi.request import PiRequest, RealTimeChunking
from phalanx.models.pi.rollout import RowRollout
from phalanx.models.pi.row import OldChunk, RowInputs

DEFAULT_HORIZON = 10
"""The execution horizon of LeRobot's real-time chunking."""


class RowMaker:
    """See the module. `generator`, on the host, draws the noise that a request does not bring."""

    def __init__(
        self, geometry: PiGeometry, device: torch.device, generator: torch.Generator
    ) -> None:
        self._geometry = geometry
        self._device = device
        self._generator = generator

    def make(self, request: PiRequest, state: Tensor | None = None) -> list[RowInputs]:
        """One for each row of a valid request; `state` (B, size) where the expert reads one."""
        lens, rtc = request.lang_lens.tolist(), request.rtc
        noise = self._noise(request)
        return [
            RowInputs(
                images=self._images(request, at),
                token_ids=request.input_ids[at, : lens[at]].to(self._device),
                noise=noise[at],
                num_steps=request.num_steps or self._geometry.num_steps,
                state=None if state is None else state[at].to(self._device, torch.float32),
                old_chunk=None if rtc is None else self._old_chunk(rtc, at),
            )
            for at in range(len(lens))
        ]

    def make_rollout(
        self, request: PiRequest, sigmas: Tensor, step_noise: Tensor | None, *, with_values: bool
    ) -> list[RowInputs]:
        """Rows whose steps are drawn: with a deviation for each (B, steps), and noise (B, steps,
        chunk, size).
        """
        rows, steps = self.make(request), sigmas.shape[1]
        if step_noise is None:
            noise = self._drawn((len(rows), steps, *rows[0].noise.shape))
        else:
            noise = step_noise.to(self._device, torch.float32)
        return [
            replace(row, num_steps=steps, rollout=RowRollout(noise[at], tuple(own), with_values))
            for at, (row, own) in enumerate(zip(rows, sigmas.tolist(), strict=True))
        ]

    def _images(self, request: PiRequest, row: int) -> Tensor:
        """The images of cameras that are there; others do not reach the device."""
        images, masks = request.pixel_values[row], request.image_masks
        if masks is not None and not bool(masks[row].all()):
            images = images[masks[row].to(images.device)]
        return images.to(self._device, torch.float32)

    def _noise(self, request: PiRequest) -> Tensor:
        if request.noise is not None:
            return request.noise.to(self._device, torch.float32)
        chunk = (self._geometry.chunk_size, self._geometry.max_action_dim)
        return self._drawn((len(request.input_ids), *chunk))

    def _drawn(self, shape: tuple[int, ...]) -> Tensor:
        # On the host, so that a seed gives the same on every device.
        return torch.randn(shape, generator=self._generator).to(self._device)

    def _old_chunk(self, rtc: RealTimeChunking, row: int) -> OldChunk:
        chunk = self._geometry.chunk_size
        left = rtc.prev_chunk_left_over[row]
        actions = torch.zeros(chunk, self._geometry.max_action_dim)
        actions[: left.shape[0], : left.shape[1]] = left
        horizon = min(rtc.execution_horizon or DEFAULT_HORIZON, len(left))
        delay, weights, num_frozen = rtc.inference_delay, torch.zeros(chunk), 0
        if rtc.mode == "guided":
            weights = prefix_weights(Schedule(rtc.schedule), delay, horizon, chunk)
        else:
            num_frozen = min(delay, len(left))
        return OldChunk(
            actions.to(self._device), weights.to(self._device), rtc.max_guidance_weight, num_frozen
        )
