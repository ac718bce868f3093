"""The one manager of a role's engines: what an operator or a coordinator may ask of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phalanx.clock import Clock
from phalanx.roles.contracts import Backends, Tag
from phalanx.roles.events import EventLog
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.schema.roles import InferenceRoleSpec


class InferenceManager:
    """The pools of one role, whatever its workload. Belongs to one event loop.

    Operations are idempotent. They run one after the other; one that is asked for again while it
    runs, or waits as the last, is shared, and cancelling a caller leaves it running for the others.
    Each raises `RoleOperationRefusedError` where the role's state does not allow it,
    `RoleOperationFailedError` where it could not be completed, `EngineUnavailableError` after
    `shutdown`, and what its own description says. Wrong arguments are `InvalidInputError`s.
    """

    def __init__(
        self,
        spec: InferenceRoleSpec,
        backends: Backends,
        registry: RoleRegistry,
        clock: Clock,
        events: EventLog | None = None,
    ) -> None:
        """`registry` shows nothing of the role yet, `registry.role == spec.role`."""
        raise NotImplementedError

    @property
    def spec(self) -> InferenceRoleSpec:
        raise NotImplementedError

    @property
    def registry(self) -> RoleRegistry:
        raise NotImplementedError

    async def start(self) -> None:
        """Start every replica of every model, and publish them; all or nothing.

        Nothing is started with `deployment.start_asleep`: the first `activate` does it. Replicas
        whose weights come from a trainer stay `starting` until they have some; this does not wait.
        """
        raise NotImplementedError

    async def activate(self, tags: Iterable[str] | None = None) -> None:
        """Have these tags resident (None: all), and serve once all of them are."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Take the replicas out of the snapshot, and wait until nothing runs; what still runs after
        `deployment.drain_timeout_s` is aborted.
        """
        raise NotImplementedError

    async def deactivate(self) -> None:
        """Drain, and give back all memory."""
        raise NotImplementedError

    async def shutdown(self, drain_timeout_s: float | None = None) -> None:
        """Drain and stop everything. Ends whatever else runs; nothing works afterwards.

        `drain_timeout_s` replaces the deployment's; 0 aborts at once.
        """
        raise NotImplementedError

    async def scale(self, model: str, replicas: int) -> None:
        """Have that many replicas of `model`. Refused where it is not elastic or external."""
        raise NotImplementedError

    async def recover(self, engine_id: str) -> None:
        """Stop the replica, by force, and start a new generation of it.

        Refused for one that serves. Of a role that sleeps, it starts with the next `activate`.
        """
        raise NotImplementedError

    async def unblock(self, engine_id: str, holds: Iterable[str] | None = None) -> None:
        """Find out what a blocked replica holds, and complete what it was blocked in.

        `holds` is the operator's own word, for an engine that cannot say. No-op where not blocked.
        """
        raise NotImplementedError

    async def update_weights(self, model: str, path: str, version: str) -> None:
        """Load a checkpoint into every replica, present and later ones, as `version`.

        Raises `ConfigurationError` for a static model, and for a model that follows broadcasts
        unless `version` is a whole number that is greater than the current one.
        """
        raise NotImplementedError

    async def confirm_weights(self, model: str, version: str) -> None:
        """A trainer has put `version` into the model's replicas itself: check it, and serve."""
        raise NotImplementedError

    async def register_broadcast(self, model: str) -> int | None:
        """Have `model` follow versioned broadcasts, and tell the newest version (None: none yet).

        Models of `weight_source: dcs` are registered from the start; others are refused with
        `ConfigurationError`.
        """
        raise NotImplementedError

    async def broadcast(self, model: str, path: str, version: int) -> None:
        """Bring a newer version to every registered replica, present and later ones.

        The newest version again completes it where it has not arrived; an older one is refused.
        """
        raise NotImplementedError

    def set_phase(self, phase: str | None) -> None:
        """Publish the phase of the job."""
        raise NotImplementedError

    def residency(self) -> Mapping[str, frozenset[Tag] | None]:
        """What each replica that runs holds, by engine id; None: nobody is certain."""
        raise NotImplementedError
