"""A flow that refines latents step by step over a prompt's cache, with guidance or without.

A guided request has two streams: `main`, and `away`, which is forked off where their prompts part.
Both are computed by one forward under a combined label. Steps that refine read the prompts, and
leave no token behind.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.step.declaration import DEFAULT_LABEL, Fork, Segment, SubmoduleStep
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.shapes import Shapes
from phalanx.step.outputs import HostRow, NodeOutputs
from phalanx.step.resources.attention import AttentionSpec, AttentionStep, PagedAttention
from phalanx.step.resources.base import Resource, ResourceSpec
from phalanx.step.resources.kv_cache import KVSpec, KVStep
from phalanx.step.resources.positions import PositionSpec, PositionStep
from phalanx.step.resources.slot_state import SlotState, SlotStateSpec, StateBlock, StateStep
from phalanx.step.submodule import EngineInputs, NodeSubmodule, StepRow
from phalanx.testing.model_parts import ModelParts
from phalanx.testing.models.flow_request import (
    FLOW_NODE,
    LATENT_WIDTH,
    NUM_LATENTS,
    FlowRequest,
    FlowTurn,
    FlowWalk,
)
from phalanx.testing.models.parts import (
    VOCAB_SIZE,
    WIDTH,
    Block,
    Prepared,
    RandomWeights,
    answer,
    kv_config,
    rotary_tables,
    tensors_of,
)

AWAY, BOTH = "away", "both"
NUM_LAYERS = 2


@dataclass(frozen=True)
class _Prompts:
    """Tokens of all branches, label by label; there is nothing to answer."""

    token_ids: Tensor
    positions: Tensor


class _Key(enum.Enum):
    """Which rows of a refining step are guided: each has a layout of its own. Mixed ones are not
    captured.
    """

    ALL = "all rows are guided"
    NONE = "no row is guided"


class GuidedFlow(NodeSubmodule):
    """See the module. A row's state is a `FlowRequest`."""

    speculates = True

    def __init__(self, seed: int) -> None:
        super().__init__()
        weights = RandomWeights(seed)
        operators = TorchOperators()
        self._embedding = weights.embedding(VOCAB_SIZE, WIDTH)
        self._enter = weights.take(WIDTH, LATENT_WIDTH)
        self._places = weights.embedding(NUM_LATENTS, WIDTH)
        self._clock = weights.embedding(1, WIDTH)
        self._blocks = [Block(weights, operators) for _ in range(NUM_LAYERS)]
        self._leave = weights.take(LATENT_WIDTH, WIDTH)
        self._attention: PagedAttention
        self._latents: SlotState

    def bind_node_resources(self, resources: Mapping[str, Resource]) -> None:
        attention, latents = resources["attention"], resources["latents"]
        assert isinstance(attention, PagedAttention)
        assert isinstance(latents, SlotState)
        self._attention, self._latents = attention, latents

    def prepare_inputs(self, walk: str, row: StepRow) -> FlowTurn:
        return _state(row).take(row.span, row.ahead)

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        return True

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[FlowTurn]
    ) -> SubmoduleStep:
        if FlowWalk(walk) is FlowWalk.DENOISE:
            rids = [row.request_id for row in rows]
            guided = [rid for rid, one in zip(rids, inputs, strict=True) if one.away is not None]
            ending = [rid for rid, one in zip(rids, inputs, strict=True) if one.ends]
            return replace(
                _refining_step(rids, guided, _key_of(len(guided), len(rids))),
                receivers={"latents": tuple(ending)},
            )
        segments = [Segment(row.request_id, row.span) for row in rows]
        forks: list[Fork] = []
        for row, one in _pairs(rows, inputs):
            if FlowWalk(walk) is FlowWalk.PROMPT and one.away:
                segments.append(Segment(row.request_id, len(one.away), AWAY))
            elif FlowWalk(walk) is FlowWalk.PREFIX and one.forks:
                forks.append(Fork(row.request_id, DEFAULT_LABEL, AWAY))
        return _prompt_step(tuple(segments), tuple(forks))

    def preprocess(self, engine: EngineInputs, inputs: Sequence[FlowTurn]) -> Any:  # noqa: ANN401
        if FlowWalk(engine.walk) is FlowWalk.DENOISE:
            return _refining(engine, inputs)
        tokens = [token for one in inputs for token in one.tokens]
        if FlowWalk(engine.walk) is FlowWalk.PROMPT:
            tokens += [token for one in inputs for token in one.away or ()]
        return _Prompts(torch.tensor(tokens), engine.plans["positions"])

    def forward(self, prepared: _Prompts | Prepared | Mapping[str, Tensor]) -> NodeOutputs:
        if isinstance(prepared, _Prompts):
            self._transformed(self._embedding[prepared.token_ids], prepared.positions)
            return NodeOutputs()
        return answer(prepared, {"latents": self._refined(tensors_of(prepared))})

    def capture_configs(self) -> Sequence[CaptureConfig]:
        shapes = Shapes(rows=(1, 2, 4), row_tokens=NUM_LATENTS)
        return tuple(
            CaptureConfig(FlowWalk.DENOISE.value, shapes, key=key, caps_eager_batch_size=False)
            for key in _Key
        )

    def capture_key(self, walk: str, rows: Sequence[StepRow]) -> Hashable:
        guided = [_state(row).guided for row in rows]
        return _key_of(sum(guided), len(guided)) if FlowWalk(walk) is FlowWalk.DENOISE else None

    def declare_capture(self, walk: str, key: Hashable) -> SubmoduleStep:
        assert isinstance(key, _Key)
        return _refining_step((), (), key)

    def static_inputs(self, walk: str, rows: int, tokens: int, key: Hashable) -> dict[str, Tensor]:
        return _tensors([], rows, range(rows) if key is _Key.ALL else ())

    def check_stop(self, row: StepRow, outputs: HostRow) -> frozenset[str]:
        _state(row).accept(outputs)
        return frozenset()

    def _transformed(self, x: Tensor, positions: Tensor) -> Tensor:
        self._attention.select(BOTH)
        rotary = rotary_tables(positions)
        for block in self._blocks:
            x = block.think(block.attend(x, self._attention, rotary))
        return x

    def _refined(self, given: Mapping[str, Tensor]) -> Tensor:
        """One Euler step along the velocity; guided rows go on from where `away` would lead."""
        latents = self._latents.read("x")
        entered = latents @ self._enter.T + self._places
        entered = entered + given["times"][:, None, None] * self._clock
        guided = given["guided"]
        x = torch.cat((entered, entered[guided])).flatten(0, 1)
        left = self._transformed(x, given["positions"]) @ self._leave.T
        towards, away = torch.split(
            left.view(-1, NUM_LATENTS, LATENT_WIDTH), [len(latents), len(guided)]
        )
        scales = given["scales"][guided, None, None]
        velocity = towards.index_copy(0, guided, away + scales * (towards[guided] - away))
        refined = latents + velocity * given["steps"][:, None, None]
        self._latents.write("x", refined)
        return refined[given["ending"]] if "ending" in given else refined


