"""Changes how many replicas a model has, and replaces or frees single ones on an operator's word."""

from __future__ import annotations

from phalanx.errors import (
    ConfigurationError,
    PhalanxError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)
from phalanx.roles.contracts import Tag
from phalanx.roles.pool import ModelPool
from phalanx.roles.slot import Slot
from phalanx.roles.together import all_to_their_ends, raise_failures
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.schema.roles import EngineKind, InferenceModelSpec, Ownership


async def scale(pool: ModelPool, num_replicas: int) -> None:
    """Add replicas, all or none, or remove those of the highest ordinals."""
    if num_replicas == len(pool.slots):
        return
    if not pool.role.serves:
        raise RoleOperationRefusedError(
            f"role {pool.role.spec.role!r} does not serve now; wake it before model"
            f" {pool.model.name!r} is scaled"
        )
    if num_replicas > len(pool.slots):
        await _add(pool, num_replicas - len(pool.slots))
    else:
        await _remove(pool, pool.slots[num_replicas:])


def check_scale(pool: ModelPool, num_replicas: int) -> None:
    """Raises `ConfigurationError` where the model can never have so many."""
    model = pool.model
    if num_replicas < 0:
        raise ConfigurationError(f"replicas={num_replicas} must be at least 0")
    if not model.elastic_enabled:
        raise ConfigurationError(
            f"model {model.name!r} is not elastic; set elastic_enabled to scale it"
        )
    if any(group.engine is EngineKind.EXTERNAL for group in model.engine_groups):
        raise ConfigurationError(
            f"model {model.name!r} has external engines, which are started elsewhere; change its"
            " urls instead"
        )
    if len(model.engine_groups) > 1:
        raise ConfigurationError(
            f"model {model.name!r} has {len(model.engine_groups)} engine groups; only a model of"
            " one group is scaled"
        )
    _check_bundles(model, num_replicas)


def _check_bundles(model: InferenceModelSpec, num_replicas: int) -> None:
    """A planned model has the bundles of its plan, and all others are somebody else's."""
    (group,) = model.engine_groups
    placement = group.placement
    if placement is None or not (placement.gpu_ids or placement.pg_owner is Ownership.CONTROLLER):
        return
    most = len(placement.bundle_indices) // group.ranks_per_replica
    if num_replicas > most:
        raise ConfigurationError(
            f"replicas={num_replicas}: model {model.name!r} has bundles for {most} replicas of"
            f" ranks={group.ranks_per_replica}, and none is free; give it more bundles in the job's"
            f" file (bundles, devices or replicas) and start it anew, or scale to at most {most}"
        )


async def recover(pool: ModelPool, engine_id: str) -> None:
    """Stop what stands in the slot, by force, and start its next generation."""
    slot = pool.slot(engine_id)
    replica = slot.replica
    if replica is not None and replica.state is ReplicaState.READY:
        raise RoleOperationRefusedError(f"{engine_id} serves; drain or scale its model to stop it")
    await slot.end_revival()
    if slot not in pool.slots:
        await pool.clear(slot, "it was scaled away")
        return
    if replica is not None and replica.is_alive:
        replica.retire("it is replaced on an operator's word")
        pool.role.publish()
    slot.restart = True
    await pool.recovery.bury(slot)
    if not pool.role.serves:
        return
    try:
        await pool.create([slot])
    except (PhalanxError, OSError):
        if slot.is_dead and pool.model.fault_tolerance_enabled:
            pool.recovery.begin(slot)
        raise


async def unblock(pool: ModelPool, engine_id: str, holds: frozenset[Tag] | None) -> None:
    """Put a blocked replica to sleep for certain, and wake it again if the role is awake."""
    slot = pool.slot(engine_id)
    replica = slot.replica
    if replica is None or not replica.is_alive:
        await _bury(pool, slot, holds)
        return
    if not replica.blocked:
        return
    await pool.lifecycle.find_out(replica, holds)
    await pool.lifecycle.sleep(replica)
    if pool.role.wanted and not pool.role.drained:
        await pool.lifecycle.wake(replica, pool.role.wanted)


async def _bury(pool: ModelPool, slot: Slot, holds: frozenset[Tag] | None) -> None:
    try:
        if slot.replica is None and slot.remains:
            await slot.end_revival()
            await pool.clear(slot, "it did not start")
        await pool.recovery.bury(slot)
    except RoleOperationFailedError:
        if holds is None or holds:
            raise
        pool.recovery.write_off(slot)


async def _add(pool: ModelPool, count: int) -> None:
    slots = [pool.add_slot() for _ in range(count)]
    try:
        for slot in slots:
            await slot.end_revival()
        await pool.create(slots)
    except BaseException:
        for slot in slots:
            pool.drop_slot(slot)
        raise


async def _remove(pool: ModelPool, slots: list[Slot]) -> None:
    pool.lifecycle.withdraw(slot.replica for slot in slots if slot.replica is not None)

    async def remove(slot: Slot) -> None:
        await pool.remove(slot)
        pool.drop_slot(slot)
        pool.role.publish()

    raise_failures(
        f"model {pool.model.name!r} is not scaled",
        await all_to_their_ends(remove(slot) for slot in slots),
    )
