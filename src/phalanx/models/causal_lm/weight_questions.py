"""Answers questions about the weights that are served, of all ranks together."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import InvalidRequestError
from phalanx.layers.weight_slots import Slot, Target
from phalanx.models.causal_lm.checkpoint import is_fused
from phalanx.models.causal_lm.weight_store import DecoderWeights
from phalanx.parallel.ranks import Ranks
from phalanx.schema.control import (
    CheckWeights,
    Question,
    ReadWeight,
    WeightAnswer,
    WeightCheck,
    WeightReport,
    WeightSample,
)

MAX_VALUES = 1 << 24


class WeightQuestions:
    """See the module. Every rank is asked the same at the same point; all weights are there."""

    def __init__(self, weights: DecoderWeights, ranks: Ranks) -> None:
        self._weights = weights
        self._ranks = ranks
        self._snapshot: dict[str, int] | None = None

    def answer(self, question: Question) -> WeightAnswer:
        """Raises `InvalidRequestError` where there is no such weight, or nothing to compare with."""
        match question:
            case ReadWeight(name=name, limit=limit):
                return self._read(name, limit)
            case CheckWeights(action=action):
                return self._check(action)

    def _read(self, name: str, limit: int) -> WeightSample:
        target = self._weights.targets.get(name)
        if target is None:
            raise InvalidRequestError(
                f"weight {name!r} is not one of this model; names are those of its checkpoint, such "
                f"as {next(iter(self._weights.targets))!r}",
                field="name",
            )
        if not 1 <= limit <= MAX_VALUES:
            raise InvalidRequestError(
                f"limit={limit} must be from 1 to {MAX_VALUES} numbers", field="limit"
            )
        shape = target.shape
        width = math.prod(shape[1:])
        num_rows = min(shape[0], -(-limit // width))
        # No rank holds everything, and some hold the same.
        whole = torch.full((num_rows, width), -math.inf, dtype=torch.float64)
        value = target.slot.value() if target.slot.is_here else torch.empty(0)
        columns = slice(0, width) if target.slot.columns is None else target.slot.columns.slice
        for start, span in target.held():
            count = min(span.stop, num_rows) - span.start
            if count > 0:
                part = value[start : start + count].reshape(count, -1)
                whole[span.start : span.start + count, columns] = part.double().cpu()
        found = self._ranks.greatest(whole.to(self._ranks.dense.device)).flatten()[:limit]
        dtype = str(self._weights.dtype).removeprefix("torch.")
        return WeightSample(name=name, shape=shape, dtype=dtype, values=tuple(found.tolist()))

    def _check(self, action: WeightCheck) -> WeightReport:
        if action is WeightCheck.COMPARE and self._snapshot is None:
            raise InvalidRequestError(
                "there is no snapshot to compare with; take one with action 'snapshot' first",
                field="action",
            )
        if action is WeightCheck.RESET_TENSORS:
            self._weights.scramble()
        digests = dict(self._digests())
        differing = None
        if action is WeightCheck.SNAPSHOT:
            self._snapshot = digests
        elif action is WeightCheck.COMPARE and self._snapshot is not None:
            before = self._snapshot
            flags = self._ranks.of_all([before[name] != now for name, now in digests.items()])
            differing = tuple(
                name for name, *on_ranks in zip(digests, *flags, strict=True) if any(on_ranks)
            )
        of_all = self._ranks.of_all(list(digests.values()))
        checksum = hashlib.blake2b(np.array(of_all, dtype=np.int64).tobytes(), digest_size=16)
        return WeightReport(checksum=checksum.hexdigest(), differing=differing)

    def _digests(self) -> Iterator[tuple[str, int]]:
        """A number for what this rank holds of each weight; a parameter's are neighbours."""
        slot: Slot | None = None
        value = torch.empty(0)
        for name, target in self._weights.targets.items():
            if is_fused(name):
                continue
            if target.slot is not slot:
                slot = target.slot
                value = slot.value().cpu() if slot.is_here else torch.empty(0)
            yield name, _digest(target, value)


def _digest(target: Target, value: Tensor) -> int:
    found = hashlib.blake2b(digest_size=8)
    for start, span in target.held():
        part = value[start : start + span.size].contiguous()
        found.update(part.reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(found.digest(), "little", signed=True)
