"""Addressing of a step on state of fixed size: the slot of every row, padded where it is captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.step.declaration import Segment
from phalanx.step.lease import SlotLease
from phalanx.step.resources.slot_buffers import SlotBuffers
from phalanx.step.resources.slot_storage import SINK_SLOT


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


Place = tuple[int, bool]
"""A row's slot, and whether it has state."""


def eager_rows(places: Sequence[Place], rows: tuple[Segment, ...], to: DeviceBackend) -> SlotRows:
    """These rows, and no others."""
    slots = to.upload(np.array([slot for slot, _ in places], dtype=np.int64))
    has_state = to.upload(np.array([known for _, known in places], dtype=np.bool_))
    return SlotRows(slots, has_state, rows)


def captured_rows(
    label: str, sources: Sequence[Sequence[Place]], lease: SlotLease, buffers: SlotBuffers
) -> tuple[Tensor, Tensor]:
    """Slots and state of all rows of a bucket: a kernel reads every one of them.

    A combined label has the bucket's rows once for each of its sources.
    """
    times, rows = len(sources), lease.bucket.rows
    slots = np.full(times * rows, SINK_SLOT, dtype=np.int64)
    has_state = np.zeros(times * rows, dtype=np.bool_)
    for index, places in enumerate(sources):
        at = index * rows
        slots[at : at + len(places)] = [slot for slot, _ in places]
        has_state[at : at + len(places)] = [known for _, known in places]
    return (
        buffers.rows(lease, f"{label}.slots", slots, SINK_SLOT, times),
        buffers.rows(lease, f"{label}.has_state", has_state, 0, times),
    )
