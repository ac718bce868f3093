"""Toy nodes for tests of the step engine and the step loop, and engines built around them.

`CacheReader` computes each token as a digest of what its cache pages hold, so that a wrong page, a
wrong position or a lost token shows as a wrong output; `expected_tokens` is the same without a cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.device.cpu import CpuBackend
from phalanx.device.operators.base import PagedPlan
from phalanx.step.declaration import DEFAULT_LABEL, Segment, SubmoduleStep
from phalanx.step.engine import StepEngine
from phalanx.step.outputs import Column, HostRow, NodeOutputs
from phalanx.step.resources.base import Resource, ResourceSpec
from phalanx.step.resources.kv_cache import KVCache, KVConfig, KVSpec, KVStep
from phalanx.step.resources.positions import PositionSpec, PositionStep
from phalanx.step.submodule import EngineInputs, NodeSubmodule, StepRow
from phalanx.testing.probe_resource import ProbeSpec, ProbeStep
from phalanx.testing.token_request import NODE, InjectedError, RowTokens, Stage, TokenRequest

VOCAB_SIZE = 97
_PRIME = 65521


def digest(tokens: Tensor, positions: Tensor) -> int:
    """A token from all tokens of a sequence, int64 [n], their positions and their order."""
    return int(digests(tokens, positions, torch.ones(len(tokens), dtype=torch.bool)))


def digests(tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
    """The digest of each row of int64 [..., n], of what is `visible` of it; on the device."""
    place = torch.arange(tokens.shape[-1])
    mixed = (tokens + 1) * (positions * 31 + 17) % _PRIME * (place * 7 + 3) % _PRIME
    return (mixed * visible).sum(dim=-1) % _PRIME % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """What `CacheReader` answers to a prompt when nothing goes wrong."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(digest(torch.tensor(tokens), torch.arange(len(tokens))))
    return tuple(tokens[len(prompt) :])


def store_tokens(cache: KVCache, plan: PagedPlan, token_ids: Tensor, positions: Tensor) -> None:
    """Write tokens and their positions to the cache, at the slots of a step."""
    stored = cache.layer(0)[0].flatten(0, 2)
    stored[plan.slots, 0] = token_ids.to(stored.dtype)
    stored[plan.slots, 1] = positions.to(stored.dtype)


def cached_digest(cache: KVCache, plan: PagedPlan, row: int) -> int:
    """The digest of all that a row of a step sees in the cache."""
    page_size = cache.config.page_size
    pages = plan.page_table[row].long()
    slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
    seen = cache.layer(0)[0].flatten(0, 2)[slots[: int(plan.kv_lens[row])]].long()
    return digest(seen[:, 0], seen[:, 1])


class _Uncopied(Tensor):
    """What strikes when it is copied."""

    def clone(self, *, memory_format: torch.memory_format | None = None) -> Tensor:
        raise InjectedError(Stage.COLLECT.value)


@dataclass(frozen=True)
class _Prepared:
    rows: tuple[StepRow, ...]
    inputs: tuple[RowTokens, ...]
    token_ids: Tensor
    positions: Tensor
    plan: PagedPlan


class CacheReader(NodeSubmodule):
    """See the module. A row's state is a `TokenRequest`, whose faults strike where it says."""

    speculates = True

    def __init__(self, *, batched: bool = True, max_rows: int | None = None) -> None:
        super().__init__()
        self._batched = batched
        self._max_rows = max_rows
        self._cache: KVCache
        self._probed = False
        self.num_forwards = 0
        self.forgotten: list[str] = []

    def bind_node_resources(self, resources: Mapping[str, Resource]) -> None:
        cache = resources["kv"]
        assert isinstance(cache, KVCache)
        self._cache = cache
        self._probed = "probe" in resources

    def max_batch_size(self, walk: str) -> int | None:
        return self._max_rows

    def prepare_inputs(self, walk: str, row: StepRow) -> RowTokens | None:
        state = _state(row)
        given = state.take(row.span, row.ahead)
        given.strike(Stage.PREPARE)
        return None if state.skip() else given

    def thread_outputs(
        self,
        walk: str,
        rows: Sequence[StepRow],
        inputs: Sequence[Any],
        before: Sequence[NodeOutputs],
    ) -> Sequence[Any]:
        return RowTokens.threaded([row.request_id for row in rows], inputs, before)

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        return self._batched

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]
    ) -> SubmoduleStep:
        _strike(Stage.DECLARE, inputs)
        segments = tuple(Segment(row.request_id, row.span) for row in rows)
        steps = {"kv": KVStep(segments), "positions": PositionStep(segments)}
        if self._probed:
            probe = ProbeStep(tuple(row.request_id for row in rows))
            return SubmoduleStep(segments, {**steps, "probe": probe})
        return SubmoduleStep(segments, steps)

    def preprocess(self, engine: EngineInputs, inputs: Sequence[Any]) -> _Prepared:
        _strike(Stage.PREPROCESS, inputs)
        token_ids = torch.cat([given.tensor() for given in inputs])
        plan = engine.plans["kv"].by_label[DEFAULT_LABEL]
        positions = engine.plans["positions"]
        return _Prepared(engine.rows, tuple(inputs), token_ids, positions, plan)

    def forward(self, prepared: _Prepared) -> NodeOutputs:
        self.num_forwards += 1
        store_tokens(self._cache, prepared.plan, prepared.token_ids, prepared.positions)
        _strike(Stage.FORWARD, prepared.inputs)
        giving = [index for index, given in enumerate(prepared.inputs) if given.gives]
        tokens = [cached_digest(self._cache, prepared.plan, index) for index in giving]
        rids = tuple(prepared.rows[index].request_id for index in giving)
        token = Column(rids, torch.tensor(tokens, dtype=torch.int64))
        spoiled = {
            row.request_id: {"spoiled": torch.zeros(1).as_subclass(_Uncopied)}
            for row, given in zip(prepared.rows, prepared.inputs, strict=True)
            if given.due(Stage.COLLECT)
        }
        return NodeOutputs({"token": token}, spoiled)

    def postprocess(self, row: StepRow, outputs: Sequence[NodeOutputs]) -> None:
        _state(row).strike(Stage.POSTPROCESS)

    def check_stop(self, row: StepRow, outputs: HostRow) -> frozenset[str]:
        state = _state(row)
        state.strike(Stage.CHECK_STOP)
        state.accept(outputs)
        return frozenset({"generate"} if len(state.outputs) >= state.count else ())

    def cleanup_request(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def _state(row: StepRow) -> TokenRequest:
    assert isinstance(row.info.state, TokenRequest)
    return row.info.state


def _strike(stage: Stage, inputs: Sequence[RowTokens]) -> None:
    for given in inputs:
        given.strike(stage)


def cache_reader_engine(
    num_pages: int,
    page_size: int,
    *,
    node: CacheReader | None = None,
    probe: ProbeSpec | None = None,
    max_seq_len: int = 4096,
    host_pages: int = 0,
    backend: DeviceBackend | None = None,
) -> StepEngine:
    """An engine of one `CacheReader`, with a probe beside its resources if one is given."""
    nodes = frozenset({NODE})
    config = KVConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        num_pages=num_pages,
        page_size=page_size,
        max_seq_len=max_seq_len,
        dtype=torch.float64,
        host_pages=host_pages,
    )
    specs: list[ResourceSpec] = [KVSpec("kv", nodes, config), PositionSpec("positions", nodes)]
    if probe is not None:
        specs.append(probe)
    engine = StepEngine(backend or CpuBackend())
    engine.load_model({NODE: node or CacheReader()}, specs)
    engine.warm_up()
    return engine
