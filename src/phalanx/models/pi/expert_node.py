"""The node that denoises: one Euler step of every row, each at a time of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.models.pi.model import PiModel
from phalanx.models.pi.prefix_nodes import PolicyNode, state_of
from phalanx.models.pi.rollout import Draw, drawn_step
from phalanx.models.pi.row import LATENTS, DenoiseTurn, PolicyRow, Walk
from phalanx.step.declaration import Segment, SubmoduleStep
from phalanx.step.outputs import Column, NodeOutputs
from phalanx.step.resources.attention import AttentionStep, PagedAttention
from phalanx.step.resources.base import Resource
from phalanx.step.resources.kv_cache import KVStep
from phalanx.step.resources.slot_state import SlotState, StateStep
from phalanx.step.submodule import EngineInputs, StepRow


@dataclass(frozen=True)
class _Sensing:
    states: Tensor
    positions: Tensor


@dataclass(frozen=True)
class _Guidance:
    """Old actions [R, chunk, size], and how strongly and whether they bind: [R, chunk, 1].

    `frozen` is None where nothing is.
    """

    old: Tensor
    weights: Tensor
    frozen: Tensor | None


@dataclass(frozen=True)
class _Drawing:
    """The rows, by index, whose steps are drawn: time, length and deviation of each [3, D, 1, 1], and
    noise [D, chunk, size]. `valued`: which of all rows want a value.
    """

    rows: tuple[int, ...]
    numbers: Tensor
    noise: Tensor
    valued: tuple[int, ...]


@dataclass(frozen=True)
class _Denoising:
    conditions: Tensor
    times: Tensor
    advances: Tensor
    positions: Tensor
    guidance: _Guidance | None
    drawing: _Drawing | None
    request_ids: tuple[str, ...]
    ending: tuple[int, ...]
    traced: tuple[int, ...]


class ExpertNode(PolicyNode):
    """The actions are written behind the prefix, see it and each other, and are not kept there."""

    def __init__(self, model: PiModel, backend: DeviceBackend) -> None:
        super().__init__(model, backend)
        self._chunk = model.geometry.chunk_size
        self._attention: PagedAttention
        self._latents: SlotState

    def bind_node_resources(self, resources: Mapping[str, Resource]) -> None:
        attention, latents = resources["attention"], resources[LATENTS]
        assert isinstance(attention, PagedAttention)
        assert isinstance(latents, SlotState)
        self._attention, self._latents = attention, latents

    def prepare_inputs(self, walk: str, row: StepRow) -> PolicyRow | DenoiseTurn:
        state = state_of(row)
        return state.turn() if Walk(walk) is Walk.DENOISE else state

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[PolicyRow | DenoiseTurn]
    ) -> SubmoduleStep:
        segments = tuple(Segment(row.request_id, row.span) for row in rows)
        if Walk(walk) is Walk.SENSE:
            return SubmoduleStep(segments, {"kv": KVStep(segments), "attention": AttentionStep()})
        kv = KVStep(segments, commit=False, causal=False)
        steps = {"kv": kv, "attention": AttentionStep(), LATENTS: StateStep(segments)}
        return SubmoduleStep(segments, steps)

    def preprocess(
        self, engine: EngineInputs, inputs: Sequence[PolicyRow | DenoiseTurn]
    ) -> _Sensing | _Denoising:
        if Walk(engine.walk) is Walk.SENSE:
            return self._sensing([one for one in inputs if isinstance(one, PolicyRow)])
        turns = [one for one in inputs if isinstance(one, DenoiseTurn)]
        return self._denoising(tuple(row.request_id for row in engine.rows), turns)

    def forward(self, prepared: _Sensing | _Denoising) -> NodeOutputs:
        rotary = self.model.rotary(prepared.positions)
        if isinstance(prepared, _Sensing):
            self.model.expert.remember_state(prepared.states, self._attention, rotary)
            return NodeOutputs()
        x, guidance = self._latents.read("x"), prepared.guidance
        if guidance is not None:
            x = _frozen(x, guidance)
        hidden = self.model.expert.hidden(x, prepared.conditions, self._attention, rotary)
        v = self.model.expert.velocity(hidden)
        if guidance is not None:
            v = v - guidance.weights * (guidance.old - (x - prepared.times * v))
        before, x = x, x + prepared.advances * v
        if guidance is not None:
            x = _frozen(x, guidance)
        columns: dict[str, Column] = {}
        drawing = prepared.drawing
        if drawing is not None:
            at = list(drawing.rows)
            drawn, log_probs = drawn_step(before[at], v[at], drawing.numbers, drawing.noise)
            x = x.index_copy(0, torch.tensor(at, device=x.device), drawn)
            rids = tuple(prepared.request_ids[one] for one in at)
            columns |= {"drawn": Column(rids, drawn), "log_probs": Column(rids, log_probs)}
            if drawing.valued:
                values = self.model.expert.value(hidden[list(drawing.valued)])
                columns["value"] = Column(
                    tuple(prepared.request_ids[one] for one in drawing.valued), values
                )
        self._latents.write("x", x)
        columns |= {
            "velocity": _column(prepared.request_ids, prepared.traced, v),
            "actions": _column(prepared.request_ids, prepared.ending, x),
        }
        return NodeOutputs({name: one for name, one in columns.items() if one.request_ids})

    def _sensing(self, rows: Sequence[PolicyRow]) -> _Sensing:
        states = [row.inputs.state for row in rows if row.inputs.state is not None]
        starts = np.array([row.num_prefix for row in rows], dtype=np.int64)
        return _Sensing(torch.stack(states), self._backend.upload(starts))

    def _denoising(self, rids: tuple[str, ...], turns: Sequence[DenoiseTurn]) -> _Denoising:
        starts = np.array([turn.start for turn in turns], dtype=np.int64)
        numbers = np.array([(turn.time, turn.advance) for turn in turns], dtype=np.float32)
        times, advances = self._backend.upload(numbers.T.copy())[..., None, None]
        return _Denoising(
            conditions=self._conditions(turns),
            times=times,
            advances=advances,
            positions=self._backend.upload((starts[:, None] + np.arange(self._chunk)).reshape(-1)),
            guidance=self._guidance(turns),
            drawing=self._drawing(turns),
            request_ids=rids,
            ending=tuple(at for at, turn in enumerate(turns) if turn.ends),
            traced=tuple(at for at, turn in enumerate(turns) if turn.traced),
        )

    def _drawing(self, turns: Sequence[DenoiseTurn]) -> _Drawing | None:
        drawn = [(at, turn, turn.draw) for at, turn in enumerate(turns) if turn.draw is not None]
        if not drawn:
            return None
        numbers = np.array(
            [(turn.time, -turn.advance, draw.sigma) for _, turn, draw in drawn], dtype=np.float32
        )
        return _Drawing(
            rows=tuple(at for at, _, _ in drawn),
            numbers=self._backend.upload(numbers.T.copy())[..., None, None],
            noise=torch.stack([draw.noise for _, _, draw in drawn]),
            valued=tuple(at for at, turn in enumerate(turns) if _valued(turn.draw)),
        )

    def _conditions(self, turns: Sequence[DenoiseTurn]) -> Tensor:
        """[R, 1, ...], or [R, chunk, ...] where some actions are frozen: those are clean (time 0)."""
        expert = self.model.expert
        noisy = torch.stack([expert.condition(turn.time) for turn in turns])[:, None]
        frozen = [_num_frozen(turn) for turn in turns]
        if not any(frozen):
            return noisy
        is_frozen = np.arange(self._chunk) < np.array(frozen)[:, None]
        mask = self._backend.upload(is_frozen).view(*is_frozen.shape, *(1,) * (noisy.dim() - 2))
        return torch.where(mask, expert.condition(0.0), noisy)

    def _guidance(self, turns: Sequence[DenoiseTurn]) -> _Guidance | None:
        olds = [turn.old_chunk for turn in turns]
        if not any(olds):
            return None
        blank = torch.zeros_like(next(old.actions for old in olds if old is not None))
        none = torch.zeros_like(blank[:, 0])
        actions = torch.stack([blank if old is None else old.actions for old in olds])
        pairs = zip(olds, turns, strict=True)
        weights = [none if old is None else turn.guidance * old.weights for old, turn in pairs]
        frozen = np.array([_num_frozen(turn) for turn in turns])
        mask = None
        if frozen.any():
            mask = self._backend.upload(np.arange(self._chunk) < frozen[:, None])[..., None]
        return _Guidance(actions, torch.stack(weights)[..., None], mask)


def _valued(draw: Draw | None) -> bool:
    return draw is not None and draw.valued


def _num_frozen(turn: DenoiseTurn) -> int:
    return 0 if turn.old_chunk is None else turn.old_chunk.num_frozen


def _frozen(x: Tensor, guidance: _Guidance) -> Tensor:
    return x if guidance.frozen is None else torch.where(guidance.frozen, guidance.old, x)


def _column(rids: tuple[str, ...], rows: tuple[int, ...], values: Tensor) -> Column:
    """The values of some rows."""
    if len(rows) == len(rids):
        return Column(rids, values)
    return Column(tuple(rids[at] for at in rows), values[list(rows)])