def _state(row: StepRow) -> FlowRequest:
    assert isinstance(row.info.state, FlowRequest)
    return row.info.state


def _pairs(rows: Sequence[StepRow], inputs: Sequence[FlowTurn]) -> list[tuple[StepRow, FlowTurn]]:
    return list(zip(rows, inputs, strict=True))


def _key_of(num_guided: int, num_rows: int) -> _Key | None:
    if num_guided == num_rows:
        return _Key.ALL
    return None if num_guided else _Key.NONE


def _prompt_step(segments: tuple[Segment, ...], forks: tuple[Fork, ...]) -> SubmoduleStep:
    """Both branches of all rows are one plan."""
    kv = KVStep(segments, combined_labels={BOTH: (DEFAULT_LABEL, AWAY)}, post_forks=forks)
    positions = PositionStep(segments, post_forks=forks)
    return SubmoduleStep(segments, {"kv": kv, "attention": AttentionStep(), "positions": positions})


def _refining_step(rids: Sequence[str], guided: Sequence[str], key: _Key | None) -> SubmoduleStep:
    """The latents are written behind the prompts, see each other, and are not kept there."""
    rows = tuple(Segment(rid, NUM_LATENTS) for rid in rids)
    segments = (*rows, *(Segment(rid, NUM_LATENTS, AWAY) for rid in guided))
    labels = (DEFAULT_LABEL,) if key is _Key.NONE else (DEFAULT_LABEL, AWAY)
    kv = KVStep(segments, commit=False, causal=False, combined_labels={BOTH: labels}, labels=labels)
    steps = {"kv": kv, "attention": AttentionStep(), "latents": StateStep(rows)}
    return SubmoduleStep(segments, steps, key)


def _refining(engine: EngineInputs, inputs: Sequence[FlowTurn]) -> Any:  # noqa: ANN401
    rids = tuple(row.request_id for row in engine.rows)
    ending = [at for at, one in enumerate(inputs) if one.ends]
    if engine.lease is None:
        guided = [at for at, one in enumerate(inputs) if one.away is not None]
        tensors = _tensors(inputs, len(inputs), guided)
        tensors["ending"] = torch.tensor(ending, dtype=torch.int64)
        return Prepared(tensors, rids, {"latents": tuple(rids[at] for at in ending)})
    num_rows = engine.lease.bucket.rows
    every = range(num_rows) if engine.lease.bucket.key is _Key.ALL else ()
    return _tensors(inputs, num_rows, every)


def _tensors(inputs: Sequence[FlowTurn], num_rows: int, guided: Sequence[int]) -> dict[str, Tensor]:
    """What a refining step of so many rows takes, label by label; rows without a request are padding.

    The latents stand together at the place behind each branch's prompt.
    """
    behind = np.zeros((2, num_rows), dtype=np.int64)
    numbers = np.zeros((3, num_rows), dtype=np.float32)
    for at, one in enumerate(inputs):
        behind[:, at] = one.places
        numbers[:, at] = one.scale, one.time, one.advance
    places = np.concatenate((behind[0], behind[1, list(guided)]))
    return {
        "positions": torch.from_numpy(np.repeat(places, NUM_LATENTS)),
        "guided": torch.tensor(guided, dtype=torch.int64),
        "scales": torch.from_numpy(numbers[0]),
        "times": torch.from_numpy(numbers[1]),
        "steps": torch.from_numpy(numbers[2]),
    }


def guided_flow_parts(
    num_pages: int, max_slots: int, host_pages: int = 0, num_host_slots: int = 0, seed: int = 0
) -> ModelParts:
    """The model of one `GuidedFlow` node; latents of `max_slots` requests."""
    nodes = frozenset({FLOW_NODE})
    tensors = {"x": StateBlock((NUM_LATENTS, LATENT_WIDTH))}
    specs: tuple[ResourceSpec, ...] = (
        KVSpec("kv", nodes, kv_config(NUM_LAYERS, num_pages, host_pages)),
        AttentionSpec("attention", nodes, "kv", TorchOperators()),
        PositionSpec("positions", nodes),
        SlotStateSpec("latents", nodes, tensors, max_slots, num_host_slots),
    )
    return ModelParts({FLOW_NODE: GuidedFlow(seed)}, specs)
