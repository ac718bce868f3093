"""The contract of a resource: state that nodes use, built and driven by the step engine.

A resource is asked in this order: `ingest_request` opens a request, then for each step `admit`
(reserve), `plan` (compute addressing), `begin` (the step is about to be computed), `commit` (make the
step's effects part of the state), or `unadmit` where a step does not come to its commit;
`remove_request` frees everything. The next step may be admitted and planned, on another thread,
after this one's commit and while it is still computed: so `plan` changes nothing that a forward
reads, and `begin` does.
When no request is left, a resource is as it was at the start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from phalanx.device.base import DeviceBackend
from phalanx.step.declaration import ResourceStep, StepContext
from phalanx.step.lease import BufferClaim
from phalanx.step.outcomes import ADMITTED, AdmitOutcome
from phalanx.step.waker import Waker


class ResourceConfig:
    """Base of a request's own settings for one resource, given when the request is added."""


@dataclass(frozen=True)
class BuildInfo:
    """What a resource is built from beside its own spec."""

    backend: DeviceBackend
    dependencies: Mapping[str, Resource] = field(default_factory=dict)
    waker: Waker = field(default_factory=Waker)
    """What a resource wakes when something that it was not ready for has come."""


@dataclass(frozen=True)
class ResourceSpec(ABC):
    """Declares a resource: its key, the nodes that use it, and how to build it."""

    key: str
    nodes: frozenset[str]

    def depends_on(self) -> frozenset[str]:
        """Keys of the resources whose plans this one reads."""
        return frozenset()

    @abstractmethod
    def build(self, info: BuildInfo) -> Resource:
        """The resource, ready for requests."""


class Resource:
    """State that nodes use; every method has a default that does nothing.

    `ingest_request` must be idempotent and `remove_request` must tolerate unknown ids.
    """

    key: str = ""
    plans_ahead: ClassVar[bool] = True
    """Whether a step can be planned before the one before it has been computed."""
    skips: bool = True
    """Whether it needs no more than a call of `skip` for tokens that are not computed."""

    def ingest_request(self, rid: str, config: ResourceConfig | None) -> None:
        """Open a request's state."""

    def remove_request(self, rid: str) -> None:
        """Free a request's state."""

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        """Reserve what the step needs, all or nothing; never raises for want of room."""
        return ADMITTED

    def unadmit(self, step: ResourceStep, ctx: StepContext) -> None:
        """Undo this context's `admit`, also where it was never called or was refused."""

    def plan(self, step: ResourceStep, ctx: StepContext) -> Any:  # noqa: ANN401
        """This step's addressing; kept in `ctx.plan_results` for those that depend on it.

        Under a lease it is written into the static buffers of the lease's slot. Rows and tokens
        beyond the step's own are padding: they read and write what belongs to nobody.
        """
        return None

    def begin(self, step: ResourceStep, ctx: StepContext) -> None:
        """The step is computed next: make its plan the current one, and do what must precede it on
        the device.
        """

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        """Make the step's effects part of the state."""

    def skip(self, rid: str, num_tokens: int) -> None:
        """The next tokens of the request's default stream are known and will not be computed."""

    def publish(self, rid: str) -> object | None:
        """A request's durable state as a value, or None where there is nothing to say."""
        return None

    def admit_retrieve(self, rid: str, published: object | None) -> AdmitOutcome:
        """Import published state; `ready=False` until it has landed."""
        return ADMITTED

    def claim_buffers(self, claim: BufferClaim) -> None:
        """Take static buffers for captured steps; before any capture, and never moved after it.

        Called once a node; a later claim may only add.
        """

    def release(self, tags: frozenset[str]) -> None:
        """Let go of the memory that stands under `tags`, which the engine then gives back to the
        device; repeated calls do nothing.
        """

    def restore(self, tags: frozenset[str]) -> None:
        """Take the memory again, empty; repeated calls do nothing."""

    def at_rest(self) -> bool:
        """Whether the resource is as it was at the start: nothing held, nothing in flight."""
        return True

    def cleanup(self) -> None:
        """Give everything back; called once, at shutdown."""


class Growing(ABC):
    """A resource that requests hold more of as they grow, so that a scheduler must plan for it."""

    @abstractmethod
    def fits(self, totals: Mapping[str, int]) -> bool:
        """Whether these requests could grow to these numbers of tokens at the same time."""


class Prefixed(ABC):
    """A resource that may know tokens of a request before they are computed."""

    @abstractmethod
    def adopt(self, rid: str) -> int:
        """Hold what is known of the request's next tokens; returns how many tokens that is.

        Called between steps, in the same order on every rank.
        """

    @abstractmethod
    def forget(self) -> None:
        """Keep nothing of what requests have computed so far once they end."""


class Evictable(ABC):
    """A resource that can move a request's state to the host and back.

    While any of it is away, a step that needs it is refused with `RequestOffloading`.
    """

    @abstractmethod
    def is_offloaded(self, rid: str) -> bool:
        """Whether some of the request's state is on the host, or on the way."""

    @abstractmethod
    def reclaimable(self, rid: str) -> int:
        """What the request holds on the device, in the resource's own unit (pages, slots): what
        comes free when all of it is moved away or dropped.
        """

    @abstractmethod
    def offload(self, rid: str) -> int:
        """Move what can be moved to the host; returns what that freed.

        0 where a step of the request is in flight, or the host has no room.
        """

    @abstractmethod
    def reload(self, rid: str) -> bool:
        """Bring all of it back; False, and nothing is changed, where there is no room."""

    def offload_priority(self, rid: str) -> float:
        """The higher, the rather this request is offloaded by the priority policy."""
        return float(self.reclaimable(rid))
