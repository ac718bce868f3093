"""One step of several rows as tensors: what the expert's node takes, collated from the rows' turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.models.pi.rollout import Draw
from phalanx.models.pi.row import DenoiseTurn

Conditions = Callable[[float], Tensor]
"""What a time makes of the expert, see `ActionExpert.condition`."""


@dataclass(frozen=True)
class Guidance:
    """Old actions [R, chunk, size], and how strongly and whether they bind: [R, chunk, 1].

    `frozen` is None where nothing is.
    """

    old: Tensor
    weights: Tensor
    frozen: Tensor | None = None

    def thawed(self, x: Tensor) -> Tensor:
        """`x` with the actions that are kept."""
        return x if self.frozen is None else torch.where(self.frozen, self.old, x)


@dataclass(frozen=True)
class Drawing:
    """The rows, by index, whose steps are drawn: time, length and deviation of each [3, D, 1, 1], and
    noise [D, chunk, size]. `valued`: which of all rows want a value.
    """

    rows: tuple[int, ...]
    numbers: Tensor
    noise: Tensor
    valued: tuple[int, ...]


@dataclass(frozen=True)
class StepTensors:
    """What every step takes: `conditions` [R, 1 or chunk, ...], `times` and `advances` [R, 1, 1], and
    `positions` [R * chunk].
    """

    conditions: Tensor
    times: Tensor
    advances: Tensor
    positions: Tensor
    guidance: Guidance | None


@dataclass(frozen=True)
class Denoising:
    """A step that is not captured. `ending` and `traced` are indices of rows."""

    tensors: StepTensors
    drawing: Drawing | None
    request_ids: tuple[str, ...]
    ending: tuple[int, ...]
    traced: tuple[int, ...]


def step_tensors(
    turns: Sequence[DenoiseTurn], chunk: int, condition: Conditions, backend: DeviceBackend
) -> StepTensors:
    """The rows in their order."""
    starts = np.array([turn.start for turn in turns], dtype=np.int64)
    numbers = np.array([(turn.time, turn.advance) for turn in turns], dtype=np.float32)
    times, advances = backend.upload(numbers.T.copy())[..., None, None]
    frozen = _frozen(turns, chunk)
    mask = None if frozen is None else backend.upload(frozen)
    return StepTensors(
        conditions=_conditions(turns, mask, condition),
        times=times,
        advances=advances,
        positions=backend.upload((starts[:, None] + np.arange(chunk)).reshape(-1)),
        guidance=guidance_of(turns, mask),
    )


def drawing_of(turns: Sequence[DenoiseTurn], backend: DeviceBackend) -> Drawing | None:
    """How the rows that are drawn are; None where none is."""
    drawn = [(at, turn, turn.draw) for at, turn in enumerate(turns) if turn.draw is not None]
    if not drawn:
        return None
    numbers = np.array(
        [(turn.time, -turn.advance, draw.sigma) for _, turn, draw in drawn], dtype=np.float32
    )
    return Drawing(
        rows=tuple(at for at, _, _ in drawn),
        numbers=backend.upload(numbers.T.copy())[..., None, None],
        noise=torch.stack([draw.noise for _, _, draw in drawn]),
        valued=tuple(at for at, turn in enumerate(turns) if _valued(turn.draw)),
    )


def guidance_of(turns: Sequence[DenoiseTurn], frozen: Tensor | None) -> Guidance | None:
    """What binds the rows to old actions; None where nothing does."""
    olds = [turn.old_chunk for turn in turns]
    if not any(olds):
        return None
    blank = torch.zeros_like(next(old.actions for old in olds if old is not None))
    none = torch.zeros_like(blank[:, 0])
    actions = torch.stack([blank if old is None else old.actions for old in olds])
    pairs = zip(olds, turns, strict=True)
    weights = [none if old is None else turn.guidance * old.weights for old, turn in pairs]
    mask = None if frozen is None else frozen[..., None]
    return Guidance(actions, torch.stack(weights)[..., None], mask)


def _conditions(
    turns: Sequence[DenoiseTurn], frozen: Tensor | None, condition: Conditions
) -> Tensor:
    """[R, 1, ...], or [R, chunk, ...] where some actions are frozen: those are clean (time 0)."""
    noisy = torch.stack([condition(turn.time) for turn in turns])[:, None]
    if frozen is None:
        return noisy
    mask = frozen.view(*frozen.shape, *(1,) * (noisy.dim() - 2))
    return torch.where(mask, condition(0.0), noisy)


def _frozen(turns: Sequence[DenoiseTurn], chunk: int) -> NDArray[np.bool_] | None:
    """Which actions are kept as they are, bool [R, chunk]."""
    counts = [0 if turn.old_chunk is None else turn.old_chunk.num_frozen for turn in turns]
    return np.arange(chunk) < np.array(counts)[:, None] if any(counts) else None


def _valued(draw: Draw | None) -> bool:
    return draw is not None and draw.valued
