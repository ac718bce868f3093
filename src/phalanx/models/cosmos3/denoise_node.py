"""The node that denoises: one step of every row, whatever their sizes and times, in one forward.

Tokens of both branches lie one branch after another. They see the text that was read, and each other
within their row and branch; nothing of them is kept but the new latents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from phalanx.device.base import DeviceBackend
from phalanx.layers.interleaved_rotary import Rotary
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.models.cosmos3.geometry import MediaShape, media_positions
from phalanx.models.cosmos3.guidance import AWAY, TOWARDS, BranchRanks, guided
from phalanx.models.cosmos3.lockstep import Lockstep
from phalanx.models.cosmos3.media import MediaRow, Velocity
from phalanx.models.cosmos3.row import ACTIONS, KV, SOUND, VISION, DenoiseTurn
from phalanx.models.cosmos3.text_node import MediaNode, request_of
from phalanx.models.cosmos3.transformer import Cosmos3Transformer
from phalanx.step.declaration import Segment, SubmoduleStep
from phalanx.step.outputs import NodeOutputs
from phalanx.step.resources.base import Resource
from phalanx.step.resources.joint_attention import JointAttention, JointStep
from phalanx.step.resources.kv_cache import KVStep
from phalanx.step.submodule import EngineInputs, StepRow

ATTENTION = "media_attention"

Positions = Callable[[Cosmos3Config, MediaShape, int], Tensor]
"""Where the media of a layout stand behind so many tokens of text, such as `media_positions`."""


@dataclass(frozen=True)
class _Steps:
    """The rows of a step, and which of them this rank computes, branch by branch."""

    request_ids: tuple[str, ...]
    turns: tuple[DenoiseTurn, ...]
    computed: tuple[tuple[str, int], ...]
    """(branch, row), in the order of tokens."""


class DenoiseNode(MediaNode):
    """See the module. `num_tokens` counts what this rank has computed of media."""

    def __init__(
        self,
        transformer: Cosmos3Transformer,
        backend: DeviceBackend,
        branches: BranchRanks,
        lockstep: Lockstep,
        max_batch_size: int,
        positions: Positions = media_positions,
    ) -> None:
        super().__init__()
        self._transformer = transformer
        self._branches = branches
        self._lockstep = lockstep
        self._rotaries = _Rotaries(transformer, backend, positions, 2 * max_batch_size)
        self.num_forwards = 0
        self.num_tokens = 0
        self._attention: JointAttention

    def bind_node_resources(self, resources: Mapping[str, Resource]) -> None:
        attention = resources[ATTENTION]
        assert isinstance(attention, JointAttention)
        self._attention = attention

    def prepare_inputs(self, walk: str, row: StepRow) -> DenoiseTurn:
        return self._lockstep.run(request_of(row).turn)

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[DenoiseTurn]
    ) -> SubmoduleStep | None:
        segments = tuple(
            Segment(rows[at].request_id, inputs[at].media.shape.num_tokens, label)
            for label, at in self._computed(inputs)
        )
        if not segments:
            return None
        texts = tuple(Segment(one.request_id, 0, one.label) for one in segments)
        return SubmoduleStep(
            segments, {KV: KVStep(texts, commit=False), ATTENTION: JointStep(segments)}
        )

    def preprocess(self, engine: EngineInputs, inputs: Sequence[DenoiseTurn]) -> _Steps:
        rids = tuple(row.request_id for row in engine.rows)
        return _Steps(rids, tuple(inputs), self._computed(inputs))

    def forward(self, prepared: _Steps) -> NodeOutputs:
        return self._lockstep.run(partial(self._denoised, prepared))

    def _computed(self, turns: Sequence[DenoiseTurn]) -> tuple[tuple[str, int], ...]:
        return tuple(
            (label, at)
            for label in self._branches.labels
            for at, turn in enumerate(turns)
            if label in turn.labels
        )

    def _denoised(self, steps: _Steps) -> NodeOutputs:
        self._compare(steps)
        towards, away = self._both(steps, self._velocities(steps))
        ragged: dict[str, dict[str, Tensor]] = {}
        for at, (rid, turn) in enumerate(zip(steps.request_ids, steps.turns, strict=True)):
            velocity = towards[at]
            if AWAY in turn.labels:
                velocity = guided(velocity, away[at], turn.inputs.guidance.scale)
            velocity = _without_tail(velocity, turn.inputs.raw_action_dim)
            ragged[rid] = _stepped(turn, velocity)
            if turn.traced:
                ragged[rid] |= _named("velocity.", velocity)
                for label in turn.labels:
                    raw = towards[at] if label == TOWARDS else away[at]
                    ragged[rid] |= _named(f"{label}.", raw)
        return NodeOutputs(ragged=ragged)

    def _compare(self, steps: _Steps) -> None:
        """Let no row begin whose latents other ranks have otherwise."""
        pairs = zip(steps.request_ids, steps.turns, strict=True)
        new = [(rid, turn.media) for rid, turn in pairs if turn.at == 0]
        rids = [rid for rid, _ in new]
        self._lockstep.require_same(rids, [list(_parts(media).values()) for _, media in new])

    def _velocities(self, steps: _Steps) -> Mapping[tuple[str, int], Velocity]:
        """What this rank computes, by branch and row."""
        if not steps.computed:
            return {}
        media = [steps.turns[at].media for _, at in steps.computed]
        once = {at: steps.turns[at].media for _, at in steps.computed}
        embedded = self._transformer.embed_media(list(once.values()))
        tokens: Tensor = embedded
        if len(media) > len(once):
            sizes = [one.shape.num_tokens for one in once.values()]
            by_row = dict(zip(once, torch.split(embedded, sizes), strict=True))
            tokens = torch.cat([by_row[at] for _, at in steps.computed])
        rotary = self._rotaries.of(
            [
                (steps.turns[at].media.shape, steps.turns[at].context(label))
                for label, at in steps.computed
            ]
        )
        self.num_forwards += 1
        self.num_tokens += len(tokens)
        hidden = self._transformer.velocity_hidden(tokens, rotary, self._attention)
        found = self._transformer.velocities(hidden, media)
        return dict(zip(steps.computed, found, strict=True))

    def _both(
        self, steps: _Steps, found: Mapping[tuple[str, int], Velocity]
    ) -> tuple[Sequence[Velocity], Mapping[int, Velocity]]:
        """The velocities of both branches, wherever they were computed; the second branch's only
        where it was asked for.
        """
        turns = steps.turns
        guiding = [at for at, turn in enumerate(turns) if AWAY in turn.labels]
        if self._branches.group is None:
            towards = [found[TOWARDS, at] for at in range(len(turns))]
            return towards, {at: found[AWAY, at] for at in guiding}
        (label,) = self._branches.labels
        own = [found.get((label, at)) for at in range(len(turns))]
        towards, away = self._branches.exchanged([turn.media for turn in turns], own)
        return towards, {at: away[at] for at in guiding}


class _Rotaries:
    """Cosines and sines by layout and length of the text; those of the newest are kept."""

    def __init__(
        self,
        transformer: Cosmos3Transformer,
        backend: DeviceBackend,
        positions: Positions,
        most_kept: int,
    ) -> None:
        self._transformer = transformer
        self._backend = backend
        self._positions = positions
        self._most_kept = most_kept
        self._known: OrderedDict[tuple[MediaShape, int], Rotary] = OrderedDict()

    def of(self, layouts: Sequence[tuple[MediaShape, int]]) -> Rotary:
        """Those of all layouts, one after another; each float32 [tokens, head_dim / 2]."""
        found = [self._one(*layout) for layout in layouts]
        if len(found) == 1:
            return found[0]
        return torch.cat([cos for cos, _ in found]), torch.cat([sin for _, sin in found])

    def _one(self, shape: MediaShape, num_text: int) -> Rotary:
        key = shape, num_text
        found = self._known.get(key)
        if found is None:
            positions = self._positions(self._transformer.config, shape, num_text)
            found = self._transformer.rotary(self._backend.upload(positions.numpy()))
            while len(self._known) >= self._most_kept:
                self._known.popitem(last=False)
            self._known[key] = found
        else:
            self._known.move_to_end(key)
        return found


def _stepped(turn: DenoiseTurn, velocity: Velocity) -> dict[str, Tensor]:
    """The latents behind the step, and what their solvers remember."""
    latents, velocities = _parts(turn.media), _parts(velocity)
    outputs: dict[str, Tensor] = {}
    for name, state in turn.states.items():
        stepped, after = turn.solver.step(state, turn.at, velocities[name], latents[name])
        assert after.begun is not None and after.data is not None
        outputs |= {name: stepped, f"{name}.begun": after.begun, f"{name}.data": after.data}
    return outputs


def _without_tail(velocity: Velocity, raw_action_dim: int) -> Velocity:
    """Numbers of actions that the embodiment does not have stay what they are."""
    actions = velocity.actions
    if actions is None:
        return velocity
    kept = functional.pad(actions[:, :raw_action_dim], (0, actions.shape[1] - raw_action_dim))
    return replace(velocity, actions=kept)


def _parts(one: MediaRow | Velocity) -> dict[str, Tensor]:
    parts = {VISION: one.vision, SOUND: one.sound, ACTIONS: one.actions}
    return {name: part for name, part in parts.items() if part is not None}


def _named(prefix: str, velocity: Velocity) -> dict[str, Tensor]:
    return {f"{prefix}{name}": part for name, part in _parts(velocity).items()}
