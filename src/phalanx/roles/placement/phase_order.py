"""The phases of a job: those that were given, checked, or one a role and then the trainer's."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

from phalanx.errors import ConfigurationError
from phalanx.schema.job_placement import TRAINER, PhaseSpec, PlacementRequest
from phalanx.schema.roles import InferenceRoleSpec, PlacementMode, WorkloadType

TRAIN = "train"
"""The trainer's phase, where none was named."""
_ORDER = (WorkloadType.ROLLOUT, WorkloadType.GENRM, WorkloadType.TEACHER)


def phases_of(request: PlacementRequest, placed: Collection[str]) -> tuple[PhaseSpec, ...]:
    """In their order. `placed` are the roles that have devices, and perhaps the trainer.

    Raises `ConfigurationError` for phases of nobody or of somebody unknown and, where bundles are
    shared by turns, for those that leave somebody without a turn.
    """
    if not request.phases:
        return default_phases(request.roles)
    _check_names(request)
    if request.mode is PlacementMode.DEFER:
        _check_turns(request.phases, placed)
    return request.phases


def default_phases(roles: Iterable[InferenceRoleSpec]) -> tuple[PhaseSpec, ...]:
    """One a role, students before judges before teachers, and the trainer's at the end."""
    ordered = sorted(roles, key=lambda role: _ORDER.index(role.workload))
    trainer = TRAIN if all(role.role != TRAIN for role in ordered) else TRAINER
    return (
        *(PhaseSpec(role.role, (role.role,)) for role in ordered),
        PhaseSpec(trainer, (TRAINER,)),
    )


def turns(phases: Sequence[PhaseSpec], user: str) -> tuple[str, ...]:
    """The names of the phases in which a role, or the trainer, may be resident."""
    return tuple(phase.name for phase in phases if user in phase.roles)


def _check_names(request: PlacementRequest) -> None:
    known = [role.role for role in request.roles] + [TRAINER]
    seen: set[str] = set()
    for phase in request.phases:
        place = f"placement.phases: {phase.name}"
        # A name alone is both.
        named = "placement.phases" if phase.roles == (phase.name,) else place
        if phase.name in seen:
            raise ConfigurationError(
                f"{place} is given twice; give it once, or name the second one otherwise"
            )
        seen.add(phase.name)
        if not phase.roles:
            raise ConfigurationError(
                f"{place} has no roles; name some of {', '.join(known)}, or leave it out"
            )
        for name in phase.roles:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, 0.0)[0]
                raise ConfigurationError(
                    f"{named} has {name!r}, which is no role of this job; did you mean {near!r}?"
                    f" (allowed: {', '.join(known)})"
                )
            if phase.roles.count(name) > 1:
                raise ConfigurationError(f"{place} has {name!r} twice; name it once")


def _check_turns(phases: Sequence[PhaseSpec], placed: Collection[str]) -> None:
    for user in placed:
        if not turns(phases, user):
            raise ConfigurationError(
                f"placement.phases has none of {user!r}, which therefore could never be resident;"
                f" add {TRAIN if user == TRAINER else user!r} to the phases, or leave phases out,"
                " which is one a role and then the trainer's"
            )
    for phase in phases:
        others = [name for name in phase.roles if name != TRAINER]
        if TRAINER in phase.roles and others:
            raise ConfigurationError(
                f"placement.phases: {phase.name} has the trainer and {', '.join(others)}; with"
                " placement.mode=defer the trainer begins when everybody else sleeps, so give it a"
                " phase of its own, or say placement.mode: split"
            )
