"""A plan as a picture: a row a bundle, a column a phase, and in each cell who is resident there.

Bundles that look alike are one row where there would be too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from phalanx.schema.job_placement import TRAINER, Bundle, PlacementPlan
from phalanx.schema.roles import PlacementMode

TRAINER_COLOUR = "#7f7f7f"
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee7733", "#009988")


@dataclass(frozen=True)
class Cell:
    """Who is on a bundle in a phase. With `active` the phase is theirs, else they only keep it."""

    user: str
    label: str
    active: bool


@dataclass(frozen=True)
class Row:
    """`count` bundles in the order of nodes and devices, from `first` to `last`."""

    first: Bundle
    last: Bundle
    count: int
    cells: tuple[Cell | None, ...]

    @property
    def label(self) -> str:
        if self.count == 1:
            return str(self.first)
        if self.first.node == self.last.node:
            return f"{self.first}-{self.last.device} ({self.count})"
        return f"{self.first} to {self.last} ({self.count:,})"


@dataclass(frozen=True)
class Picture:
    """`num_hidden` bundles are in none of the rows, for there were too many. `colours` are by user."""

    phases: tuple[str, ...]
    rows: tuple[Row, ...]
    num_hidden: int
    colours: dict[str, str]


@dataclass(frozen=True)
class _Holder:
    """Of a bundle: a replica, or the trainer; `ordinal` None is nobody yet, a bundle to scale into."""

    user: str
    model: str
    ordinal: int | None


_Column = tuple[_Holder, bool] | None
_Line = tuple[_Column, ...]


def picture(plan: PlacementPlan, max_rows: int) -> Picture:
    """All devices of the cluster in at most so many rows."""
    bundles = [
        Bundle(node.name, device)
        for node in plan.cluster.nodes
        for device in range(node.num_devices)
    ]
    holders = _holders(plan)
    lines = [_line(plan, holders.get(bundle, [])) for bundle in bundles]
    spans = [(at, at + 1) for at in range(len(lines))]
    for alike in (_same_replicas, _same_models):
        if len(spans) > max_rows:
            spans = list(_folded(lines, alike))
    shown = spans[:max_rows]
    rows = tuple(
        Row(bundles[start], bundles[end - 1], end - start, _cells(plan, lines[start:end]))
        for start, end in shown
    )
    num_hidden = len(bundles) - (shown[-1][1] if shown else 0)
    return Picture(tuple(phase.name for phase in plan.phases), rows, num_hidden, colours(plan))


def colours(plan: PlacementPlan) -> dict[str, str]:
    """One a role, as RGB in hexadecimal, and grey for the trainer."""
    given = {role.role: COLOURS[index % len(COLOURS)] for index, role in enumerate(plan.roles)}
    return {**given, TRAINER: TRAINER_COLOUR}


def _holders(plan: PlacementPlan) -> dict[Bundle, list[_Holder]]:
    holders: dict[Bundle, list[_Holder]] = {}
    for replica in plan.replicas:
        holder = _Holder(replica.role, replica.model, replica.ordinal)
        for bundle in plan.bundles(replica):
            holders.setdefault(bundle, []).append(holder)
    for user in plan.users():
        spare = _Holder(user, "", None)
        for bundle in plan.bundles_of(user):
            mine = holders.setdefault(bundle, [])
            if all(holder.user != user for holder in mine):
                mine.append(spare)
    return holders


def _line(plan: PlacementPlan, holders: Sequence[_Holder]) -> _Line:
    by_turns = plan.mode is PlacementMode.DEFER
    columns: list[_Column] = []
    for phase in plan.phases:
        column: _Column = None
        for holder in holders:
            active = holder.user in phase.roles
            if active or not by_turns:
                column = (holder, active)
        columns.append(column)
    return tuple(columns)


def _folded(
    lines: Sequence[_Line], alike: Callable[[_Line, _Line], bool]
) -> Iterator[tuple[int, int]]:
    start = 0
    for at in range(1, len(lines) + 1):
        if at == len(lines) or not alike(lines[start], lines[at]):
            yield start, at
            start = at


def _same_replicas(one: _Line, other: _Line) -> bool:
    return one == other


def _same_models(one: _Line, other: _Line) -> bool:
    return [_model(column) for column in one] == [_model(column) for column in other]


def _model(column: _Column) -> tuple[str, str] | None:
    return None if column is None else (column[0].user, column[0].model)


def _cells(plan: PlacementPlan, lines: Sequence[_Line]) -> tuple[Cell | None, ...]:
    models = [model.name for role in plan.roles for model in role.models]
    cells: list[Cell | None] = []
    for first, last in zip(lines[0], lines[-1], strict=True):
        if first is None or last is None:
            cells.append(None)
            continue
        holder, active = first
        cells.append(Cell(holder.user, _label(holder, last[0], models), active))
    return tuple(cells)


def _label(first: _Holder, last: _Holder, models: Sequence[str]) -> str:
    if first.user == TRAINER:
        return TRAINER
    if first.ordinal is None:
        return f"{first.user} (to scale)"
    name = f"{first.model}/{first.ordinal}"
    if last.ordinal != first.ordinal:
        name += f"..{last.ordinal}"
    return name if models.count(first.model) == 1 else f"{first.user} {name}"
