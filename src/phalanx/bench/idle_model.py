"""A model that computes nothing: what its steps take is the step engine's and the loop's own time.

It uses what a language model does: a paged cache, attention's plan, positions and a sampler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.device import create_backend
from phalanx.device.base import DeviceBackend
from phalanx.device.operators import create_operators
from phalanx.device.stage_times import StageTimes
from phalanx.loop.outlook import Foreseeing, Outlook
from phalanx.loop.pipelined_loop import PipelinedLoop
from phalanx.loop.request import Work
from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.step.declaration import Segment, SubmoduleStep
from phalanx.step.engine import StepEngine
from phalanx.step.outputs import Column, HostRow, NodeOutputs
from phalanx.step.resources.attention import AttentionSpec, AttentionStep
from phalanx.step.resources.base import ResourceConfig
from phalanx.step.resources.kv_cache import KVConfig, KVSpec, KVStep
from phalanx.step.resources.positions import PositionSpec, PositionStep
from phalanx.step.resources.sampler import SamplerConfig, SamplerSpec, SamplerStep
from phalanx.step.resources.sampling import RowFilter
from phalanx.step.submodule import EngineInputs, NodeSubmodule, StepRow

NODE = "idle"
WALK = "decode"
PAGE_SIZE = 16
PROMPT_TOKENS = 100


class IdleRequest(Foreseeing):
    """Takes one token after another, `count` of them."""

    def __init__(self, count: int) -> None:
        self.token = 0
        self._left = count
        self._computed = 0
        self._last_reported = 0

    def next_work(self) -> Work | None:
        if not self._left:
            return None
        span = 1 if self._computed else PROMPT_TOKENS
        return Work(NODE, WALK, span, self._computed + span)

    def work_after(self, span: int) -> Work | Outlook:
        computed = self._computed + span
        return Work(NODE, WALK, 1, computed + 1) if self._left > 1 else Outlook.ENDS

    def resource_configs(self) -> Mapping[str, ResourceConfig]:
        return {"sampler": SamplerConfig(RowFilter(temperature=0.0), seed=0)}

    def advance(self, span: int) -> None:
        self._computed += span
        self._left -= 1

    def adopt(self, num_tokens: int) -> None:
        self._computed += num_tokens

    def push_back(self) -> None:
        self._computed = 0

    def accept(self, outputs: HostRow) -> None:
        self.token = outputs["token"]

    def take_delta(self) -> int:
        return self.token

    def output(self, *, cancelled: bool) -> int:
        return self.token


@dataclass(frozen=True)
class _Prepared:
    request_ids: tuple[str, ...]
    token_ids: Tensor


@dataclass(frozen=True)
class _Threaded:
    """A token that the step before has left on the device."""

    values: Tensor
    place: int


class IdleNode(NodeSubmodule):
    """Declares what a decoder does; its forward hands out zeros."""

    publishes = False
    speculates = True

    def __init__(self, backend: DeviceBackend, max_rows: int) -> None:
        super().__init__()
        self._zeros = torch.zeros(max_rows, dtype=torch.int64, device=backend.device)

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        return True

    def prepare_inputs(self, walk: str, row: StepRow) -> int:
        state: IdleRequest = row.info.state
        return state.token

    def thread_outputs(
        self,
        walk: str,
        rows: Sequence[StepRow],
        inputs: Sequence[Any],
        before: Sequence[NodeOutputs],
    ) -> Sequence[Any]:
        ((column,),) = [list(part.columns.values()) for part in before]
        places = {rid: place for place, rid in enumerate(column.request_ids)}
        return [
            _Threaded(column.values, places[row.request_id]) if row.ahead else given
            for row, given in zip(rows, inputs, strict=True)
        ]

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]
    ) -> SubmoduleStep:
        segments = tuple(Segment(row.request_id, row.span) for row in rows)
        return SubmoduleStep(
            segments,
            {
                "kv": KVStep(segments),
                "attention": AttentionStep(),
                "positions": PositionStep(segments),
                "sampler": SamplerStep(tuple(row.request_id for row in rows)),
            },
        )

    def preprocess(self, engine: EngineInputs, inputs: Sequence[Any]) -> _Prepared:
        if isinstance(inputs[0], _Threaded):
            token_ids = inputs[0].values[torch.tensor([given.place for given in inputs])]
        else:
            token_ids = torch.tensor(inputs)
        return _Prepared(tuple(row.request_id for row in engine.rows), token_ids)

    def forward(self, prepared: _Prepared) -> NodeOutputs:
        ids = prepared.request_ids
        return NodeOutputs({"token": Column(ids, self._zeros[: len(ids)])})

    def check_stop(self, row: StepRow, outputs: HostRow) -> frozenset[str]:
        state: IdleRequest = row.info.state
        state.accept(outputs)
        return frozenset()


def idle_loop(
    max_rows: int, max_tokens: int, times: StageTimes | None = None, *, ahead: bool = False
) -> StepLoop:
    """A loop over one idle node, with room for `max_rows` requests of `max_tokens` tokens.

    With `ahead` the next step is prepared and planned while one is computed.
    """
    backend = create_backend("cpu", times)
    operators = create_operators("off", "cpu", torch.float32)
    nodes = frozenset({NODE})
    cache = KVConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        num_pages=max_rows * -(-max_tokens // PAGE_SIZE),
        page_size=PAGE_SIZE,
        max_seq_len=max_tokens,
        dtype=torch.float32,
    )
    engine = StepEngine(backend)
    engine.load_model(
        {NODE: IdleNode(backend, max_rows)},
        [
            KVSpec("kv", nodes, cache),
            AttentionSpec("attention", nodes, "kv", operators),
            PositionSpec("positions", nodes),
            SamplerSpec("sampler", nodes, 32),
        ],
    )
    budget = Budget(max_rows * PROMPT_TOKENS, max_rows)
    return PipelinedLoop(engine, budget) if ahead else StepLoop(engine, budget)
