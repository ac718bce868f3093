"""Latents of video, sound and actions as tokens, and tokens as the velocities of those latents.

Latents and velocities are float32. Several requests' tokens lie one after another; of each those of
the video, of the sound, of the actions. Only what is drawn is read out: clean frames and action rows
have velocity zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.layers.linear import Linear
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.models.cosmos3.geometry import MediaShape, Run
from phalanx.models.cosmos3.patches import patchify, unpatchify
from phalanx.models.cosmos3.time_embedding import TimeEmbedding


@dataclass(frozen=True)
class MediaRow:
    """One request's latents as a step begins, at its `timestep`.

    `vision` [channels, T, H, W], `sound` [sound_dim, frames], `actions` [rows, action_dim] of the
    embodiment `domain`. What the layout does not have is None.
    """

    shape: MediaShape
    timestep: int
    vision: Tensor
    sound: Tensor | None = None
    actions: Tensor | None = None
    domain: int = 0


@dataclass(frozen=True)
class Velocity:
    """Of one request, each of the shape of its latents."""

    vision: Tensor
    sound: Tensor | None = None
    actions: Tensor | None = None


class DomainLinear(nn.Module):
    """A linear layer for each embodiment. Its matrices are stored [in, out]."""

    def __init__(
        self, num_domains: int, in_features: int, out_features: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        weight = torch.empty(num_domains, in_features * out_features, dtype=dtype, device="meta")
        bias = torch.empty(num_domains, out_features, dtype=dtype, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor, domain: int) -> Tensor:
        """`x` [T, in] of one embodiment, to [T, out]."""
        matrix = self.weight[domain].view(x.shape[1], -1)
        return torch.addmm(self.bias[domain], x, matrix)


class SoundTokens(nn.Module):
    """In and out of the tokens of sound."""

    def __init__(self, config: Cosmos3Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.enter = _biased(config.sound_dim, config.hidden_size, dtype)
        self.leave = _biased(config.hidden_size, config.sound_dim, dtype)
        self.kind = _vector(config.hidden_size, dtype)

    def embed(self, sound: Tensor, time: Tensor) -> Tensor:
        """`sound` [sound_dim, frames], all drawn, as [frames, width]."""
        return self.enter.forward(sound.t().to(self.kind.dtype)) + (self.kind + time)

    def velocity(self, hidden: Tensor) -> Tensor:
        """[sound_dim, frames]."""
        return self.leave.forward(hidden).float().t()


class ActionTokens(nn.Module):
    """In and out of the tokens of actions."""

    def __init__(self, config: Cosmos3Config, dtype: torch.dtype) -> None:
        super().__init__()
        domains, width = config.num_embodiment_domains, config.hidden_size
        self.enter = DomainLinear(domains, config.action_dim, width, dtype)
        self.leave = DomainLinear(domains, width, config.action_dim, dtype)
        self.kind = _vector(width, dtype)

    def embed(self, row: MediaRow, time: Tensor) -> Tensor:
        """The actions of a request, [rows, width]."""
        assert row.actions is not None
        x = self.enter.forward(row.actions.to(self.kind.dtype), row.domain) + self.kind
        return add_time(x, row.shape.noisy_rows, time)

    def velocity(self, hidden: Tensor, row: MediaRow) -> Tensor:
        """[rows, action_dim]; zero where a row is clean."""
        assert row.actions is not None
        velocity = torch.zeros_like(row.actions)
        for start, stop in row.shape.noisy_rows:
            velocity[start:stop] = self.leave.forward(hidden[start:stop], row.domain)
        return velocity


class MediaTokens(nn.Module):
    """See the module."""

    def __init__(self, config: Cosmos3Config, dtype: torch.dtype) -> None:
        super().__init__()
        width, patch_values = config.hidden_size, config.patch_latent_dim
        self.enter = _biased(patch_values, width, dtype)
        self.leave = _biased(width, patch_values, dtype)
        self.time = TimeEmbedding(width, config.timestep_scale, dtype)
        self.sound = SoundTokens(config, dtype) if config.sound_gen else None
        self.actions = ActionTokens(config, dtype) if config.action_gen else None
        self._dtype = dtype
        self._patch_size = config.latent_patch_size

    def embed(self, rows: Sequence[MediaRow]) -> Tensor:
        """Tokens [N, width] of all rows, without their positions."""
        patches = [patchify(row.vision, self._patch_size) for row in rows]
        vision = self.enter.forward(torch.cat(patches).to(self._dtype))
        parts: list[Tensor] = []
        for row, x in zip(rows, _split(vision, [len(one) for one in patches]), strict=True):
            time = self.time.forward(row.timestep)
            frames = x.view(row.shape.video[0], -1, x.shape[-1])
            parts.append(add_time(frames, row.shape.noisy_frames, time).view_as(x))
            if row.sound is not None:
                assert self.sound is not None, "this model has no sound"
                parts.append(self.sound.embed(row.sound, time))
            if row.actions is not None:
                assert self.actions is not None, "this model has no actions"
                parts.append(self.actions.embed(row, time))
        return torch.cat(parts)

    def velocities(self, hidden: Tensor, rows: Sequence[MediaRow]) -> list[Velocity]:
        """Of the normed last hidden values [N, width] of the rows' tokens.

        The rows' latents are not read, only their shapes.
        """
        by_row = _split(hidden, [row.shape.num_tokens for row in rows])
        drawn = self._drawn(by_row, rows)
        found: list[Velocity] = []
        for row, x, patches in zip(rows, by_row, drawn, strict=True):
            shape = row.shape
            _, heard, acted = _split(
                x, [shape.num_vision_tokens, shape.sound_frames, shape.action_rows]
            )
            sound = actions = None
            if row.sound is not None:
                assert self.sound is not None, "this model has no sound"
                sound = self.sound.velocity(heard)
            if row.actions is not None:
                assert self.actions is not None, "this model has no actions"
                actions = self.actions.velocity(acted, row)
            found.append(Velocity(self._vision(patches, row), sound, actions))
        return found

    def _drawn(self, by_row: Sequence[Tensor], rows: Sequence[MediaRow]) -> Sequence[Tensor]:
        """The patches of noisy frames of each row, float32."""
        noisy: list[Tensor] = []
        sizes: list[int] = []
        for row, x in zip(rows, by_row, strict=True):
            frame = row.shape.patches_per_frame
            runs = [slice(start * frame, stop * frame) for start, stop in row.shape.noisy_frames]
            noisy += [x[run] for run in runs]
            sizes.append(sum(run.stop - run.start for run in runs))
        if not noisy:
            return [by_row[0].new_empty(0) for _ in rows]
        together = noisy[0] if len(noisy) == 1 else torch.cat(noisy)
        return _split(self.leave.forward(together).float(), sizes)

    def _vision(self, patches: Tensor, row: MediaRow) -> Tensor:
        shape, at = row.shape, 0
        velocity = torch.zeros_like(row.vision)
        for start, stop in shape.noisy_frames:
            count = (stop - start) * shape.patches_per_frame
            velocity[:, start:stop] = unpatchify(
                patches[at : at + count], shape.patch_grid, shape.video[1:], self._patch_size
            )
            at += count
        return velocity


def add_time(x: Tensor, noisy: Sequence[Run], time: Tensor) -> Tensor:
    """`x` with `time` [width] added to the items that are drawn, in place."""
    for start, stop in noisy:
        x[start:stop] += time
    return x


def _split(x: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    parts: tuple[Tensor, ...] = torch.split(x, sizes)
    return parts


def _biased(in_features: int, out_features: int, dtype: torch.dtype) -> Linear:
    return Linear(in_features, out_features, bias=True, dtype=dtype, device="meta")


def _vector(width: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(width, dtype=dtype, device="meta"), requires_grad=False)
