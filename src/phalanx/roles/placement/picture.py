"""A plan as a picture: a row a bundle, a column a phase, and in each cell who is resident there.

Bundles that look alike are one row where there would be too many.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
    """`count` bundles in the order of nodes and devices, from `first` to `last`; with `by_node` the
    same devices of each node from that of the first to that of the last.
    """

    first: Bundle
    last: Bundle
    count: int
    by_node: bool
    cells: tuple[Cell | None, ...]

    @property
    def label(self) -> str:
        first, last = self.first, self.last
        if self.count == 1:
            return str(first)
        if first.node == last.node:
            return f"{first}-{last.device} ({self.count})"
        if not self.by_node:
            return f"{first} to {last} ({self.count:,})"
        devices = str(first.device)
        if last.device != first.device:
            devices += f"-{last.device}"
        return f"{first.node}:{devices} to {last.node}:{devices} ({self.count:,})"


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


@dataclass(frozen=True)
class _Span:
    """Lines that are one row: all from `first` to `last`, or with `by_node` some of each node."""

    first: int
    last: int
    count: int
    by_node: bool = False


_Column = tuple[_Holder, bool] | None
_Line = tuple[_Column, ...]


def picture(plan: PlacementPlan, max_rows: int) -> Picture:
    """All devices of the cluster in at most so many rows."""
    bundles = plan.cluster.bundles()
    phases = {
        user: [at for at, phase in enumerate(plan.phases) if user in phase.roles]
        for user in plan.users()
    }
    lines = [_line(plan, holders, phases) for holders in _holders(plan)]
    rows = [
        Row(
            bundles[span.first],
            bundles[span.last],
            span.count,
            span.by_node,
            _cells(plan, lines[span.first], lines[span.last]),
        )
        for span in _spans(plan, lines, max_rows)[:max_rows]
    ]
    num_hidden = len(bundles) - sum(row.count for row in rows)
    return Picture(
        tuple(phase.name for phase in plan.phases), tuple(rows), num_hidden, colours(plan)
    )


def colours(plan: PlacementPlan) -> dict[str, str]:
    """One a role, as RGB in hexadecimal, and grey for the trainer."""
    given = {role.role: COLOURS[index % len(COLOURS)] for index, role in enumerate(plan.roles)}
    return {**given, TRAINER: TRAINER_COLOUR}


def _holders(plan: PlacementPlan) -> list[list[_Holder]]:
    """Of each device of the cluster, in the order of nodes and devices."""
    first = plan.cluster.first_numbers()
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
        for group in role.engine_groups:
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


def _spans(plan: PlacementPlan, lines: Sequence[_Line], max_rows: int) -> list[_Span]:
    """The finest rows of which there are not too many, or the coarsest."""
    spans = [_Span(at, at, 1) for at in range(len(lines))]
    if len(spans) > max_rows:
        spans = list(_folded(lines, 0, len(lines), operator.eq))
    if len(spans) > max_rows:
        spans = list(_folded(lines, 0, len(lines), _same_models))
    if len(spans) > max_rows:
        spans = min(spans, list(_folded_nodes(plan, lines)), key=len)
    return spans


def _folded(
    lines: Sequence[_Line], start: int, end: int, alike: Callable[[_Line, _Line], bool]
) -> Iterator[_Span]:
    """Neighbours that are alike, of the lines from `start` to before `end`."""
    for at in range(start + 1, end + 1):
        if at == end or not alike(lines[start], lines[at]):
            yield _Span(start, at - 1, at - start)
            start = at


def _folded_nodes(plan: PlacementPlan, lines: Sequence[_Line]) -> Iterator[_Span]:
    """Neighbouring nodes whose devices look alike, each kind of device of them a row."""
    nodes: list[range] = []
    for each in plan.cluster.nodes:
        start = nodes[-1].stop if nodes else 0
        nodes.append(range(start, start + each.num_devices))
    run: list[range] = []
    for number, node in enumerate(nodes):
        run.append(node)
        after = nodes[number + 1] if number + 1 < len(nodes) else range(0)
        if len(after) == len(node) and all(
            _same_models(lines[one], lines[other]) for one, other in zip(node, after, strict=True)
        ):
            continue
        first, last = run[0], run[-1]
        for span in _folded(lines, first.start, first.stop, _same_models):
            offset = last.start - first.start
            yield _Span(span.first, span.last + offset, span.count * len(run), True)
        run = []


def _same_models(one: _Line, other: _Line) -> bool:
    return all(map(_same_model, one, other))


def _same_model(one: _Column, other: _Column) -> bool:
    if one is None or other is None:
        return one is other
    return (one[0].user, one[0].model) == (other[0].user, other[0].model)


def _cells(plan: PlacementPlan, first: _Line, last: _Line) -> tuple[Cell | None, ...]:
    models = [model.name for role in plan.roles for model in role.models]
    cells: list[Cell | None] = []
    for one, other in zip(first, last, strict=True):
        if one is None or other is None:
            cells.append(None)
        else:
            holder, active = one
            cells.append(Cell(holder.user, _label(holder, other[0], models), active))
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
