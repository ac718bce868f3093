"""What a manager needs of whoever starts engines, and of an engine that runs."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.errors import PhalanxError
from phalanx.schema.roles import EngineGroupSpec, InferenceModelSpec, Ownership


class Tag(enum.StrEnum):
    """The parts of an engine's memory that can be given back and taken again (SGLang's names)."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"


ALL_TAGS = frozenset(Tag)


class EngineCallError(PhalanxError, RuntimeError):
    """An engine did not do what it was asked.

    `uncertain`: it may have, or may still do it (a time-out, a lost connection, a gateway error), so
    that nobody knows; else it has refused and nothing has changed. `gone`: nobody listens there.
    `out_of_memory`: its devices have no room, so that asking again is of no use. `taken_over`: it does
    what somebody else says now, and asking again is of no use either.
    """

    def __init__(
        self,
        message: str,
        *,
        uncertain: bool,
        gone: bool = False,
        out_of_memory: bool = False,
        taken_over: bool = False,
    ) -> None:
        super().__init__(message)
        self.uncertain = uncertain
        self.gone = gone
        self.out_of_memory = out_of_memory
        self.taken_over = taken_over


@dataclass(frozen=True)
class ReplicaLaunch:
    """One process, or group of processes, to start. `generation` counts the starts of `engine_id`.

    `extra_args` are flags beside the group's own (a bootstrap port, say).
    """

    role: str
    engine_id: str
    generation: int
    model: InferenceModelSpec
    group: EngineGroupSpec
    group_index: int
    ordinal: int
    extra_args: Mapping[str, object] = field(default_factory=dict)


class LaunchedReplica(Protocol):
    """A replica that was started. It belongs to its manager, which stops it."""

    @property
    def url(self) -> str:
        """Where its head listens, `http://HOST:PORT`; known from the start."""
        ...

    @property
    def bootstrap_port(self) -> int | None:
        """Of a prefill worker: where decode workers ask for it."""
        ...

    async def exited(self) -> str:
        """Wait until it has ended by itself; why, in words. Never returns for one we do not run."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Have it end, by force after `grace_s`; returns when every process of it is gone.

        Any number of times. For one that somebody else runs: let go of it.
        """
        ...


class Launcher(Protocol):
    """Starts replicas: local processes, a cluster's, or none where they run already."""

    async def launch(self, launch: ReplicaLaunch) -> LaunchedReplica:
        """Start it and return at once, before it is healthy.

        Raises `ConfigurationError` for what can never start. A failed or cancelled launch leaves
        nothing behind.
        """
        ...

    async def close(self) -> None:
        """Stop whatever was started and still runs."""
        ...


class EngineControl(Protocol):
    """The control calls of one running engine. Each raises `EngineCallError`.

    None of them is repeated by itself; engines of other makes crash on some that are repeated, so
    the manager asks for nothing that is done already.
    """

    async def healthy(self) -> bool:
        """Whether it answers its health check; False also where it cannot be reached."""
        ...

    async def ready(self) -> bool:
        """Whether it has loaded and serves."""
        ...

    async def pause(self) -> None:
        """Stop computing, with running requests aborted (their tokens are kept)."""
        ...

    async def go_on(self) -> None: ...

    async def abort_all(self) -> None:
        """End the running requests with what they have."""
        ...

    async def is_idle(self) -> bool:
        """Whether nothing runs or waits; what was cached of ended requests is then dropped."""
        ...

    async def num_requests(self) -> int | None:
        """How many run or wait; None for an engine that cannot say."""
        ...

    async def release(self, tags: frozenset[Tag]) -> None:
        """Give memory back. The engine is idle or paused, and holds these tags."""
        ...

    async def resume(self, tags: frozenset[Tag]) -> None:
        """Take memory again. The engine has given these tags back."""
        ...

    async def resident(self) -> frozenset[Tag] | None:
        """What it holds; None for an engine that cannot say.

        One that can say takes a repeated `release` or `resume` for done, so that those are repeated
        there after an answer was lost. Any other engine may crash on that.
        """
        ...

    async def weight_version(self) -> str: ...

    async def waits_for_weights(self) -> bool | None:
        """Whether its weights are lost until new ones are loaded; None for one that cannot say."""
        ...

    async def load_weights(self, path: str, version: str) -> None:
        """Load a checkpoint of the same shapes from disk, as `version`."""
        ...

    async def close(self) -> None:
        """Close connections; the engine goes on."""
        ...


class ModelRouter(Protocol):
    """A router in front of a model's replicas (sglang-router). Each call raises `EngineCallError`."""

    @property
    def url(self) -> str: ...

    async def add(self, url: str, worker: EngineGroupSpec, bootstrap_port: int | None) -> None:
        """Register a replica, and wait until the router counts it as healthy."""
        ...

    async def remove(self, url: str) -> None:
        """Deregister it, and wait until the router no longer has it. Unknown ones are gone already."""
        ...

    async def close(self) -> None:
        """Stop the router where we run it."""
        ...


OpenRouter = Callable[[str, InferenceModelSpec], Awaitable[ModelRouter]]
"""Starts or finds the router of a role's model and waits until it answers; given the role's name.

Called for a model of `route_mode: sglang_router` before its first replica. Raises `EngineCallError`
or `ConfigurationError`, and then leaves nothing behind.
"""

ConnectEngine = Callable[[str], EngineControl]
"""The control calls of the engine at a URL; connects at the first call."""


class PlacementGroup(Protocol):
    """What a role's replicas run in, where a cluster keeps devices together for it."""

    @property
    def owner(self) -> Ownership:
        """Who deletes it."""
        ...

    async def delete(self) -> None:
        """Give its devices back to the cluster. Any number of times."""
        ...


@dataclass(frozen=True)
class Backends:
    """What a manager makes replicas with. It deletes the placement groups that it owns."""

    launcher: Launcher
    connect: ConnectEngine
    open_router: OpenRouter
    placement_groups: tuple[PlacementGroup, ...] = ()
