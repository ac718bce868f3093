"""The pool of one model: its slots, who makes replicas for them, and who watches these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from phalanx.errors import RoleOperationError, RoleOperationFailedError, UnknownModelError
from phalanx.roles.candidates import Candidates
from phalanx.roles.events import EventKind
from phalanx.roles.health import HealthWatch
from phalanx.roles.lifecycle import Lifecycle
from phalanx.roles.maker import STOP_GRACE_S, ReplicaMaker
from phalanx.roles.publication import model_shown
from phalanx.roles.recovery import Recovery
from phalanx.roles.replica import Replica, ReplicaLostError
from phalanx.roles.role_state import RoleState
from phalanx.roles.router_link import RouterLink
from phalanx.roles.slot import Slot
from phalanx.roles.weights import ModelWeights
from phalanx.routing.roles.snapshot import ReplicaState, RoleModel
from phalanx.schema.roles import EngineKind, InferenceModelSpec, WeightSource


class ModelPool:
    """Its slots change with `scale` only. `heard` is told of a version that a trainer has put into
    a replica by itself.
    """

    def __init__(
        self, role: RoleState, model: InferenceModelSpec, heard: Callable[[ModelPool, str], None]
    ) -> None:
        times = role.deployment
        self.role = role
        self.model = model
        self._heard = heard
        self.weights = ModelWeights(model, times.startup_timeout_s)
        self.router = RouterLink(
            role.spec.role, model, role.backends.open_router, times.startup_timeout_s
        )
        self.lifecycle = Lifecycle(role, self.weights, self.router, self._lost)
        health = HealthWatch(role, self._lost, self._withdraw, self._has_version)
        self.maker = ReplicaMaker(role, model, self.lifecycle, self.router, self._lost, health.run)
        self.recovery = Recovery(role, model, self.maker, self.router)
        self.slots: list[Slot] = []
        self._ended: dict[str, Slot] = {}
        for index, group in enumerate(model.engine_groups):
            for _ in range(group.num_replicas):
                self.add_slot(index)

    def add_slot(self, group_index: int = 0) -> Slot:
        """The slot of the lowest ordinal that is not taken; its generations go on where it was."""
        taken = {slot.ordinal for slot in self.slots}
        ordinal = next(number for number in range(len(taken) + 1) if number not in taken)
        engine_id = f"{self.model.name}/{ordinal}"
        slot = self._ended.pop(engine_id, None) or Slot(engine_id, group_index, ordinal)
        self.slots.append(slot)
        self.slots.sort(key=lambda each: each.ordinal)
        return slot

    def drop_slot(self, slot: Slot) -> None:
        """What is left of processes in it is stopped in the background, for as long as it takes."""
        self.slots.remove(slot)
        self._ended[slot.engine_id] = slot
        self.recovery.clear_away(slot)

    def slot(self, engine_id: str) -> Slot:
        """One that was scaled away as well, while something is left there.

        Raises `UnknownModelError`.
        """
        for slot in self.occupied_slots:
            if slot.engine_id == engine_id:
                return slot
        known = ", ".join(slot.engine_id for slot in self.slots) or "none"
        raise UnknownModelError(
            f"model {self.model.name!r} of role {self.role.spec.role!r} has no replica"
            f" {engine_id!r}; it has {known}",
            field="engine_id",
        )

    def replicas(self, *states: ReplicaState) -> Iterator[Replica]:
        """The published ones in these states, or (none given) all that live."""
        for slot in self.slots:
            replica = slot.replica
            if replica is None or not replica.is_alive:
                continue
            if not states or replica.state in states:
                yield replica

    @property
    def all_slots(self) -> tuple[Slot, ...]:
        """With those that were scaled away, of which something may be left."""
        return (*self.slots, *self._ended.values())

    @property
    def occupied_slots(self) -> tuple[Slot, ...]:
        """Those of the model, and those that were scaled away and of which something is left."""
        return (*self.slots, *(slot for slot in self._ended.values() if slot.remains))

    @property
    def holds_anything(self) -> bool:
        """Whether an engine that lives holds memory, or may."""
        return any(not replica.residency.is_empty for replica in self.replicas())

    def stays(self, slot: Slot) -> bool:
        """Whether its replica is there in every phase: one of a role that takes turns on the job's
        devices, which has devices of its own and is somebody else's to put to sleep.
        """
        is_external = self.model.engine_groups[slot.group_index].engine is EngineKind.EXTERNAL
        return is_external and self.role.takes_turns

    def shown(self) -> RoleModel:
        """What a snapshot says of the model."""
        idle = ReplicaState.STARTING
        if self.role.closed:
            idle = ReplicaState.DEAD
        elif not self.slots or not self.role.wanted:
            idle = ReplicaState.SLEEPING
        return model_shown(
            self.role.spec,
            self.model,
            [slot.replica for slot in self.slots if slot.replica is not None],
            idle,
            router_url=self.router.url,
            weight_version=self.weights.version,
        )

    def candidates(self) -> Candidates:
        return Candidates(self.maker, self.router)

    async def create(self, slots: Iterable[Slot]) -> None:
        """A new generation in each of these, published together, or none at all."""
        async with self.candidates() as candidates:
            await candidates.make(slots)
            candidates.commit()
        self.role.publish()

    async def remove(self, slot: Slot, drain_timeout_s: float | None = None) -> None:
        """Drain and stop what stands there, which gets no requests any more.

        Raises `RoleOperationFailedError` where its processes are not known to be gone.
        """
        await slot.end_revival()
        replica = slot.replica
        if replica is not None and replica.state is ReplicaState.DRAINING:
            await self._drain_for_removal(replica, drain_timeout_s)
        await slot.end_revival()
        await self.clear(slot, "it was removed", STOP_GRACE_S)

    async def clear(self, slot: Slot, reason: str, grace_s: float = 0.0) -> None:
        """Stop whatever stands there and leave the slot empty. Raises as `remove` does."""
        left = [*slot.remains]
        if slot.replica is not None and slot.replica not in left and not slot.replica.is_gone:
            left.append(slot.replica)
        for each in left:
            if each.is_alive:
                each.retire(reason)
        gone = [await self.maker.take_down(slot, each, reason, grace_s) for each in left]
        if all(gone):
            slot.replica = None
        self.role.publish()
        if not all(gone):
            if slot not in self.slots:
                self.recovery.clear_away(slot)
            raise RoleOperationFailedError(f"{slot.engine_id}: {slot.remains[0].blocked}")

    def abandon(self, reason: str) -> None:
        """Its replicas count as dead: whoever waits for one waits no longer."""
        for replica in tuple(self.replicas()):
            self._lost(replica, reason)

    async def _drain_for_removal(self, replica: Replica, timeout_s: float | None) -> None:
        if replica.is_external or replica.blocked:
            return  # others may use it; or nobody can say what it does
        try:
            await self.lifecycle.drain(replica, timeout_s)
        except ReplicaLostError:
            return  # nothing runs there, and its death was told
        except RoleOperationError as error:
            self._tell(replica, f"it is stopped all the same: {error}")

    def _lost(self, replica: Replica, reason: str) -> None:
        """It has ended by itself, or as good as ended. Whoever makes it, or uses it, finds out."""
        if not replica.is_alive:
            return
        replica.lose(reason)
        for slot in self.slots:
            if slot.replica is replica:
                self.role.publish()
                self.recovery.begin(slot)

    def _withdraw(self, replica: Replica, detail: str) -> None:
        self.lifecycle.withdraw([replica], detail)

    def _has_version(self, replica: Replica, version: str) -> None:
        if replica.state is ReplicaState.READY:
            replica.has_weights(version)
            self.role.publish()
        if replica.waits or self.model.weight_source is WeightSource.ACTOR:
            self._heard(self, version)

    def _tell(self, replica: Replica, detail: str) -> None:
        self.role.tell(EventKind.FAILED, detail, model=self.model.name, engine_id=replica.engine_id)
