"""What all pools of one role share: its specification, what is wanted of it, and its publication."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from phalanx.roles.contracts import ALL_TAGS, Backends, Tag
from phalanx.roles.events import EventKind, EventLog
from phalanx.schema.roles import DeploymentSpec, InferenceRoleSpec, PlacementMode


@dataclass
class RoleState:
    """`wanted` are the tags that replicas are to hold; with all of them, and not `drained`, the role
    serves. `lock` is held by the operation that runs. `publish` shows what is, and `heard` waits until
    whoever sends requests knows of it; they are bound once.
    """

    spec: InferenceRoleSpec
    backends: Backends
    events: EventLog
    publish: Callable[[], None]
    heard: Callable[[], Awaitable[None]]
    wanted: frozenset[Tag] = frozenset()
    drained: bool = False
    closed: bool = False
    phase: str | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def serves(self) -> bool:
        """Whether replicas that are started now are to get requests."""
        return self.wanted == ALL_TAGS and not self.drained and not self.closed

    @property
    def deployment(self) -> DeploymentSpec:
        return self.spec.deployment

    @property
    def takes_turns(self) -> bool:
        """Whether it has devices of the job by turns with other roles."""
        has_devices = any(
            group.placement is not None
            for model in self.spec.models
            for group in model.engine_groups
        )
        return has_devices and self.deployment.placement is PlacementMode.DEFER

    def tell(self, kind: EventKind, detail: str, *, model: str = "", engine_id: str = "") -> None:
        self.events.add(self.spec.role, kind, model=model, engine_id=engine_id, detail=detail)
