"""A plan as a picture: a row a bundle, a column a phase, and in each cell who is resident there.

Bundles that look alike are one row where there would be too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from phalanx.schema.job_placement import ACTOR_GROUP, TRAINER, Bundle, PlacementPlan
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
    phases = {
        user: [at for at, phase in enumerate(plan.phases) if user in phase.roles]
        for user in plan.users()
    }
    lines = [_line(plan, holders, phases) for holders in _holders(plan)]
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


def _holders(plan: PlacementPlan) -> list[list[_Holder]]:
    """Of each device of the cluster, in the order of nodes and devices."""
    nodes = plan.cluster.nodes
    ends = accumulate(node.num_devices for node in nodes)
    first = {node.name: end - node.num_devices for node, end in zip(nodes, ends, strict=True)}
    places = {
        group.name: [first[bundle.node] + bundle.device for bundle in group.bundles]
        for group in plan.groups
    }
    holders: list[list[_Holder]] = [[] for _ in range(plan.cluster.num_devices)]
    for replica in plan.replicas:
        holder = _Holder(replica.role, replica.model, replica.ordinal)
        for index in replica.bundle_indices:
            holders[places[replica.placement_group][index]].append(holder)
    for role in plan.roles:
        spare = _Holder(role.role, "", None)
        for group in (group for model in role.models for group in model.engine_groups):
            if group.placement is not None:
                used = group.num_replicas * group.ranks_per_replica
                for index in group.placement.bundle_indices[used:]:
                    holders[places[ACTOR_GROUP][index]].append(spare)
    trainer = _Holder(TRAINER, "", None)
    for index in plan.trainer_bundles:
        holders[places[ACTOR_GROUP][index]].append(trainer)
    return holders


def _line(
    plan: PlacementPlan, holders: Sequence[_Holder], phases: Mapping[str, Sequence[int]]
) -> _Line:
    line: list[_Column] = [None] * len(plan.phases)
    for holder in holders:
        if plan.mode is not PlacementMode.DEFER:
            line = [(holder, False)] * len(line)
        for at in phases[holder.user]:
            line[at] = (holder, True)
    return tuple(line)


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
    return all(map(_same_model, one, other))


def _same_model(one: _Column, other: _Column) -> bool:
    if one is None or other is None:
        return one is other
    return (one[0].user, one[0].model) == (other[0].user, other[0].model)


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
