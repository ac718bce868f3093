"""Where a job is in its batch, in lines of text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from phalanx.cli.words import duration, on_one_line
from phalanx.wire.phases import Holding, LeaseView, PhasesDocument

_MAX_DEVICES = 4


def phase_lines(document: PhasesDocument, wall_s: float) -> Iterator[str]:
    """The phase and the batch, then who has devices, and what keeps the job from going on."""
    batch = f" of batch {document.batch}" if document.batch is not None else ""
    order = ", ".join(
        f"[{phase.name}]" if phase.name == document.phase else phase.name
        for phase in document.phases
    )
    yield f"phase: {document.phase or 'none'}{batch} ({document.mode}: {order})"
    under_way = document.transition
    if under_way is not None:
        target = "no phase" if under_way.phase is None else under_way.phase
        since = duration(wall_s - under_way.since_wall_s)
        yield f"  to {target} for {since}: the job {under_way.step}"
    yield from _leases(document.leases)
    if document.trainer_id is not None:
        holds = {
            Holding.NOTHING: "holds nothing",
            Holding.MEMORY: "holds its devices",
            Holding.UNKNOWN: "perhaps holds its devices: nobody has heard of it since a restart",
        }[document.trainer_holding]
        yield f"  trainer {document.trainer_id} {holds}"
    if document.blocked is not None:
        yield f"  blocked: {on_one_line(document.blocked)}; `phalanx phase recover` finds out"


def _leases(leases: tuple[LeaseView, ...]) -> Iterator[str]:
    held: dict[str, list[LeaseView]] = defaultdict(list)
    for lease in leases:
        if lease.holder is not None:
            held[lease.holder].append(lease)
    for holder, its in held.items():
        names = [lease.bundle for lease in its[:_MAX_DEVICES]]
        more = [f"and {len(its) - _MAX_DEVICES} more"] if len(its) > _MAX_DEVICES else []
        unsure = ", and nobody is certain what it holds" * (its[0].holding is Holding.UNKNOWN)
        yield f"  {holder} has the lease of {', '.join(names + more)}{unsure}"
