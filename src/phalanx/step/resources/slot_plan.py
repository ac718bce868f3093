"""Addressing of a step on state of fixed size: the slot of every row, padded where it is captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.step.declaration import Segment
from phalanx.step.lease import BufferClaim, SlotLease


@dataclass(frozen=True)
class SlotRows:
    """Rows of one plan label. Padding rows address the sink, without state."""

    slots: Tensor
    """int64 [rows]."""
    has_state: Tensor
    """bool [rows]: whether the row has been through a step before; its slot holds zeros if not."""
    rows: tuple[Segment, ...] = ()


@dataclass(frozen=True)
class SlotPlan:
    """The rows of a step by label, and the slots to copy before it is computed, from and to."""

    by_label: Mapping[str, SlotRows]
    copies: tuple[tuple[int, int], ...] = ()


class SlotPlanBuffers:
    """Static buffers of captured steps, by (lease slot, label): taken once and never moved.

    A kernel reads every row of a captured shape, so each plan writes all rows of its bucket.
    """

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._max_rows = 0
        self._buffers: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def claim(self, claim: BufferClaim) -> None:
        self._max_rows = max(self._max_rows, claim.max_rows)

    def fill(
        self,
        lease: SlotLease,
        label: str,
        num_sources: int,
        slots: Sequence[int],
        has_state: Sequence[bool],
    ) -> tuple[Tensor, Tensor]:
        """Both columns of a bucket's rows; a combined label has the rows of all its sources."""
        rows = lease.bucket.rows * num_sources
        if lease.bucket.rows > self._max_rows:
            raise ValueError(
                f"a bucket of {lease.bucket.rows} rows; buffers were claimed for {self._max_rows}"
            )
        columns = self._columns(lease.slot, label, num_sources)
        for column, values in zip(columns, (slots, has_state), strict=True):
            padded = np.zeros(rows, dtype=np.int64)
            padded[: len(values)] = values
            column[:rows].copy_(self._backend.upload(padded))
        return columns[0][:rows], columns[1][:rows]

    def _columns(self, slot: int, label: str, num_sources: int) -> tuple[Tensor, Tensor]:
        found = self._buffers.get((slot, label))
        if found is None:
            shape = (self._max_rows * num_sources,)
            zeros = self._backend.zeros
            found = zeros(shape, torch.int64), zeros(shape, torch.bool)
            self._buffers[slot, label] = found
        return found
