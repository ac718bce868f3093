"""What follows a step that has run: outputs are copied, rows are adjusted, shown their values, and
published; and what follows the end of a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from phalanx.step.attempt import attempt, attempt_each
from phalanx.step.batch import ExecutingBatch
from phalanx.step.outputs import HostRow, NodeOutputs, to_host
from phalanx.step.resources.base import Resource
from phalanx.step.submodule import NodeSubmodule, StepRow

logger = logging.getLogger(__name__)


def collect(batch: ExecutingBatch, computed: Iterable[NodeOutputs]) -> list[NodeOutputs]:
    """Copies of what a step has computed; a row whose part cannot be copied fails."""
    kept: list[NodeOutputs] = []
    for part in computed:
        made = attempt(part.owned)
        if made.value is not None:
            kept.append(made.value)
            continue
        # Whose values they are is found one by one.
        for rid, copy, error in attempt_each(partial(_owned_alone, part), part.receivers):
            if copy is not None:
                kept.append(copy)
            elif error is not None:
                batch.register_failure(rid, error)
    return kept


def _owned_alone(part: NodeOutputs, rid: str) -> NodeOutputs:
    return part.alone(rid).owned()


def adjust(submodule: NodeSubmodule, batch: ExecutingBatch) -> None:
    """Let the node adjust each row's metadata."""
    if type(submodule).postprocess is NodeSubmodule.postprocess:
        return
    for row, _, error in attempt_each(
        lambda row: submodule.postprocess(row, batch.outputs), batch.live_rows()
    ):
        if error is not None:
            batch.register_failure(row.request_id, error)


def read(submodule: NodeSubmodule, batch: ExecutingBatch) -> Mapping[str, HostRow]:
    """What a step gave, as Python values by request; a row whose part cannot be read fails."""
    wanted = submodule.read_on_host
    made = attempt(partial(to_host, batch.outputs, wanted))
    if made.value is not None:
        return made.value
    rows: dict[str, dict[str, Any]] = {}
    for part in batch.outputs:
        for rid, values, error in attempt_each(partial(_read_alone, part, wanted), part.receivers):
            if values is not None:
                rows.setdefault(rid, {}).update(values)
            elif error is not None:
                batch.register_failure(rid, error)
    return rows


def _read_alone(part: NodeOutputs, wanted: Collection[str] | None, rid: str) -> HostRow:
    return to_host((part.alone(rid),), wanted).get(rid, {})


def show(
    submodule: NodeSubmodule, batch: ExecutingBatch, values: Mapping[str, HostRow]
) -> dict[str, frozenset[str]]:
    """Hand every row its values and return the loops that ended, by request."""
    none: HostRow = {}
    stopped: dict[str, frozenset[str]] = {}
    for row, ended, error in attempt_each(
        lambda row: submodule.check_stop(row, values.get(row.request_id, none)),
        batch.live_rows(),
    ):
        if error is not None:
            batch.register_failure(row.request_id, error)
        elif ended:
            stopped[row.request_id] = ended
    return stopped


def publish(resources: Mapping[str, Resource], batch: ExecutingBatch) -> None:
    """Keep with each row what the resources say of its request now."""
    for row, _, error in attempt_each(partial(_publish, resources), batch.rows):
        if error is not None:
            batch.register_failure(row.request_id, error)


def forget(
    resources: Mapping[str, Resource], submodules: Mapping[str, NodeSubmodule], rid: str
) -> None:
    """Free a request everywhere. What one place raises is logged; the others are not kept from it."""
    removals: list[tuple[str, Callable[[str], None]]] = [
        (f"resource {key!r}", resource.remove_request) for key, resource in resources.items()
    ]
    removals += [(f"node {name!r}", node.cleanup_request) for name, node in submodules.items()]
    for (place, _), _, error in attempt_each(lambda one: one[1](rid), removals):
        if error is not None:
            logger.error("%s did not forget request %r", place, rid, exc_info=error)


def _publish(resources: Mapping[str, Resource], row: StepRow) -> None:
    for key, resource in resources.items():
        published = resource.publish(row.request_id)
        if published is not None:
            row.info.published[key] = published
