"""How the conformance check uses a resource, and the hand that drives it through steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.step.declaration import ResourceStep, StepContext, SubmoduleStep
from phalanx.step.lease import SlotLease
from phalanx.step.outcomes import RefusalReason
from phalanx.step.resources.base import Resource, ResourceConfig
from phalanx.step.runner import StepRunner
from phalanx.testing.conformance import ConformanceError, require

Resources = Mapping[str, Resource]
Steps = Mapping[str, ResourceStep]
ResourceFactory = Callable[[], Resource | Sequence[Resource]]

WALK = "conformance"


def nothing(resources: Resources, ctx: StepContext) -> None:
    """The forward of a resource that a forward does not change."""


def no_configs(rid: str) -> Mapping[str, ResourceConfig]:
    """Every request has the resource's own defaults."""
    return {}


@dataclass(frozen=True)
class ResourceCase:
    """How the check uses a resource. Functions get all resources that the factory made, by key.

    `step` declares one step of these requests, in this order, that changes the state of each. `read`
    returns, as plain values that
    compare with `==`, all that later steps could see of a request; where state is may differ,
    what it is may not. It is called between steps, may run one, and may not commit it.

    `compute` is what a forward does to the resources: it writes, for a request's n-th step, the same
    whoever else is in the step. `fork` declares a step of one request that copies a stream to
    a new one. `tags` name the memory that the resource frees while nobody needs it. `row_tokens` is
    how many tokens `step` has for every request, where the resource also plans captured steps:
    `step` is then asked for one without requests too, and `compute` for all rows of a bucket
    (`ctx.lease`).
    """

    step: Callable[[tuple[str, ...]], Steps]
    read: Callable[[Resources, str], object]
    compute: Callable[[Resources, StepContext], None] = nothing
    configs: Callable[[str], Mapping[str, ResourceConfig]] = no_configs
    fork: Callable[[str], Steps] | None = None
    tags: frozenset[str] = frozenset()
    row_tokens: int | None = None


class ResourceDrive:
    """The resources that one call of a factory made, and steps on them as the engine runs them."""

    def __init__(self, factory: ResourceFactory, case: ResourceCase) -> None:
        made = factory()
        chain = (made,) if isinstance(made, Resource) else tuple(made)
        self.case = case
        self.resources = {resource.key: resource for resource in chain}
        require(len(self.resources) == len(chain), "resources: two of them have one key")
        self.tested = chain[-1]
        self.runner = StepRunner(self.resources)

    def open(self, *rids: str) -> None:
        for rid in rids:
            configs = self.case.configs(rid)
            for key, resource in self.resources.items():
                resource.ingest_request(rid, configs.get(key))

    def close(self, *rids: str) -> None:
        for rid in rids:
            for resource in self.resources.values():
                resource.remove_request(rid)

    def declared(self, *rids: str) -> SubmoduleStep:
        return SubmoduleStep((), self.case.step(rids))

    def context(self, *rids: str, lease: SlotLease | None = None) -> StepContext:
        return StepContext(rids, WALK, lease)

    def refused(self, step: SubmoduleStep, ctx: StepContext) -> RefusalReason | None:
        """Admit a step; why it was refused, or None if it was not."""
        try:
            outcome = self.runner.admit(step, ctx)
        except Exception as error:
            raise ConformanceError(
                f"exhaustion: admit of {list(ctx.request_ids)} raised {error!r}; it must answer "
                "with a refusal"
            ) from error
        if outcome.ok:
            return None
        reason = outcome.outcome.reason
        require(reason is not None, "exhaustion: admit refused without a reason")
        return reason

    def admitted(
        self, *rids: str, lease: SlotLease | None = None
    ) -> tuple[SubmoduleStep, StepContext]:
        """A step that must be admitted, since there is room."""
        step, ctx = self.declared(*rids), self.context(*rids, lease=lease)
        reason = self.refused(step, ctx)
        require(reason is None, f"admit: a step of {list(rids)} was refused with room: {reason}")
        return step, ctx

    def begin(self, step: SubmoduleStep, ctx: StepContext) -> None:
        with torch.inference_mode():
            self.runner.plan(step, ctx)
            self.runner.begin(step, ctx)

    def compute(self, ctx: StepContext) -> None:
        with torch.inference_mode():
            self.case.compute(self.resources, ctx)

    def finish(self, step: SubmoduleStep, ctx: StepContext) -> None:
        """Compute a begun step and commit it."""
        self.compute(ctx)
        with torch.inference_mode():
            self.runner.commit(step, ctx)

    def run(self, step: SubmoduleStep, ctx: StepContext) -> None:
        """The rest of an admitted step."""
        self.begin(step, ctx)
        self.finish(step, ctx)

    def step(self, *rids: str) -> None:
        """A whole step."""
        self.run(*self.admitted(*rids))

    def fork(self, rid: str) -> tuple[SubmoduleStep, StepContext]:
        assert self.case.fork is not None
        step, ctx = SubmoduleStep((), self.case.fork(rid)), self.context(rid)
        require(self.refused(step, ctx) is None, "forks: a fork was refused with room")
        return step, ctx

    def look(self, rid: str) -> object:
        """What can be seen of a request; to publish it changes nothing."""
        for resource in self.resources.values():
            resource.publish(rid)
        return self.case.read(self.resources, rid)

    def capacity(self, most: int) -> int:
        """How many new requests can take a step each before one is refused; at most `most`."""
        rids = self.fill(most)
        self.close(*rids)
        return len(rids)

    def fill(self, most: int) -> list[str]:
        """Open new requests and step each once until one is refused; those that were not."""
        rids: list[str] = []
        for index in range(most):
            rid = f"filler {index}"
            self.open(rid)
            step, ctx = self.declared(rid), self.context(rid)
            if self.refused(step, ctx) is not None:
                self.close(rid)
                break
            self.run(step, ctx)
            rids.append(rid)
        return rids

    def require_rest(self, where: str) -> None:
        for key, resource in self.resources.items():
            require(resource.at_rest(), f"at rest: {key!r} is not, {where}")


@dataclass(frozen=True)
class ResourceBed:
    """Makes resources, and says what a request looks like after some undisturbed steps."""

    factory: ResourceFactory
    case: ResourceCase

    def drive(self, *rids: str) -> ResourceDrive:
        """New resources with these requests open."""
        made = ResourceDrive(self.factory, self.case)
        made.require_rest("although no request was there yet")
        made.open(*rids)
        return made

    def expected(self, rid: str, num_steps: int) -> object:
        """A request after steps of its own, with nobody else there."""
        drive = self.drive(rid)
        for _ in range(num_steps):
            drive.step(rid)
        return drive.look(rid)


def require_same(found: object, expected: object, message: str) -> None:
    """Raise where a request is not as it must be."""
    if found != expected:
        raise ConformanceError(f"{message}: {found!r} instead of {expected!r}")
