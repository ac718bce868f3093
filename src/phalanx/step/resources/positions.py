"""Position counters: the next position of every (request, label), in the KV plan's layout."""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.errors import ConfigurationError
from phalanx.step.declaration import DEFAULT_LABEL, Fork, ResourceStep, Segment, StepContext
from phalanx.step.lease import BufferClaim
from phalanx.step.outcomes import ADMITTED, AdmitOutcome, AdmitRuntimeError
from phalanx.step.resources.base import BuildInfo, Resource, ResourceConfig, ResourceSpec
from phalanx.step.resources.slot_buffers import SlotBuffers


class PositionScheme(enum.Enum):
    """How a segment's tokens take positions.

    `SEQUENTIAL`: each token the next one. `BLOCK`: all tokens of a segment share the next one (an
    image stands at one place of a text), and the counter moves by `block_step`.
    """

    SEQUENTIAL = "sequential"
    BLOCK = "block"


@dataclass(frozen=True)
class PositionSpec(ResourceSpec):
    """Declares position counters of one scheme."""

    scheme: PositionScheme = PositionScheme.SEQUENTIAL
    block_step: int = 1

    def __post_init__(self) -> None:
        if self.block_step < 1:
            raise ConfigurationError(
                f"positions {self.key!r}: block_step={self.block_step}; it must be at least 1"
            )

    def build(self, info: BuildInfo) -> Positions:
        return Positions(self, info.backend)


Ids = NDArray[np.int64]


@dataclass(frozen=True)
class PositionStep(ResourceStep):
    """The step's rows; with `commit=False` they see positions and do not advance them.

    Forks are those of the step on the cache: a target goes on where its source stands. `ids` are
    positions to use instead of the counters': of the tokens of each label that it names, or a bare
    array where the step has one label. `advance` says how far each segment moves its counter,
    instead of what the scheme says. Captured, the `labels` come first, in this order, also without
    rows.
    """

    segments: tuple[Segment, ...]
    commit: bool = True
    pre_forks: tuple[Fork, ...] = ()
    post_forks: tuple[Fork, ...] = ()
    ids: Ids | Mapping[str, Ids] | None = None
    advance: tuple[int, ...] | None = None
    labels: tuple[str, ...] = (DEFAULT_LABEL,)

    def __post_init__(self) -> None:
        if self.advance is not None and len(self.advance) != len(self.segments):
            raise ConfigurationError(
                f"advance has {len(self.advance)} entries for {len(self.segments)} segments"
            )
        for label, ids in self.explicit_ids().items():
            tokens = sum(one.span for one in self.segments if one.label == label)
            if ids.shape != (tokens,):
                raise ConfigurationError(
                    f"ids of label {label!r} have shape {ids.shape}; its segments have "
                    f"{tokens} tokens"
                )

    def explicit_ids(self) -> Mapping[str, Ids]:
        """The given positions by label."""
        if self.ids is None:
            return {}
        labels = {segment.label for segment in self.segments}
        if isinstance(self.ids, Mapping):
            unknown = self.ids.keys() - labels
            if unknown:
                raise ConfigurationError(
                    f"ids name labels {sorted(unknown)}; the segments have {sorted(labels)}"
                )
            return self.ids
        if len(labels) != 1:
            raise ConfigurationError(
                f"the segments have labels {sorted(labels)}: give ids by label, not as one array"
            )
        return {labels.pop(): self.ids}


