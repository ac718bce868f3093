"""What a forward gives back: columns with one row a request, copied once and read on the host once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class NodeOutputs:
    """Outputs of one forward.

    `columns` hold one row for each of `request_ids` (first dimension). `ragged` holds tensors of
    any shape by request, for outputs whose size differs from request to request.
    """

    request_ids: tuple[str, ...] = ()
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    ragged: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def owned(self) -> NodeOutputs:
        """Copies that no later forward overwrites: one clone a column, not one a row."""
        return NodeOutputs(
            self.request_ids,
            {name: column.clone() for name, column in self.columns.items()},
            self.ragged,
        )

    def row(self, rid: str) -> dict[str, Tensor]:
        """All outputs of one request."""
        found = dict(self.ragged.get(rid, {}))
        if rid in self.request_ids:
            index = self.request_ids.index(rid)
            found.update({name: column[index] for name, column in self.columns.items()})
        return found


HostRow = Mapping[str, Any]
"""One request's outputs as Python numbers and lists, by name."""


def to_host(parts: Iterable[NodeOutputs]) -> Mapping[str, HostRow]:
    """All outputs as Python values by request; one transfer a column."""
    rows: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, column in part.columns.items():
            for rid, value in zip(part.request_ids, column.tolist(), strict=True):
                rows.setdefault(rid, {})[name] = value
        for rid, tensors in part.ragged.items():
            row = rows.setdefault(rid, {})
            row.update({name: tensor.tolist() for name, tensor in tensors.items()})
    return rows
