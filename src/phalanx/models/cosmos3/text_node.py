"""The node that reads prompts: both branches of all requests in one forward, each text once.

It leaves keys and values in the cache, where later steps and later requests find them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.device.base import DeviceBackend
from phalanx.models.cosmos3.guidance import BOTH, BranchRanks
from phalanx.models.cosmos3.lockstep import Lockstep
from phalanx.models.cosmos3.row import KV, MediaRequest
from phalanx.models.cosmos3.transformer import Cosmos3Transformer
from phalanx.step.declaration import ResourceStep, Segment, SubmoduleStep
from phalanx.step.outputs import NodeOutputs
from phalanx.step.resources.attention import AttentionStep, PagedAttention
from phalanx.step.resources.base import Resource
from phalanx.step.resources.kv_cache import KVCache, KVStep
from phalanx.step.resources.kv_plan import KVPlan
from phalanx.step.resources.ragged_attention import RaggedAttention, RaggedStep
from phalanx.step.submodule import EngineInputs, NodeSubmodule, StepRow

ATTENTION, WITHIN = "text_attention", "text_within"


class MediaNode(NodeSubmodule):
    """What the nodes of a request for media have in common: rows share forwards, and values stay on
    the device.
    """

    publishes = False
    read_on_host = frozenset()

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        return True

    def prepare_inputs(self, walk: str, row: StepRow) -> Any:  # noqa: ANN401
        return request_of(row)

    def postprocess(self, row: StepRow, outputs: Sequence[NodeOutputs]) -> None:
        for one in outputs:
            request_of(row).take(one.row(row.request_id))


def request_of(row: StepRow) -> MediaRequest:
    assert isinstance(row.info.state, MediaRequest)
    return row.info.state


@dataclass(frozen=True)
class _Texts:
    """Of all rows, branch by branch; None where this rank has nothing to read."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]


class TextNode(MediaNode):
    """See the module. `num_read` and `num_found` count tokens that were computed, and found in the
    cache instead.
    """

    def __init__(
        self,
        transformer: Cosmos3Transformer,
        backend: DeviceBackend,
        branches: BranchRanks,
        lockstep: Lockstep,
    ) -> None:
        super().__init__()
        self._transformer = transformer
        self._backend = backend
        self._branches = branches
        self._lockstep = lockstep
        self.num_read = 0
        self.num_found = 0
        self._cache: KVCache
        self._attention: PagedAttention
        self._within: RaggedAttention | None = None

    def bind_node_resources(self, resources: Mapping[str, Resource]) -> None:
        cache, attention, within = (resources.get(key) for key in (KV, ATTENTION, WITHIN))
        assert isinstance(cache, KVCache)
        assert isinstance(attention, PagedAttention)
        assert within is None or isinstance(within, RaggedAttention)
        self._cache, self._attention, self._within = cache, attention, within

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[MediaRequest]
    ) -> SubmoduleStep | None:
        segments = self._segments(rows, inputs)
        if not segments:
            return None
        combined = {BOTH: self._branches.labels}
        steps: dict[str, ResourceStep] = {
            KV: KVStep(segments, combined_labels=combined),
            ATTENTION: AttentionStep(),
        }
        if self._within is not None:
            steps[WITHIN] = RaggedStep(segments, combined_labels=combined)
        return SubmoduleStep(segments, steps)

    def preprocess(self, engine: EngineInputs, inputs: Sequence[MediaRequest]) -> _Texts | None:
        if engine.step is None:
            return None
        plan = engine.plans[KV]
        assert isinstance(plan, KVPlan)
        texts = {
            row.request_id: one.inputs.texts for row, one in zip(engine.rows, inputs, strict=True)
        }
        token_ids: list[int] = []
        positions: list[int] = []
        for row, start in zip(plan.rows[BOTH], plan.starts[BOTH], strict=True):
            token_ids += texts[row.request_id][row.label][start:]
            positions += range(start, start + row.span)
            self.num_read += row.span
            self.num_found += start
        return _Texts(np.array(token_ids, dtype=np.int64), np.array(positions, dtype=np.int64))

    def forward(self, prepared: _Texts | None) -> NodeOutputs:
        return self._lockstep.run(partial(self._read, prepared))

    def _read(self, texts: _Texts | None) -> NodeOutputs:
        if texts is not None:
            self._attention.select(BOTH)
            if self._within is not None:
                self._within.select(BOTH)
            token_ids, positions = map(self._backend.upload, (texts.token_ids, texts.positions))
            self._transformer.read(token_ids, positions, self._attention, self._within)
        return NodeOutputs()

    def _segments(
        self, rows: Sequence[StepRow], inputs: Sequence[MediaRequest]
    ) -> tuple[Segment, ...]:
        """What is left to read of each text of this rank's branches."""
        return tuple(
            Segment(
                row.request_id, len(text) - self._cache.stored_len(row.request_id, label), label
            )
            for row, one in zip(rows, inputs, strict=True)
            for label, text in one.inputs.texts.items()
            if label in self._branches.labels
        )
