"""The sampler: each request's settings, draw counter and token history, applied a batch at a time.

A request's draws follow (seed, offset) where offset counts its sampled tokens, so that a request
added again with its history continues exactly where it was.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.step.declaration import ResourceStep, StepContext
from phalanx.step.lease import BufferClaim
from phalanx.step.resources.base import BuildInfo, Resource, ResourceConfig, ResourceSpec
from phalanx.step.resources.captured_sampling import (
    CapturedRows,
    RowSettings,
    captured_rows,
    sample_captured,
)
from phalanx.step.resources.penalties import Penalties, TokenHistory
from phalanx.step.resources.sampling import RowFilter, draw, uniform
from phalanx.step.resources.slot_buffers import SlotBuffers


@dataclass(frozen=True)
class SamplerSpec(ResourceSpec):
    """Declares a sampler over `vocab_size` tokens."""

    vocab_size: int

    def build(self, info: BuildInfo) -> Sampler:
        return Sampler(self.key, self.vocab_size, info.backend)


@dataclass(frozen=True)
class SamplerConfig(ResourceConfig):
    """One request's settings, and what it has produced so far.

    `logit_bias` holds (token id, bias). `forbidden_until` forbids the tokens `forbidden` as long as
    fewer tokens than that have been produced.
    """

    row: RowFilter
    seed: int
    penalties: Penalties = field(default_factory=Penalties)
    logit_bias: tuple[tuple[int, float], ...] = ()
    forbidden: tuple[int, ...] = ()
    forbidden_until: int = 0
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()


@dataclass(frozen=True)
class SamplerStep(ResourceStep):
    """The requests that sample in this step, one row of logits each, in this order.

    Captured, every row of the bucket has a row of logits, and the tokens of other requests mean
    nothing; `greedy_only` captures no more than the most likely token.
    """

    request_ids: tuple[str, ...]
    greedy_only: bool = False


@dataclass
class _State:
    config: SamplerConfig
    offset: int
    history: TokenHistory | None
    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None

    @property
    def forbids(self) -> bool:
        return bool(self.config.forbidden) and self.offset < self.config.forbidden_until

    def settings(self) -> RowSettings:
        """What the next draw of a captured row depends on."""
        row = self.config.row
        return RowSettings(
            row,
            0.0 if row.greedy else uniform(self.config.seed, self.offset),
            self.config.penalties,
            adjusts=self.forbids or self.bias_ids is not None,
        )

    def bias(self, row: Tensor) -> None:
        """Add bias and prohibitions to a row of float32 logits."""
        if self.bias_ids is not None and self.bias_values is not None:
            row.index_add_(0, self.bias_ids, self.bias_values)
        if self.forbids:
            row[list(self.config.forbidden)] = -torch.inf


class Sampler(Resource):
    """See the module."""

    def __init__(self, key: str, vocab_size: int, backend: DeviceBackend) -> None:
        self.key = key
        self._vocab_size = vocab_size
        self._backend = backend
        self._lock = threading.Lock()
        self._states: dict[str, _State] = {}
        self._rows: list[_State] = []
        self._tokens: Tensor | None = None
        self._buffers = SlotBuffers(backend)
        self._captured: CapturedRows | None = None

    def ingest_request(self, rid: str, config: ResourceConfig | None) -> None:
        assert isinstance(config, SamplerConfig)
        with self._lock:
            if rid in self._states:
                return
            self._states[rid] = self._opened(config)

    def _opened(self, config: SamplerConfig) -> _State:
        history = None
        if config.penalties.active:
            history = TokenHistory(
                self._vocab_size, config.prompt_ids, config.output_ids, self._backend.device
            )
        state = _State(config, len(config.output_ids), history)
        if config.logit_bias:
            ids, values = zip(*config.logit_bias, strict=True)
            state.bias_ids = torch.tensor(ids, device=self._backend.device)
            state.bias_values = torch.tensor(
                values, dtype=torch.float32, device=self._backend.device
            )
        return state

    def remove_request(self, rid: str) -> None:
        with self._lock:
            self._states.pop(rid, None)

    def claim_buffers(self, claim: BufferClaim) -> None:
        self._buffers.claim(claim)

    def plan(self, step: ResourceStep, ctx: StepContext) -> CapturedRows | None:
        assert isinstance(step, SamplerStep)
        if ctx.lease is None:
            return None
        with self._lock:
            states = [self._states[rid] for rid in step.request_ids]
        places = {rid: row for row, rid in enumerate(ctx.request_ids)}
        at = tuple(places[rid] for rid in step.request_ids)
        settings = [RowSettings() for _ in ctx.request_ids]
        for row, state in zip(at, states, strict=True):
            settings[row] = state.settings()
        rows = captured_rows(
            ctx.lease,
            self._buffers,
            self._vocab_size,
            settings,
            at,
            greedy_only=step.greedy_only,
        )
        for row, state in zip(at, states, strict=True):
            if settings[row].adjusts:
                state.bias(rows.bias[row].zero_())
        return rows

    def begin(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, SamplerStep)
        with self._lock:
            self._rows = [self._states[rid] for rid in step.request_ids]
        self._tokens = None
        self._captured = None if ctx.lease is None else ctx.plan_results[self.key]
        if self._captured is not None:
            self._begin_captured(self._captured)

    def _begin_captured(self, rows: CapturedRows) -> None:
        for row, state in zip(rows.at, self._rows, strict=True):
            if state.history is not None:
                state.history.copy_to(rows.counts[row], rows.seen[row])
        # A replay leaves the tokens there without coming by `sample`.
        self._tokens = rows.tokens

    def sample(self, logits: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Tokens of the planned rows, int64 [rows].

        `logits` is [rows, vocabulary] and is left as it is; `allowed` is a bool mask of the same
        shape (structured output) or None.
        """
        captured = self._captured
        num_rows = len(self._rows) if captured is None else len(captured.tokens)
        if logits.shape != (num_rows, self._vocab_size):
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} for {num_rows} sampled rows and a "
                f"vocabulary of {self._vocab_size}"
            )
        if captured is not None:
            return sample_captured(captured, logits, allowed)
        adjusted = self._adjusted(logits, allowed)
        draws = [
            0.0 if state.config.row.greedy else uniform(state.config.seed, state.offset)
            for state in self._rows
        ]
        self._tokens = draw(adjusted, [state.config.row for state in self._rows], draws)
        return self._tokens

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        rows, tokens = self._rows, self._tokens
        at = range(len(rows)) if self._captured is None else self._captured.at
        self._rows, self._tokens, self._captured = [], None, None
        if tokens is None:
            return
        for index, state in zip(at, rows, strict=True):
            state.offset += 1
            if state.history is not None:
                state.history.add(tokens[index])

    def at_rest(self) -> bool:
        with self._lock:
            return not self._states

    def _adjusted(self, logits: Tensor, allowed: Tensor | None) -> Tensor:
        """The logits with penalties, bias and prohibitions; the input itself if there are none."""
        touched = [i for i, state in enumerate(self._rows) if self._adjusts(state)]
        if not touched and allowed is None:
            return logits
        adjusted = logits.float().clone()
        for i in touched:
            self._adjust_row(adjusted[i], self._rows[i])
        if allowed is not None:
            adjusted.masked_fill_(~allowed, -torch.inf)
        return adjusted

    @staticmethod
    def _adjusts(state: _State) -> bool:
        return state.history is not None or state.bias_ids is not None or state.forbids

    @staticmethod
    def _adjust_row(row: Tensor, state: _State) -> None:
        if state.history is not None:
            state.history.penalize(row, state.config.penalties)
        state.bias(row)
