"""Drives the resources of a step in dependency order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phalanx.errors import ConfigurationError
from phalanx.step.declaration import StepContext, SubmoduleStep
from phalanx.step.outcomes import AdmitOutcome, NotReady, StepOutcome
from phalanx.step.resources.base import Resource, ResourceSpec


def dependency_order(specs: Iterable[ResourceSpec]) -> tuple[ResourceSpec, ...]:
    """Specs with every dependency before its dependents, ties by key.

    Raises `ConfigurationError` for a key declared twice, an unknown dependency, or a cycle.
    """
    by_key: dict[str, ResourceSpec] = {}
    for spec in specs:
        if spec.key in by_key:
            raise ConfigurationError(f"resource {spec.key!r} is declared twice")
        by_key[spec.key] = spec
    for spec in by_key.values():
        for needed in sorted(spec.depends_on()):
            if needed not in by_key:
                raise ConfigurationError(
                    f"resource {spec.key!r} depends on {needed!r}, which nobody declares; "
                    f"declared: {', '.join(sorted(by_key))}"
                )
    ordered: list[ResourceSpec] = []
    placed: set[str] = set()
    while len(ordered) < len(by_key):
        ready = sorted(
            key for key, spec in by_key.items() if key not in placed and spec.depends_on() <= placed
        )
        if not ready:
            stuck = ", ".join(sorted(set(by_key) - placed))
            raise ConfigurationError(f"resources depend on each other in a circle: {stuck}")
        ordered.append(by_key[ready[0]])
        placed.add(ready[0])
    return tuple(ordered)


def check_plans_ahead(specs: Iterable[ResourceSpec], resources: Mapping[str, Resource]) -> None:
    """Raises `ConfigurationError` for a resource that plans ahead by plans made only later."""
    for spec in specs:
        late = [key for key in sorted(spec.depends_on()) if not resources[key].plans_ahead]
        if late and resources[spec.key].plans_ahead:
            raise ConfigurationError(
                f"resource {spec.key!r} plans ahead but depends on {late[0]!r}, which does not; "
                "set plans_ahead = False on the first, or let the second plan ahead"
            )


class StepRunner:
    """Admit, plan, begin, commit and unadmit over the resources that a step names."""

    def __init__(self, resources: Mapping[str, Resource]) -> None:
        """`resources` by key, in dependency order."""
        self._resources = dict(resources)

    def admit(self, step: SubmoduleStep, ctx: StepContext) -> StepOutcome:
        """Reserve with every resource of the step; a refusal gives back what others reserved.

        What is not ready is refused too: nothing is reserved for a step that cannot run yet.
        """
        for key in self._keys(step):
            outcome = self._resources[key].admit(step.resources[key], ctx)
            if outcome.ok and not outcome.ready:
                reason = outcome.reason or NotReady(f"resource {key!r} is not ready")
                outcome = AdmitOutcome(ok=False, ready=False, reason=reason)
            if not outcome.ok:
                self.unadmit(step, ctx)
                return StepOutcome(outcome, key)
        return StepOutcome()

    def unadmit(self, step: SubmoduleStep, ctx: StepContext) -> None:
        """Give back everything that this context reserved."""
        for key in reversed(self._keys(step)):
            self._resources[key].unadmit(step.resources[key], ctx)

    def plan_ahead(self, step: SubmoduleStep, ctx: StepContext) -> None:
        """Plan what can be planned before the step before this one has been computed."""
        for key in self._keys(step):
            if self._resources[key].plans_ahead:
                ctx.plan_results[key] = self._resources[key].plan(step.resources[key], ctx)

    def plan(self, step: SubmoduleStep, ctx: StepContext) -> None:
        """Plan what was not planned ahead."""
        for key in self._keys(step):
            if key not in ctx.plan_results:
                ctx.plan_results[key] = self._resources[key].plan(step.resources[key], ctx)

    def begin(self, step: SubmoduleStep, ctx: StepContext) -> None:
        for key in self._keys(step):
            self._resources[key].begin(step.resources[key], ctx)

    def commit(self, step: SubmoduleStep, ctx: StepContext) -> None:
        for key in self._keys(step):
            self._resources[key].commit(step.resources[key], ctx)

    def _keys(self, step: SubmoduleStep) -> list[str]:
        return [key for key in self._resources if key in step.resources]
