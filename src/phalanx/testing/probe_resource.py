"""A resource that records what the step engine asks of it, and refuses or raises on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.step.declaration import ResourceStep, StepContext
from phalanx.step.outcomes import ADMITTED, AdmitOutcome
from phalanx.step.resources.base import BuildInfo, Resource, ResourceConfig, ResourceSpec

React = Callable[[str, tuple[str, ...]], AdmitOutcome | None]
"""Called with a verb and request ids; may raise, and may answer an `admit` or a `retrieve` with a
refusal, or that it is not ready.
"""


def react_never(verb: str, request_ids: tuple[str, ...]) -> AdmitOutcome | None:
    """Let everything pass."""
    return None


@dataclass(frozen=True)
class ProbeCall:
    """One call to a probe."""

    key: str
    verb: str
    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class ProbeSpec(ResourceSpec):
    """Declares a probe that writes to `log`; probes may share one."""

    log: list[ProbeCall] = field(default_factory=list)
    react: React = react_never
    needs: frozenset[str] = frozenset()

    def depends_on(self) -> frozenset[str]:
        return self.needs

    def build(self, info: BuildInfo) -> ProbeResource:
        return ProbeResource(self)


@dataclass(frozen=True)
class ProbeStep(ResourceStep):
    """The requests of a step."""

    request_ids: tuple[str, ...]


class ProbeResource(Resource):
    """See the module. Requests stay `in_flight` from `admit` to `commit` or `unadmit`, also where
    one of these raises, so that what an engine forgets to give back is seen by `at_rest`.
    """

    def __init__(self, spec: ProbeSpec) -> None:
        self.key = spec.key
        self._log = spec.log
        self._react = spec.react
        self.open: set[str] = set()
        self.in_flight: set[str] = set()

    def ingest_request(self, rid: str, config: ResourceConfig | None) -> None:
        self._called("ingest", (rid,))
        self.open.add(rid)

    def remove_request(self, rid: str) -> None:
        self._called("remove", (rid,))
        self.open.discard(rid)
        self.in_flight.discard(rid)

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        rids = _rids(step)
        ctx.reservations[self.key] = rids
        self.in_flight.update(rids)
        answer = self._called("admit", rids)
        if answer is None:
            return ADMITTED
        if not answer.ok:
            self._give_back(ctx)
        return answer

    def admit_retrieve(self, rid: str, published: object | None) -> AdmitOutcome:
        return self._called("retrieve", (rid,)) or ADMITTED

    def unadmit(self, step: ResourceStep, ctx: StepContext) -> None:
        self._called("unadmit", _rids(step))
        self._give_back(ctx)

    def plan(self, step: ResourceStep, ctx: StepContext) -> tuple[str, ...]:
        """The keys whose plans were there before."""
        self._called("plan", _rids(step))
        return tuple(ctx.plan_results)

    def begin(self, step: ResourceStep, ctx: StepContext) -> None:
        self._called("begin", _rids(step))

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        self._called("commit", _rids(step))
        self._give_back(ctx)

    def publish(self, rid: str) -> str | None:
        self._called("publish", (rid,))
        return f"{self.key} of {rid}"

    def at_rest(self) -> bool:
        return not self.open and not self.in_flight

    def cleanup(self) -> None:
        self._called("cleanup", ())

    def _give_back(self, ctx: StepContext) -> None:
        self.in_flight.difference_update(ctx.reservations.pop(self.key, ()))

    def _called(self, verb: str, request_ids: tuple[str, ...]) -> AdmitOutcome | None:
        self._log.append(ProbeCall(self.key, verb, request_ids))
        return self._react(verb, request_ids)


def _rids(step: ResourceStep) -> tuple[str, ...]:
    assert isinstance(step, ProbeStep)
    return step.request_ids
