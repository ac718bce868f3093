"""What a step takes of each sequence before it is computed; its token may still be on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.step.outputs import NodeOutputs
from phalanx.step.submodule import StepRow

_PLACEHOLDER = (0,)


@dataclass(frozen=True, slots=True)
class RowInput:
    """Token `ids` from position `start` on. `samples`: the step gives the sequence a token.

    A `pending` row computes the one token that the step before gives: `given` is that step's column
    of tokens, int64 [rows], and the row's place in it.
    """

    ids: Sequence[int]
    start: int
    samples: bool
    pending: bool = False
    given: tuple[Tensor, int] | None = None

    @classmethod
    def awaiting(cls, start: int, *, samples: bool) -> RowInput:
        """The row of a token that nobody knows yet."""
        return cls(_PLACEHOLDER, start, samples, pending=True)


def threaded(
    rows: Sequence[StepRow], inputs: Sequence[RowInput], before: Sequence[NodeOutputs]
) -> list[RowInput | None]:
    """The inputs with what the step before gave pending ones; None for those it gave no token."""
    columns = [part.columns["token"] for part in before if "token" in part.columns]
    given = {
        rid: (column.values, place)
        for column in columns
        for place, rid in enumerate(column.request_ids)
    }
    return [
        _completed(one, given.get(row.request_id)) for row, one in zip(rows, inputs, strict=True)
    ]


def _completed(one: RowInput, given: tuple[Tensor, int] | None) -> RowInput | None:
    if not one.pending:
        return one
    return None if given is None else replace(one, given=given)


def token_ids(inputs: Sequence[RowInput], backend: DeviceBackend) -> Tensor:
    """The step's token ids in the order of its rows, int64 [tokens], without asking the device."""
    first = inputs[0].given if inputs else None
    if first is not None and len(first[0]) == len(inputs):
        whole = first[0]
        if all(_is(one.given, whole, place) for place, one in enumerate(inputs)):
            return whole
    host = np.fromiter((token for one in inputs for token in one.ids), dtype=np.int64)
    ids = backend.upload(host)
    at = 0
    places: dict[int, tuple[Tensor, list[int], list[int]]] = {}
    for one in inputs:
        if one.given is not None:
            values, place = one.given
            _, targets, sources = places.setdefault(id(values), (values, [], []))
            targets.append(at)
            sources.append(place)
        at += len(one.ids)
    for values, targets, sources in places.values():
        picked = values[backend.upload(np.array(sources, dtype=np.int64))]
        ids[backend.upload(np.array(targets, dtype=np.int64))] = picked
    return ids


def _is(given: tuple[Tensor, int] | None, values: Tensor, place: int) -> bool:
    return given is not None and given[0] is values and given[1] == place
