"""What a forward gives back: columns with one row a request, copied once and read on the host once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Column:
    """One value for each of `request_ids`: `values` has as many rows."""

    request_ids: tuple[str, ...]
    values: Tensor

    def __post_init__(self) -> None:
        if self.values.dim() == 0 or len(self.values) != len(self.request_ids):
            raise ValueError(
                f"a column of {len(self.request_ids)} requests has values of shape "
                f"{tuple(self.values.shape)}; the first dimension must be one row a request"
            )

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The row of every request."""
        return {rid: row for row, rid in enumerate(self.request_ids)}

    @classmethod
    def by_row(cls, values: Tensor) -> Column:
        """A captured forward's column: row i belongs to the i-th row of the step."""
        return cls(("",) * len(values), values)


@dataclass(frozen=True)
class NodeOutputs:
    """Outputs of one forward: columns by name, and `ragged` tensors of any shape by request, for
    what differs in size from request to request.
    """

    columns: Mapping[str, Column] = field(default_factory=dict)
    ragged: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def owned(self) -> NodeOutputs:
        """Copies that no later forward overwrites: one clone a column, not one a row."""
        return NodeOutputs(
            {
                name: Column(column.request_ids, column.values.clone())
                for name, column in self.columns.items()
            },
            {
                rid: {name: tensor.clone() for name, tensor in tensors.items()}
                for rid, tensors in self.ragged.items()
            },
        )

    @property
    def receivers(self) -> tuple[str, ...]:
        """Every request that is given something, once."""
        given = [rid for column in self.columns.values() for rid in column.request_ids]
        return tuple(dict.fromkeys((*given, *self.ragged)))

    def alone(self, rid: str) -> NodeOutputs:
        """What one request is given, nobody beside it."""
        ragged = {rid: self.ragged[rid]} if rid in self.ragged else {}
        columns = {
            name: Column((rid,), column.values[column.places[rid]].unsqueeze(0))
            for name, column in self.columns.items()
            if rid in column.places
        }
        return NodeOutputs(columns, ragged)

    def of_rows(
        self, request_ids: tuple[str, ...], receivers: Mapping[str, tuple[str, ...]]
    ) -> NodeOutputs:
        """The rows of a step in what its bucket computed; `receivers` of a column, if it names
        them, else all.
        """
        columns: dict[str, Column] = {}
        places = {rid: row for row, rid in enumerate(request_ids)}
        for name, column in self.columns.items():
            getting = receivers.get(name, request_ids)
            values = column.values[: len(request_ids)]
            if getting != request_ids:
                at = [places[rid] for rid in getting]
                values = values[at]
            columns[name] = Column(getting, values)
        return NodeOutputs(columns)

    def row(self, rid: str) -> dict[str, Tensor]:
        """All outputs of one request."""
        found = dict(self.ragged.get(rid, {}))
        for name, column in self.columns.items():
            if rid in column.places:
                found[name] = column.values[column.places[rid]]
        return found


def checked(outputs: object, node: str) -> NodeOutputs:
    """What the forward of a node returned; raises `TypeError` if that is not outputs throughout."""
    what = f"the forward of node {node!r} returned"
    if not isinstance(outputs, NodeOutputs):
        raise TypeError(f"{what} a {type(outputs).__name__}; it must return NodeOutputs")
    for name, column in outputs.columns.items():
        if not isinstance(column, Column):
            raise TypeError(
                f"{what} a {type(column).__name__} as column {name!r}; it must be a Column, which "
                "says whose the rows are"
            )
    for rid, tensors in outputs.ragged.items():
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{what} a {type(tensor).__name__} as ragged {name!r} of request {rid!r}; it "
                    "must be a tensor"
                )
    return outputs


HostRow = Mapping[str, Any]
"""One request's outputs as Python numbers and lists, by name."""


def to_host(
    parts: Iterable[NodeOutputs], wanted: Collection[str] | None = None
) -> Mapping[str, HostRow]:
    """Outputs as Python values by request, all or those `wanted`; one transfer a column."""
    rows: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, column in part.columns.items():
            if wanted is not None and name not in wanted:
                continue
            for rid, value in zip(column.request_ids, column.values.tolist(), strict=True):
                rows.setdefault(rid, {})[name] = value
        for rid, tensors in part.ragged.items():
            row = rows.setdefault(rid, {})
            for name, tensor in tensors.items():
                if wanted is None or name in wanted:
                    row[name] = tensor.tolist()
    return rows
