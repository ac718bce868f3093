"""Which phases a job has, and which devices its tenants share by turns: what a coordinator needs of a
job's placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from phalanx.errors import ConfigurationError
from phalanx.roles.coordination.record import JobShape
from phalanx.roles.placement.phase_order import default_phases
from phalanx.schema.job_placement import TRAINER, PhaseSpec, PlacementPlan
from phalanx.schema.roles import InferenceRoleSpec, PlacementMode
from phalanx.wire.phases import PhaseView


@dataclass(frozen=True)
class Schedule:
    """`bundles` are those of the tenants that take turns, none of a job whose roles all stay."""

    mode: PlacementMode
    phases: tuple[PhaseSpec, ...]
    bundles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scheduled = {name for phase in self.phases for name in phase.roles}
        idle = sorted(set(self.bundles) - scheduled)
        if idle:
            raise ConfigurationError(
                f"{', '.join(idle)} takes turns on its devices and is in no phase; put it in one"
            )

    @property
    def takes_turns(self) -> bool:
        return self.mode is PlacementMode.DEFER

    @property
    def shape(self) -> JobShape:
        return JobShape(
            mode=self.mode.value,
            phases=self.views,
            trainer_bundles=self.bundles.get(TRAINER, ()),
        )

    @property
    def views(self) -> tuple[PhaseView, ...]:
        return tuple(PhaseView(phase.name, phase.roles) for phase in self.phases)


def schedule_of(plan: PlacementPlan | None, roles: Iterable[InferenceRoleSpec]) -> Schedule:
    """Of a job with these roles, which need no plan where all of them stay where they are."""
    if plan is None:
        return Schedule(PlacementMode.DECOUPLED, default_phases(roles))
    if plan.mode is not PlacementMode.DEFER:
        return Schedule(plan.mode, plan.phases or default_phases(roles))
    bundles = {
        user: tuple(map(str, sorted(its, key=lambda each: (each.node, each.device))))
        for user in plan.users()
        if (its := plan.bundles_of(user))
    }
    return Schedule(plan.mode, plan.phases, bundles)
