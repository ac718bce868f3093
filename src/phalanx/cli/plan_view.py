"""What the command line shows of a placement plan: a table of replicas, a picture, or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.roles.placement.phase_order import turns
from phalanx.roles.placement.picture import Cell, Picture, picture
from phalanx.roles.placement.reservations import shares
from phalanx.roles.placement.svg import is_dark
from phalanx.schema.job_placement import (
    ACTOR_GROUP,
    TRAINER,
    Bundle,
    PlacementPlan,
    ReplicaPlacement,
)
from phalanx.schema.roles import EngineKind, InferenceRoleSpec, PlacementMode

MAX_ROWS = 32
_MIB = 1 << 20
_FILE_WIDTH = 160


def plan_console() -> Console:
    """Wide where no terminal limits it."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


def plan_title(plan: PlacementPlan) -> str:
    """The mode, and what there is to place roles on."""
    nodes = plan.cluster.nodes
    if not nodes:
        return f"{plan.mode.value}, devices not planned"
    sizes = {node.num_devices for node in nodes}
    total = plan.cluster.num_devices
    words = f"{len(nodes):,} node{'' if len(nodes) == 1 else 's'}"
    if len(sizes) == 1:
        words += f" of {_devices(nodes[0].num_devices)}"
    if len(nodes) > 1:
        words += f", {_devices(total)} in all"
    memory = plan.cluster.device_memory_bytes
    simulated = "" if memory is None else f", simulated with {memory / _MIB:,.0f} MiB each"
    return f"{plan.mode.value}: {words}{simulated}"


def _devices(count: int) -> str:
    return f"{count:,} device{'' if count == 1 else 's'}"


def plan_view(plan: PlacementPlan) -> RenderableType:
    """The title, a row a replica (or a group of them), and the picture."""
    drawn = picture(plan, MAX_ROWS)
    parts: list[RenderableType] = [Text(plan_title(plan), style="bold"), _table(plan, drawn)]
    if drawn.rows:
        parts += ["", *_picture(drawn, by_turns=plan.mode is PlacementMode.DEFER)]
    return Group(*parts)


def _table(plan: PlacementPlan, drawn: Picture) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("role", "model", "replica", "devices", "placement group", "owner", "phases"):
        table.add_column(name, overflow="fold", no_wrap=name in ("role", "replica", "owner"))
    for row in _rows(plan):
        role, *rest = row
        table.add_row(Text(role, style=drawn.colours.get(role, "")), *rest)
    return table


def _rows(plan: PlacementPlan) -> Iterator[Sequence[str]]:
    whole = len(plan.replicas) <= MAX_ROWS
    for role in plan.roles:
        placed = [replica for replica in plan.replicas if replica.role == role.role]
        phases = ", ".join(turns(plan.phases, role.role)) or "-"
        if not placed:
            yield role.role, "", "", _unplaced(plan, role), "-", "-", phases
        for (model, _), group in groupby(placed, lambda each: (each.model, each.group_index)):
            replicas = list(group)
            for some in [[each] for each in replicas] if whole else [replicas]:
                yield role.role, model, *_where(plan, some), phases
    if plan.trainer_bundles:
        owner = plan.group(ACTOR_GROUP).owner.value
        phases = ", ".join(turns(plan.phases, TRAINER)) or "-"
        yield TRAINER, "", "", devices(plan.bundles_of_trainer()), ACTOR_GROUP, owner, phases


def _unplaced(plan: PlacementPlan, role: InferenceRoleSpec) -> str:
    """Why a role has no devices here."""
    if all(group.engine is EngineKind.EXTERNAL for group in role.engine_groups):
        return "elsewhere"
    return "none" if plan.cluster.nodes else "not planned"


def _where(plan: PlacementPlan, replicas: Sequence[ReplicaPlacement]) -> tuple[str, ...]:
    first, last = replicas[0], replicas[-1]
    name = first.engine_id if len(replicas) == 1 else f"{first.engine_id}..{last.ordinal}"
    bundles = [bundle for replica in replicas for bundle in plan.bundles(replica)]
    group = plan.group(first.placement_group)
    return name, devices(bundles), group.name, group.owner.value


def devices(bundles: Sequence[Bundle]) -> str:
    """`node-0:0-3` for neighbours of one node; long lists as their beginning and end."""
    parts = []
    for node, of_node in groupby(bundles, lambda bundle: bundle.node):
        numbers = [bundle.device for bundle in of_node]
        parts.append(f"{node}:{_ranges(numbers)}")
    if len(parts) > 4:
        return f"{parts[0]} to {parts[-1]} ({len(bundles):,})"
    return " ".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _picture(drawn: Picture, *, by_turns: bool) -> list[RenderableType]:
    table = Table(box=None, pad_edge=False)
    table.add_column("device", no_wrap=True)
    for name in drawn.phases:
        table.add_column(f" {name}", no_wrap=True)
    for row in drawn.rows:
        table.add_row(row.label, *(_cell(drawn, cell) for cell in row.cells))
    parts: list[RenderableType] = [table]
    if drawn.num_hidden:
        parts.append(f"and {drawn.num_hidden:,} more devices; --json has all of them")
    if not by_turns:
        parts.append("in brackets: resident, while the phase is another's")
    return parts


def _cell(drawn: Picture, cell: Cell | None) -> Text:
    if cell is None:
        return Text(" -", style="dim")
    colour = drawn.colours[cell.user]
    if not cell.active:
        return Text(f"({cell.label})", style=colour)
    ink = "white" if is_dark(colour) else "black"
    return Text(f" {cell.label} ", style=f"{ink} on {colour}")


def plan_json(plan: PlacementPlan) -> str:
    """For programs: nodes, groups, replicas with their devices, the trainer, phases, reservations."""
    document = {
        "mode": plan.mode.value,
        "nodes": [{"name": node.name, "devices": node.num_devices} for node in plan.cluster.nodes],
        "device_memory_bytes": plan.cluster.device_memory_bytes,
        "placement_groups": [
            {
                "name": group.name,
                "owner": group.owner.value,
                "users": group.users,
                "bundles": [str(bundle) for bundle in group.bundles],
            }
            for group in plan.groups
        ],
        "replicas": [
            {
                "role": replica.role,
                "engine_id": replica.engine_id,
                "placement_group": replica.placement_group,
                "bundles": replica.bundle_indices,
                "devices": [str(bundle) for bundle in plan.bundles(replica)],
            }
            for replica in plan.replicas
        ],
        "trainer_bundles": plan.trainer_bundles,
        "phases": [{"name": phase.name, "roles": phase.roles} for phase in plan.phases],
        "reservations": shares(plan),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode()