class Positions(Resource):
    """See the module."""

    def __init__(self, spec: PositionSpec, backend: DeviceBackend) -> None:
        self.key = spec.key
        self._spec = spec
        self._backend = backend
        self._lock = threading.Lock()
        self._next: dict[str, dict[str, int]] = {}
        self._buffers = SlotBuffers(backend)
        self.skips = spec.scheme is PositionScheme.SEQUENTIAL

    def ingest_request(self, rid: str, config: ResourceConfig | None) -> None:
        with self._lock:
            self._next.setdefault(rid, {})

    def remove_request(self, rid: str) -> None:
        with self._lock:
            self._next.pop(rid, None)

    def plan(self, step: ResourceStep, ctx: StepContext) -> Tensor:
        """Positions of the step's tokens, int64 [tokens], in segment order; captured, label after
        label, each with all tokens of the bucket.
        """
        assert isinstance(step, PositionStep)
        numbers = self._numbers(step)
        if ctx.lease is None:
            return self._backend.upload(numbers)
        labels = list(dict.fromkeys((*step.labels, *(one.label for one in step.segments))))
        size = ctx.lease.bucket.tokens
        padded = np.zeros(len(labels) * size, dtype=np.int64)
        for index, label in enumerate(labels if step.segments else ()):
            own = numbers[_tokens_of(label, step.segments)]
            padded[index * size : index * size + len(own)] = own
        name = f"positions.{len(labels)}"
        return self._buffers.tokens(ctx.lease, name, padded, 0, len(labels))

    def claim_buffers(self, claim: BufferClaim) -> None:
        self._buffers.claim(claim)

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, PositionStep)
        with self._lock:
            self._copy(step.pre_forks)
            if step.commit:
                self._advance(step)
            self._copy(step.post_forks)

    def skip(self, rid: str, num_tokens: int) -> None:
        with self._lock:
            labels = self._next[rid]
            labels[DEFAULT_LABEL] = labels.get(DEFAULT_LABEL, 0) + num_tokens

    def publish(self, rid: str) -> dict[str, int]:
        """The next position by label."""
        with self._lock:
            return dict(self._next.get(rid, {}))

    def admit_retrieve(self, rid: str, published: object | None) -> AdmitOutcome:
        """Go on where another engine's counters stand; a counter is never moved back."""
        if published is None:
            return ADMITTED
        if not isinstance(published, Mapping):
            message = f"positions {self.key!r} cannot read {type(published).__name__!r}"
            return AdmitOutcome(ok=False, reason=AdmitRuntimeError(message, rid))
        with self._lock:
            labels = self._next.get(rid, {})
            for label, position in published.items():
                labels[label] = max(labels.get(label, 0), int(position))
        return ADMITTED

    def at_rest(self) -> bool:
        with self._lock:
            return not self._next

    def _numbers(self, step: PositionStep) -> Ids:
        numbers = np.empty(sum(segment.span for segment in step.segments), dtype=np.int64)
        in_block = self._spec.scheme is PositionScheme.BLOCK
        forked: dict[tuple[str, str], int] = {}
        at = 0
        with self._lock:
            for fork in step.pre_forks:
                source = (fork.request_id, fork.source)
                forked[fork.request_id, fork.target] = self._start(source, forked)
            for segment in step.segments:
                start = self._start((segment.request_id, segment.label), forked)
                if segment.span == 1:
                    numbers[at] = start
                else:
                    steps = 0 if in_block else np.arange(segment.span)
                    numbers[at : at + segment.span] = start + steps
                at += segment.span
        for label, ids in step.explicit_ids().items():
            numbers[_tokens_of(label, step.segments)] = ids
        return numbers

    def _advance(self, step: PositionStep) -> None:
        for index, segment in enumerate(step.segments):
            labels = self._next.get(segment.request_id)
            if labels is None:
                continue
            if step.advance is not None:
                moved = step.advance[index]
            elif self._spec.scheme is PositionScheme.BLOCK:
                moved = self._spec.block_step if segment.span else 0
            else:
                moved = segment.span
            labels[segment.label] = labels.get(segment.label, 0) + moved

    def _start(self, stream: tuple[str, str], forked: dict[tuple[str, str], int]) -> int:
        found = forked.get(stream)
        return self._position(*stream) if found is None else found

    def _position(self, rid: str, label: str) -> int:
        return self._next[rid].get(label, 0)

    def _copy(self, forks: tuple[Fork, ...]) -> None:
        for fork in forks:
            labels = self._next.get(fork.request_id)
            if labels is not None:
                labels[fork.target] = labels.get(fork.source, 0)


def _tokens_of(label: str, segments: tuple[Segment, ...]) -> NDArray[np.bool_]:
    """Which of the step's tokens belong to a label."""
    return np.repeat(
        [segment.label == label for segment in segments], [segment.span for segment in segments]
    )
