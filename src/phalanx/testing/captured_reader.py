"""A `CacheReader` whose steps are captured: the same digests, computed on the device at fixed sizes.

Exact integers, so that captured steps must give what eager ones give to the last bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.step.declaration import DEFAULT_LABEL, SubmoduleStep
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.shapes import Shapes
from phalanx.step.outputs import Column, NodeOutputs
from phalanx.step.submodule import EngineInputs, StepRow
from phalanx.testing.step_models import CacheReader, digests
from phalanx.testing.token_request import Stage


class CapturedReader(CacheReader):
    """See the module. It captures `walk`, which `aliases` replay."""

    def __init__(
        self,
        walk: str,
        aliases: tuple[str, ...] = (),
        *,
        batched: bool = True,
        max_rows: int | None = None,
    ) -> None:
        super().__init__(batched=batched, max_rows=max_rows)
        one_token, packed = Shapes(rows=(1, 2, 4)), Shapes(rows=(4,), token_buckets=(6, 16))
        self._captures = tuple(
            CaptureConfig(walk, shapes, aliases, caps_eager_batch_size=False)
            for shapes in (one_token, packed)
        )

    def capture_configs(self) -> Sequence[CaptureConfig]:
        return self._captures

    def static_inputs(self, walk: str, rows: int, tokens: int, key: Hashable) -> dict[str, Tensor]:
        config = self._cache.config
        return {
            "token_ids": torch.zeros(tokens, dtype=torch.int64),
            "positions": torch.zeros(tokens, dtype=torch.int64),
            "slots": torch.zeros(tokens, dtype=torch.int64),
            "pages": torch.zeros((rows, config.pages_for(config.max_seq_len)), dtype=torch.int32),
            "lens": torch.ones(rows, dtype=torch.int32),
        }

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]
    ) -> SubmoduleStep:
        step = super().declare_step(walk, rows, inputs)
        pairs = zip(rows, inputs, strict=True)
        giving = tuple(row.request_id for row, given in pairs if given.gives)
        return replace(step, receivers={"token": giving})

    def preprocess(self, engine: EngineInputs, inputs: Sequence[Any]) -> Any:  # noqa: ANN401
        prepared = super().preprocess(engine, inputs)
        if engine.lease is None:
            return prepared
        for given in inputs:
            given.strike(Stage.FORWARD)
        return {
            "token_ids": prepared.token_ids,
            "positions": prepared.positions,
            "slots": engine.plans["kv"].by_label[DEFAULT_LABEL].slots,
            "pages": engine.plans["kv"].by_label[DEFAULT_LABEL].page_table,
            "lens": engine.plans["kv"].by_label[DEFAULT_LABEL].kv_lens,
        }

    def forward(self, prepared: Any) -> NodeOutputs:  # noqa: ANN401
        if not isinstance(prepared, Mapping):
            return super().forward(prepared)
        config = self._cache.config
        stored = self._cache.layer(0)[0].flatten(0, 2)
        stored[prepared["slots"], 0] = prepared["token_ids"].to(stored.dtype)
        stored[prepared["slots"], 1] = prepared["positions"].to(stored.dtype)
        first = prepared["pages"].long() * config.page_size
        slots = (first[:, :, None] + torch.arange(config.page_size)).flatten(1)
        seen = stored[slots].long()
        visible = torch.arange(slots.shape[1]) < prepared["lens"][:, None]
        return NodeOutputs({"token": Column.by_row(digests(seen[..., 0], seen[..., 1], visible))})
