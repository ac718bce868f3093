"""The one manager of a role's engines: what an operator or a coordinator may ask of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping

from phalanx.clock import Clock
from phalanx.errors import ConfigurationError, PhalanxError, UnknownModelError
from phalanx.roles.contracts import ALL_TAGS, Backends, Tag
from phalanx.roles.events import EventKind, EventLog
from phalanx.roles.followers import Followers
from phalanx.roles.operations import Operations
from phalanx.roles.outlook import Absence, absence
from phalanx.roles.pool import ModelPool
from phalanx.roles.publication import role_content
from phalanx.roles.role_state import RoleState
from phalanx.roles.scaling import check_scale, recover, scale, unblock
from phalanx.roles.turning import activate, deactivate, drain, start, stop
from phalanx.roles.updating import confirm, update, word
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
        """`registry` is the role's own, begun with `initial_content(spec)`."""
        self._registry = registry
        self.followers = Followers()
        events = events or EventLog(clock)
        self._role = RoleState(spec, backends, events, self._publish, self.heard)
        if not spec.deployment.start_asleep:
            self._role.wanted = ALL_TAGS
        self._operations = Operations(spec.role, self._role.lock)
        self._pools = {
            model.name: ModelPool(self._role, model, self._heard) for model in spec.models
        }
        self._hearings: set[asyncio.Task[None]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._publish()

    @property
    def spec(self) -> InferenceRoleSpec:
        return self._role.spec

    @property
    def registry(self) -> RoleRegistry:
        return self._registry

    async def start(self) -> None:
        """Start every replica of every model, and publish them; all or nothing.

        Nothing is started with `deployment.start_asleep`: the first `activate` does it. Replicas
        whose weights come from a trainer stay `starting` until they have some; this does not wait.
        """
        if not self.spec.deployment.start_asleep:
            await self._run("start", (), lambda: start(self._role, self._pools.values()))

    async def activate(self, tags: Iterable[str] | None = None) -> None:
        """Have these tags resident (None or none: all), and serve once all of them are."""
        wanted = _tags(tags)
        await self._run(
            "wake",
            tuple(sorted(wanted)),
            lambda: activate(self._role, self._pools.values(), wanted),
        )

    async def drain(self) -> None:
        """Take the replicas out of the snapshot, and wait until nothing runs; what still runs after
        `deployment.drain_timeout_s` is aborted.
        """
        await self._run("drain", (), lambda: drain(self._role, self._pools.values()))

    async def deactivate(self) -> None:
        """Drain, and give back all memory."""
        await self._run("sleep", (), lambda: deactivate(self._role, self._pools.values()))

    async def shutdown(self, drain_timeout_s: float | None = None) -> None:
        """Drain and stop everything. Ends whatever else runs; nothing works afterwards.

        `drain_timeout_s` replaces the deployment's; 0 aborts at once. Raises where processes are
        not known to be gone; asked again, it tries those again.
        """
        ending = self._ending
        if ending is None or (ending.done() and (ending.cancelled() or ending.exception())):
            ending = self._ending = asyncio.create_task(self._shut_down(drain_timeout_s))
        await asyncio.wait([ending])
        ending.result()

    def hurry(self, reason: str) -> None:
        """Have `shutdown`, running or to come, wait for no request: all replicas count as dead."""
        self._role.closed = True
        for pool in self._pools.values():
            pool.abandon(reason)

    async def scale(self, model: str, replicas: int) -> None:
        """Have that many replicas of `model`.

        Raises `ConfigurationError` where it is not elastic, or external.
        """
        pool = self._pool(model)
        check_scale(pool, replicas)
        await self._run("scale", (model, replicas), lambda: scale(pool, replicas))

    async def recover(self, engine_id: str) -> None:
        """Stop the replica, by force, and start a new generation of it.

        Refused for one that serves. Of a role that sleeps, it starts with the next `activate`.
        """
        pool = self._pool_of(engine_id)
        await self._run("recover", (engine_id,), lambda: recover(pool, engine_id))

    async def unblock(self, engine_id: str, holds: Iterable[str] | None = None) -> None:
        """Find out what a blocked replica holds, put it to sleep for certain, and wake it again if
        the role is awake.

        `holds` is the operator's own word, for an engine that cannot say. No-op where not blocked.
        """
        pool = self._pool_of(engine_id)
        held = None if holds is None else _known_tags(holds)
        key = (engine_id, None if held is None else tuple(sorted(held)))
        await self._run("unblock", key, lambda: unblock(pool, engine_id, held))

    async def update_weights(self, model: str, path: str, version: str) -> None:
        """Load a checkpoint into every replica, present and later ones, as `version`.

        Raises `ConfigurationError` for a static model, and for a model that follows broadcasts
        unless `version` is a whole number, which must not be older than the newest one.
        """
        pool = self._pool(model)
        pool.weights.check_update(path, version)
        await self._run(
            "weights",
            (model, path, version),
            lambda: update(pool, pool.weights.check_update(path, version)),
        )

    async def confirm_weights(self, model: str, version: str) -> None:
        """A trainer has put `version` into the model's replicas itself: check it, and serve."""
        pool = self._pool(model)
        pool.weights.check_version(version)
        given = word(pool)
        await self._run("confirm weights", (model, version), lambda: confirm(pool, version, given))

    async def register_broadcast(self, model: str) -> int | None:
        """Have `model` follow versioned broadcasts, and tell the newest version (None: none yet).

        Models of `weight_source: dcs` are registered from the start; others are refused with
        `ConfigurationError`.
        """
        return self._pool(model).weights.broadcast_version()

    async def broadcast(self, model: str, path: str, version: int) -> None:
        """Bring a newer version to every registered replica, present and later ones.

        The newest version again completes it where it has not arrived; an older one is refused.
        """
        self._pool(model).weights.broadcast_version()
        await self.update_weights(model, path, str(version))

    def set_phase(self, phase: str | None) -> None:
        """Publish the phase of the job."""
        self._role.phase = phase
        self._publish()

    async def heard(self) -> None:
        """Wait until whoever sends requests knows what is published, for as long as it is sensible."""
        await self.followers.have(self._registry.snapshot.revision)

    def residency(self, *, in_turns: bool = False) -> Mapping[str, frozenset[Tag] | None]:
        """What each replica that runs holds, by engine id; None: nobody is certain. `in_turns`:
        without those that stay in every phase, as they have devices of their own.
        """
        return {
            slot.engine_id: slot.holds()
            for pool in self._pools.values()
            for slot in pool.all_slots
            if not slot.is_free and not (in_turns and pool.stays(slot))
        }

    def absence(self) -> Absence | None:
        """Why the role does not serve, and whether it will by itself; None where it serves."""
        return absence(self._role, self._pools.values())

    async def _run(
        self,
        what: str,
        key: tuple[Hashable, ...],
        act: Callable[[], Coroutine[object, object, None]],
    ) -> None:
        words = " ".join([what, *_words(key)])

        async def told() -> None:
            self._role.tell(EventKind.OPERATION, words)
            try:
                await act()
            except PhalanxError as error:
                self._role.tell(EventKind.FAILED, f"{words}: {error}")
                raise

        await self._operations.run((what, *key), told)

    async def _shut_down(self, drain_timeout_s: float | None) -> None:
        self._role.closed = True
        await self._operations.end()
        await stop(self._role, self._pools.values(), drain_timeout_s)

    def _publish(self) -> None:
        models = [pool.shown() for pool in self._pools.values()]
        content = role_content(self.spec, models, self._role.phase)
        before = self._registry.snapshot.revision
        while not self._registry.publish(content, self._registry.snapshot.revision):
            pass  # somebody else's snapshot came in between
        after = self._registry.snapshot.revision
        if after != before:
            self._role.tell(EventKind.PUBLISHED, str(after))

    def _heard(self, pool: ModelPool, version: str) -> None:
        """Of a trainer's weights, which nobody has told the manager of: as if somebody had."""
        hearing = asyncio.create_task(self._try_confirm(pool, version))
        self._hearings.add(hearing)
        hearing.add_done_callback(self._hearings.discard)

    async def _try_confirm(self, pool: ModelPool, version: str) -> None:
        key, given = ("heard", pool.model.name, version), word(pool)
        # It may not be everywhere yet, or be no version that the model could have.
        with contextlib.suppress(PhalanxError):
            pool.weights.check_version(version)
            await self._operations.run(key, lambda: confirm(pool, version, given))

    def _pool(self, model: str) -> ModelPool:
        if model not in self._pools:
            raise UnknownModelError(
                f"role {self.spec.role!r} has no model {model!r}; it has {', '.join(self._pools)}",
                field="model",
            )
        return self._pools[model]

    def _pool_of(self, engine_id: str) -> ModelPool:
        """That of a replica, which it has."""
        pool = self._pools.get(engine_id.rpartition("/")[0])
        if pool is None:
            raise UnknownModelError(
                f"role {self.spec.role!r} has no replica {engine_id!r}; they are called"
                f" MODEL/NUMBER, and its models {', '.join(self._pools)}",
                field="engine_id",
            )
        pool.slot(engine_id)
        return pool


def _words(key: tuple[Hashable, ...]) -> Iterator[str]:
    """What was asked for, as an operator types it."""
    for part in key:
        if isinstance(part, tuple):
            yield ",".join(map(str, part)) or "none"
        elif part is not None:
            yield str(part)


def _tags(tags: Iterable[str] | None) -> frozenset[Tag]:
    return _known_tags(tags or ()) or ALL_TAGS


def _known_tags(tags: Iterable[str]) -> frozenset[Tag]:
    known = {tag.value for tag in Tag}
    given = frozenset(tags)
    if not given <= known:
        raise ConfigurationError(
            f"tags {sorted(given - known)} do not exist; tags: {', '.join(sorted(known))}"
        )
    return frozenset(Tag(tag) for tag in given)
