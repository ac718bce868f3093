"""The nodes that take in what a row is asked with: one sees images, the other reads them with text.

Only cameras that are there and tokens that are no padding are computed, those of all rows together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.models.pi.model import PiModel
from phalanx.models.pi.row import PolicyRow
from phalanx.step.declaration import Segment, SubmoduleStep
from phalanx.step.outputs import NodeOutputs
from phalanx.step.resources.attention import AttentionStep, PagedAttention
from phalanx.step.resources.base import Resource
from phalanx.step.resources.kv_cache import KVStep
from phalanx.step.submodule import EngineInputs, NodeSubmodule, StepRow


class PolicyNode(NodeSubmodule):
    """What the nodes of a policy have in common: rows share forwards, and values stay on the device."""

    publishes = False
    read_on_host = frozenset()

    def __init__(self, model: PiModel, backend: DeviceBackend) -> None:
        super().__init__()
        self.model = model
        self._backend = backend

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        return True

    def prepare_inputs(self, walk: str, row: StepRow) -> Any:  # noqa: ANN401
        return state_of(row)

    def postprocess(self, row: StepRow, outputs: Sequence[NodeOutputs]) -> None:
        for one in outputs:
            state_of(row).take(one.row(row.request_id))


@dataclass(frozen=True)
class _Seen:
    images: Tensor
    counts: tuple[tuple[str, int], ...]
    """The requests with their numbers of images."""


class VisionNode(PolicyNode):
    """Images of all rows, to the tokens of each."""

    def preprocess(self, engine: EngineInputs, inputs: Sequence[PolicyRow]) -> _Seen:
        images = [row.inputs.images for row in inputs]
        pairs = zip(engine.rows, images, strict=True)
        counts = tuple((row.request_id, len(own)) for row, own in pairs)
        return _Seen(images[0] if len(images) == 1 else torch.cat(images), counts)

    def forward(self, prepared: _Seen) -> NodeOutputs:
        tokens = self.model.eye.forward(prepared.images)
        each = self.model.geometry.image_tokens
        parts = torch.split(tokens, [count * each for _, count in prepared.counts])
        rids = (rid for rid, _ in prepared.counts)
        return NodeOutputs(
            ragged={rid: {"features": part} for rid, part in zip(rids, parts, strict=True)}
        )


@dataclass(frozen=True)
class _Prefix:
    features: tuple[Tensor | None, ...]
    token_ids: Tensor
    num_text: list[int]
    positions: Tensor
    valued: Mapping[str, slice]
    """The tokens of rows whose prefix is to be valued."""


class PrefixNode(PolicyNode):
    """Images and text of all rows: each token sees all of its row, and leaves keys and values."""

    def __init__(self, model: PiModel, backend: DeviceBackend) -> None:
        super().__init__(model, backend)
        self._attention: PagedAttention

    def bind_node_resources(self, resources: Mapping[str, Resource]) -> None:
        attention = resources["attention"]
        assert isinstance(attention, PagedAttention)
        self._attention = attention

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[PolicyRow]
    ) -> SubmoduleStep:
        segments = tuple(Segment(row.request_id, row.span) for row in rows)
        kv = KVStep(segments, causal=False)
        return SubmoduleStep(segments, {"kv": kv, "attention": AttentionStep()})

    def preprocess(self, engine: EngineInputs, inputs: Sequence[PolicyRow]) -> _Prefix:
        positions = np.concatenate([np.arange(row.span) for row in engine.rows])
        ends = accumulate(row.span for row in engine.rows)
        valued = {
            row.request_id: slice(end - row.span, end)
            for row, state, end in zip(engine.rows, inputs, ends, strict=True)
            if self.model.expert.values_prefix and state.wants_values
        }
        token_ids = torch.cat([row.inputs.token_ids for row in inputs])
        return _Prefix(
            tuple(row.features for row in inputs),
            token_ids,
            [len(row.inputs.token_ids) for row in inputs],
            self._backend.upload(positions),
            valued,
        )

    def forward(self, prepared: _Prefix) -> NodeOutputs:
        language = self.model.language
        text = torch.split(language.embed(prepared.token_ids), prepared.num_text)
        parts: list[Tensor] = []
        for features, own in zip(prepared.features, text, strict=True):
            parts += [own] if features is None else [features.to(language.dtype), own]
        x, rotary = torch.cat(parts), self.model.rotary(prepared.positions)
        hidden = language.forward(x, self._attention, rotary, whole=bool(prepared.valued))
        if hidden is None:
            return NodeOutputs()
        value = self.model.expert.value
        values = {rid: value(hidden[None, own])[0] for rid, own in prepared.valued.items()}
        return NodeOutputs(ragged={rid: {"value": one} for rid, one in values.items()})


def state_of(row: StepRow) -> PolicyRow:
    assert isinstance(row.info.state, PolicyRow)
    return row.info.state
