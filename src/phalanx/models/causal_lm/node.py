"""The one node of a language model: rows of one token (decode) and of many (prefill) in a step.

Over several ranks each computes its part of every step. Tokens come out equal on all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.models.causal_lm.decode_captures import DecodeCaptures, DecodeKey
from phalanx.models.causal_lm.decoder import Decoder, Hidden
from phalanx.models.causal_lm.row_input import RowInput, threaded, token_ids
from phalanx.models.causal_lm.scoring import BLOCK_ROWS, Chosen, Scores, joined, score
from phalanx.models.causal_lm.sequence import Sequence as TokenSequence
from phalanx.schema.generate import LogprobOptions
from phalanx.step.declaration import Segment, SubmoduleStep
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.outputs import Column, HostRow, NodeOutputs
from phalanx.step.resources.attention import AttentionStep, PagedAttention
from phalanx.step.resources.base import Resource
from phalanx.step.resources.kv_cache import KVStep
from phalanx.step.resources.positions import PositionStep
from phalanx.step.resources.sampler import Sampler, SamplerStep
from phalanx.step.submodule import EngineInputs, NodeSubmodule, StepRow
from phalanx.step.together import Together


@dataclass(frozen=True)
class _PromptScoring:
    """Prompt positions `first` to `end` of one row, which starts at token `offset` of the step and
    at position `start` of its sequence."""

    row: StepRow
    sequence: TokenSequence
    first: int
    end: int
    offset: int
    start: int


@dataclass(frozen=True)
class _Prepared:
    token_ids: Tensor
    positions: Tensor
    sampling: tuple[tuple[str, TokenSequence], ...]
    sample_rows: Tensor
    allowed: Tensor | None
    scoring: tuple[_PromptScoring, ...]


class DecoderNode(NodeSubmodule):
    """See the module. A row's state is a `Sequence`."""

    publishes = False
    speculates = True

    def __init__(
        self,
        decoder: Decoder,
        backend: DeviceBackend,
        max_batch: int,
        captures: DecodeCaptures | None = None,
    ) -> None:
        """`captures` of a model on one rank; None to compute every step eagerly."""
        super().__init__()
        self._captures = captures
        self.decoder = decoder
        self.together = Together(decoder.ranks.size)
        self._ranks = decoder.ranks
        self._alone = decoder.ranks.size == 1
        self._backend = backend
        self._max_batch = max_batch
        self._attention: PagedAttention
        self._sampler: Sampler

    @property
    def num_ranks(self) -> int:
        """How many ranks compute the model together."""
        return self._ranks.size

    def bind_node_resources(self, resources: Mapping[str, Resource]) -> None:
        attention, sampler = resources["attention"], resources["sampler"]
        assert isinstance(attention, PagedAttention)
        assert isinstance(sampler, Sampler)
        self._attention, self._sampler = attention, sampler

    def max_batch_size(self, walk: str) -> int | None:
        return self._max_batch

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        return True

    def prepare_inputs(self, walk: str, row: StepRow) -> RowInput:
        sequence: TokenSequence = row.info.state
        return sequence.step_input(row.span, row.ahead)

    def thread_outputs(
        self,
        walk: str,
        rows: Sequence[StepRow],
        inputs: Sequence[Any],
        before: Sequence[NodeOutputs],
    ) -> Sequence[Any]:
        return threaded(rows, inputs, before)

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]
    ) -> SubmoduleStep:
        segments = tuple(Segment(row.request_id, row.span) for row in rows)
        pairs = zip(rows, inputs, strict=True)
        sampling = tuple(row.request_id for row, given in pairs if given.samples)
        return _declared(segments, sampling, self.capture_key(walk, rows))

    def capture_configs(self) -> Sequence[CaptureConfig]:
        return () if self._captures is None else self._captures.configs()

    def capture_key(self, walk: str, rows: Sequence[StepRow]) -> DecodeKey | None:
        return None if self._captures is None else self._captures.key(rows)

    def declare_capture(self, walk: str, key: Hashable) -> SubmoduleStep:
        assert isinstance(key, DecodeKey)
        return _declared((), (), key)

    def static_inputs(self, walk: str, rows: int, tokens: int, key: Hashable) -> dict[str, Tensor]:
        assert self._captures is not None
        return self._captures.static_inputs(tokens)

    def preprocess(
        self, engine: EngineInputs, inputs: Sequence[Any]
    ) -> _Prepared | Mapping[str, Tensor]:
        if not self._alone:
            return self.together.run(partial(self._prepared, engine, inputs))
        prepared = self._prepared(engine, inputs)
        if engine.lease is None:
            return prepared
        return {"token_ids": prepared.token_ids, "positions": prepared.positions}

    def forward(self, prepared: _Prepared | Mapping[str, Tensor]) -> NodeOutputs:
        if not isinstance(prepared, _Prepared):
            return self._captured(prepared)
        if self._alone:
            return self._computed(prepared)
        return self.together.run(partial(self._computed, prepared))

    def _captured(self, inputs: Mapping[str, Tensor]) -> NodeOutputs:
        """One token of every row of a captured shape."""
        hidden = self.decoder(inputs["token_ids"], inputs["positions"], self._attention)
        tokens = self._sampler.sample(self.decoder.logits(hidden, None))
        return NodeOutputs({"token": Column.by_row(tokens)})

    def check_stop(self, row: StepRow, outputs: HostRow) -> frozenset[str]:
        sequence: TokenSequence = row.info.state
        return frozenset({"generate"}) if sequence.accept(outputs) else frozenset()

    def _prepared(self, engine: EngineInputs, inputs: Sequence[Any]) -> _Prepared:
        sampling: list[tuple[str, TokenSequence]] = []
        sample_rows: list[int] = []
        scoring: list[_PromptScoring] = []
        offset = 0
        for row, given in zip(engine.rows, inputs, strict=True):
            sequence: TokenSequence = row.info.state
            start = given.start
            first, end = sequence.scores.wanted_positions(start, start + row.span)
            if end > first or (sequence.scores.next_prompt == 0 and start == 0):
                scoring.append(_PromptScoring(row, sequence, first, end, offset, start))
            offset += row.span
            if given.samples:
                sampling.append((row.request_id, sequence))
                sample_rows.append(offset - 1)
        return _Prepared(
            token_ids(inputs, self._backend),
            engine.plans["positions"],
            tuple(sampling),
            self._backend.upload(np.array(sample_rows, dtype=np.int64)),
            self._allowed([sequence for _, sequence in sampling]),
            tuple(scoring),
        )

    def _computed(self, prepared: _Prepared) -> NodeOutputs:
        hidden = self.decoder(prepared.token_ids, prepared.positions, self._attention)
        columns: dict[str, Column] = {}
        ragged: dict[str, dict[str, Tensor]] = {}
        if prepared.sampling:
            self._sample(prepared, hidden, columns, ragged)
        for wanted in prepared.scoring:
            ragged.setdefault(wanted.row.request_id, {}).update(self._score_prompt(wanted, hidden))
        return NodeOutputs(columns, ragged)

    def _allowed(self, sequences: Sequence[TokenSequence]) -> Tensor | None:
        """Tokens that grammars allow, bool [rows, vocabulary]; None where there is no grammar."""
        if not any(sequence.constrained for sequence in sequences):
            return None
        allowed = np.ones((len(sequences), self.decoder.config.vocab_size), dtype=np.bool_)
        for row, sequence in enumerate(sequences):
            if sequence.constrained:
                allowed[row] = sequence.allowed()
        return self._backend.upload(allowed)

    def _sample(
        self,
        prepared: _Prepared,
        hidden: Hidden,
        columns: dict[str, Column],
        ragged: dict[str, dict[str, Tensor]],
    ) -> None:
        logits = self.decoder.logits(hidden, prepared.sample_rows)
        tokens = self._sampler.sample(logits, prepared.allowed)
        if not self._alone and not all(one.sampling.greedy for _, one in prepared.sampling):
            # Logits are equal on all ranks, but devices need not round probabilities alike. In
            # place, since the sampler counts these tokens.
            self._ranks.take_first(tokens)
        rids = tuple(rid for rid, _ in prepared.sampling)
        columns["token"] = Column(rids, tokens)
        for index, (rid, sequence) in enumerate(prepared.sampling):
            options = sequence.scores.options
            if options is None:
                continue
            at = slice(index, index + 1)
            scores = score(logits[at], tokens[at], options.top_k, options.token_ids)
            ragged.setdefault(rid, {}).update(
                score=scores.values[0],
                top_values=scores.top_values[0],
                top_ids=scores.top_ids[0],
                selected=scores.selected[0],
            )

    def _score_prompt(self, wanted: _PromptScoring, hidden: Hidden) -> dict[str, Tensor]:
        """Scores of a range of prompt positions; position 0 has an id and no score."""
        options = wanted.sequence.scores.options
        assert options is not None
        unscored = wanted.sequence.scores.next_prompt == 0
        first = 0 if unscored else wanted.first
        parts: list[Scores] = []
        for low in range(wanted.first, max(wanted.end, wanted.first + 1), BLOCK_ROWS):
            high = min(low + BLOCK_ROWS, wanted.end)
            # The logits of the token before a position score it.
            shift = wanted.offset - wanted.start - 1
            rows = torch.arange(low + shift, high + shift, device=hidden[0].device)
            targets = torch.tensor(wanted.sequence.tokens(low, high), device=hidden[0].device)
            logits = self.decoder.logits(hidden, rows)
            chosen = _chosen(options, low, high, logits.device)
            parts.append(score(logits, targets.long(), options.top_k, chosen))
        scores = joined(parts)
        return {
            "prompt_first": torch.tensor(first),
            "prompt_ids": torch.tensor(wanted.sequence.tokens(first, wanted.end)),
            "prompt_scores": scores.values,
            "prompt_top_values": scores.top_values,
            "prompt_top_ids": scores.top_ids,
            "prompt_selected": scores.selected,
        }


def _chosen(options: LogprobOptions, low: int, high: int, device: torch.device) -> Chosen:
    """The tokens to score at prompt positions `low` to `high` beside the prompt's own."""
    if not options.token_ids_by_position:
        return options.token_ids
    width = len(options.token_ids_by_position[0])
    rows = [options.selected_at(position) for position in range(low, high)]
    return torch.tensor(rows, dtype=torch.int64, device=device).reshape(high - low, width)


def _declared(
    segments: tuple[Segment, ...], sampling: tuple[str, ...], key: DecodeKey | None
) -> SubmoduleStep:
    return SubmoduleStep(
        segments,
        {
            "kv": KVStep(segments, max_context=None if key is None else key.max_context),
            "attention": AttentionStep(),
            "positions": PositionStep(segments),
            "sampler": SamplerStep(sampling, greedy_only=key is not None and key.greedy),
        },
        key,
        {"token": sampling},
    )
