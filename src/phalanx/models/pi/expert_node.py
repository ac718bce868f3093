"""The node that denoises: one Euler step of every row, each at a time of its own."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.models.pi.denoising import (
    Denoising,
    Drawing,
    Guidance,
    StepTensors,
    drawing_of,
    step_tensors,
)
from phalanx.models.pi.model import PiModel
from phalanx.models.pi.prefix_nodes import PolicyNode, state_of
from phalanx.models.pi.rollout import drawn_step
from phalanx.models.pi.row import LATENTS, DenoiseTurn, PolicyRow, Walk
from phalanx.step.declaration import Segment, SubmoduleStep
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.shapes import Shapes
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


class _Key(enum.Enum):
    """Which denoising steps are captured: those of rows whose actions are all at one time, if either
    none of them is drawn or all are.
    """

    EULER = "every row makes an Euler step"
    DRAWN = "every row is a rollout's"


class ExpertNode(PolicyNode):
    """The actions are written behind the prefix, see it and each other, and are not kept there."""

    def __init__(
        self,
        model: PiModel,
        backend: DeviceBackend,
        max_batch_size: int = 1,
        *,
        captures_rollouts: bool = False,
    ) -> None:
        """Steps of up to `max_batch_size` rows are captured, where the device captures."""
        super().__init__(model, backend)
        self._captures_rollouts = captures_rollouts
        self._chunk = model.geometry.chunk_size
        self._max_batch_size = max_batch_size
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
        turns = [one for one in inputs if isinstance(one, DenoiseTurn)]
        pairs = list(zip(rows, turns, strict=True))
        values_steps = self.model.expert.has_value
        takers = {
            "actions": [row for row, turn in pairs if turn.ends],
            "velocity": [row for row, turn in pairs if turn.traced],
            "value": [
                row for row, turn in pairs if values_steps and turn.draw and turn.draw.valued
            ],
        }
        receivers = {
            name: tuple(row.request_id for row in taking) for name, taking in takers.items()
        }
        return _denoise_step(segments, self.capture_key(walk, rows), receivers)

    def capture_configs(self) -> Sequence[CaptureConfig]:
        shapes = Shapes(rows=_sizes(self._max_batch_size), row_tokens=self._chunk)
        keys = _Key if self._captures_rollouts else (_Key.EULER,)
        return tuple(
            CaptureConfig(Walk.DENOISE.value, shapes, key=key, caps_eager_batch_size=False)
            for key in keys
        )

    def capture_key(self, walk: str, rows: Sequence[StepRow]) -> _Key | None:
        inputs = [state_of(row).inputs for row in rows]
        if Walk(walk) is not Walk.DENOISE or any(one.num_frozen for one in inputs):
            return None
        num_drawn = sum(one.rollout is not None for one in inputs)
        if num_drawn == 0:
            return _Key.EULER
        return _Key.DRAWN if num_drawn == len(inputs) else None

    def declare_capture(self, walk: str, key: Hashable) -> SubmoduleStep:
        return _denoise_step((), key, {})

    def static_inputs(self, walk: str, rows: int, tokens: int, key: Hashable) -> dict[str, Tensor]:
        geometry, device = self.model.geometry, self._backend.device
        condition = self.model.expert.condition(1.0)
        numbers = torch.zeros(rows, 1, 1, device=device)
        chunk = torch.zeros(rows, self._chunk, geometry.max_action_dim, device=device)
        shared = {
            "conditions": condition.expand(rows, 1, *condition.shape).clone(),
            "positions": torch.zeros(tokens, dtype=torch.int64, device=device),
            "times": numbers,
            "advances": numbers.clone(),
        }
        if key is _Key.DRAWN:
            # Of a padding row: at time 1, so that nothing is divided by 0.
            drawn = torch.ones(3, rows, 1, 1, device=device)
            return {**shared, "numbers": drawn, "noise": chunk}
        weights = torch.zeros(rows, self._chunk, 1, device=device)
        return {**shared, "old": chunk, "weights": weights}

    def preprocess(
        self, engine: EngineInputs, inputs: Sequence[PolicyRow | DenoiseTurn]
    ) -> _Sensing | Denoising | Mapping[str, Tensor]:
        if Walk(engine.walk) is Walk.SENSE:
            return self._sensing([one for one in inputs if isinstance(one, PolicyRow)])
        turns = [one for one in inputs if isinstance(one, DenoiseTurn)]
        tensors = step_tensors(turns, self._chunk, self.model.expert.condition, self._backend)
        if engine.lease is not None:
            return self._static(tensors, drawing_of(turns, self._backend))
        return Denoising(
            tensors,
            drawing_of(turns, self._backend),
            tuple(row.request_id for row in engine.rows),
            ending=tuple(at for at, turn in enumerate(turns) if turn.ends),
            traced=tuple(at for at, turn in enumerate(turns) if turn.traced),
        )

    def forward(self, prepared: _Sensing | Denoising | Mapping[str, Tensor]) -> NodeOutputs:
        if isinstance(prepared, _Sensing):
            rotary = self.model.rotary(prepared.positions)
            self.model.expert.remember_state(prepared.states, self._attention, rotary)
            return NodeOutputs()
        if not isinstance(prepared, Denoising):
            return self._captured(prepared)
        before = self._latents.read("x")
        v, x, hidden = self._stepped(before, prepared.tensors)
        columns: dict[str, Column] = {}
        if prepared.drawing is not None:
            x, columns = self._drawn(prepared, prepared.drawing, (before, v, x), hidden)
        self._latents.write("x", x)
        columns |= {
            "velocity": _column(prepared.request_ids, prepared.traced, v),
            "actions": _column(prepared.request_ids, prepared.ending, x),
        }
        return NodeOutputs({name: one for name, one in columns.items() if one.request_ids})

    def _captured(self, inputs: Mapping[str, Tensor]) -> NodeOutputs:
        """A captured shape; rows that are bound to nothing have weights of zero."""
        old = inputs.get("old")
        tensors = StepTensors(
            inputs["conditions"],
            inputs["times"],
            inputs["advances"],
            inputs["positions"],
            None if old is None else Guidance(old, inputs["weights"]),
        )
        before = self._latents.read("x")
        v, x, hidden = self._stepped(before, tensors)
        columns: dict[str, Tensor] = {}
        if "noise" in inputs:
            x, log_probs = drawn_step(before, v, inputs["numbers"], inputs["noise"])
            columns = {"drawn": x, "log_probs": log_probs}
            if self.model.expert.has_value:
                columns["value"] = self.model.expert.value(hidden)
        self._latents.write("x", x)
        columns |= {"velocity": v, "actions": x}
        return NodeOutputs({name: Column.by_row(values) for name, values in columns.items()})

    def _static(self, tensors: StepTensors, drawing: Drawing | None) -> dict[str, Tensor]:
        """The same by name; without old chunks nothing of what binds to them is filled in."""
        shared = {
            "conditions": tensors.conditions,
            "positions": tensors.positions,
            "times": tensors.times,
            "advances": tensors.advances,
        }
        if drawing is not None:
            return {**shared, "numbers": drawing.numbers, "noise": drawing.noise}
        old = tensors.times.new_zeros(0, self._chunk, self.model.geometry.max_action_dim)
        weights = tensors.times.new_zeros(0, self._chunk, 1)
        if tensors.guidance is not None:
            old, weights = tensors.guidance.old, tensors.guidance.weights
        return {**shared, "old": old, "weights": weights}

    def _stepped(self, x: Tensor, given: StepTensors) -> tuple[Tensor, Tensor, Tensor]:
        """Velocities at `x`, what an Euler step makes of it, and the expert's last hidden values."""
        expert, guidance = self.model.expert, given.guidance
        if guidance is not None:
            x = guidance.thawed(x)
        rotary = self.model.rotary(given.positions)
        hidden = expert.hidden(x, given.conditions, self._attention, rotary)
        v = expert.velocity(hidden)
        if guidance is not None:
            v = v - guidance.weights * (guidance.old - (x - given.times * v))
        x = x + given.advances * v
        return v, x if guidance is None else guidance.thawed(x), hidden

    def _drawn(
        self,
        step: Denoising,
        drawing: Drawing,
        values: tuple[Tensor, Tensor, Tensor],
        hidden: Tensor,
    ) -> tuple[Tensor, dict[str, Column]]:
        """Rows of a rollout go elsewhere than the Euler step does: where all go, and the columns."""
        before, v, x = values
        at = list(drawing.rows)
        drawn, log_probs = drawn_step(before[at], v[at], drawing.numbers, drawing.noise)
        x = x.index_copy(0, torch.tensor(at, device=x.device), drawn)
        rids = tuple(step.request_ids[one] for one in at)
        columns = {"drawn": Column(rids, drawn), "log_probs": Column(rids, log_probs)}
        if drawing.valued and self.model.expert.has_value:
            wanting = tuple(step.request_ids[one] for one in drawing.valued)
            value = self.model.expert.value(hidden[list(drawing.valued)])
            columns["value"] = Column(wanting, value)
        return x, columns

    def _sensing(self, rows: Sequence[PolicyRow]) -> _Sensing:
        states = [row.inputs.state for row in rows if row.inputs.state is not None]
        starts = np.array([row.num_prefix for row in rows], dtype=np.int64)
        return _Sensing(torch.stack(states), self._backend.upload(starts))


def _denoise_step(
    segments: tuple[Segment, ...], key: Hashable, receivers: Mapping[str, tuple[str, ...]]
) -> SubmoduleStep:
    kv = KVStep(segments, commit=False, causal=False)
    steps = {"kv": kv, "attention": AttentionStep(), LATENTS: StateStep(segments)}
    return SubmoduleStep(segments, steps, key, receivers)


def _sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most` rows."""
    sizes = {most}
    size = 1
    while size < most:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))


def _column(rids: tuple[str, ...], rows: tuple[int, ...], values: Tensor) -> Column:
    """The values of some rows."""
    if len(rows) == len(rids):
        return Column(rids, values)
    return Column(tuple(rids[at] for at in rows), values[list(rows)])
