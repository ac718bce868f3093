"""Starts, wakes, drains, puts to sleep and stops the pools of a role, all replicas at once."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, suppress

from phalanx.errors import PhalanxError, RoleOperationFailedError
from phalanx.roles.contracts import ALL_TAGS, Tag
from phalanx.roles.pool import ModelPool
from phalanx.roles.replica import Replica, ReplicaLostError
from phalanx.roles.role_state import RoleState
from phalanx.roles.slot import Slot
from phalanx.roles.together import all_or_first_error, all_to_their_ends, raise_failures
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.schema.roles import Ownership

Act = Coroutine[object, object, None]


async def start(role: RoleState, pools: Iterable[ModelPool]) -> None:
    """A first generation in every slot that has none, of all models together, or none at all."""
    role.wanted, role.drained = ALL_TAGS, False
    async with AsyncExitStack() as undo:
        makes, made = [], []
        for pool in pools:
            slots = [slot for slot in pool.slots if slot.replica is None]
            if slots:
                made.append(await undo.enter_async_context(pool.candidates()))
                makes.append(made[-1].make(slots))
        await all_or_first_error(makes)
        for candidates in made:
            candidates.check_alive()
        for candidates in made:
            candidates.commit()
    role.publish()


async def activate(role: RoleState, pools: Iterable[ModelPool], tags: frozenset[Tag]) -> None:
    """Have these tags resident, beside those that were asked for before, and serve with all."""
    pools = tuple(pools)
    before, role.wanted, role.drained = role.wanted, role.wanted | tags, False
    failures = list(
        await all_to_their_ends(act for pool in pools for act in _wakes(pool, role.wanted))
    )
    if role.serves:
        failures += _unserved(pools, failures)
    if failures and not any(pool.holds_anything for pool in pools):
        role.wanted = before
    raise_failures(f"role {role.spec.role!r} is not awake everywhere", failures)


async def drain(role: RoleState, pools: Iterable[ModelPool]) -> None:
    """Serve nothing, and run nothing, with all memory kept."""
    pools = tuple(pools)
    role.drained = role.wanted == ALL_TAGS
    _withdraw(pools)
    failures = await all_to_their_ends(
        _drain(pool, replica) for pool in pools for replica in pool.replicas(ReplicaState.DRAINING)
    )
    raise_failures(f"role {role.spec.role!r} is not drained everywhere", failures)


async def deactivate(role: RoleState, pools: Iterable[ModelPool]) -> None:
    """Hold nothing, for certain. Of a role that takes turns, replicas that stay go on serving."""
    pools = tuple(pools)
    role.wanted, role.drained = frozenset(), False
    going = [(pool, slot) for pool in pools for slot in pool.occupied_slots if not pool.stays(slot)]
    _withdraw_replicas((pool, slot.replica) for pool, slot in going if slot.replica is not None)
    failures = await all_to_their_ends(_to_sleep(pool, slot) for pool, slot in going)
    raise_failures(f"role {role.spec.role!r} is not asleep everywhere", failures)


async def stop(role: RoleState, pools: Iterable[ModelPool], drain_timeout_s: float | None) -> None:
    """Drain and remove everything, and delete the placement groups that the manager owns."""
    pools = tuple(pools)
    for slot in [slot for pool in pools for slot in pool.all_slots]:
        await slot.end_revival()
    _withdraw(pools)
    acts = [pool.remove(slot, drain_timeout_s) for pool in pools for slot in pool.all_slots]
    failures = [
        *await all_to_their_ends(acts),
        *await all_to_their_ends(pool.router.close() for pool in pools),
    ]
    role.publish()
    raise_failures(f"role {role.spec.role!r} is not stopped everywhere", failures)
    own = [each for each in role.backends.placement_groups if each.owner is Ownership.MANAGER]
    undeleted = await all_to_their_ends(group.delete() for group in own)  # nothing runs there now
    raise_failures("placement groups are not deleted", undeleted)


def _withdraw(pools: Iterable[ModelPool]) -> None:
    """Before anything is done to them, everybody is told, by one snapshot of each role."""
    _withdraw_replicas((pool, replica) for pool in pools for replica in pool.replicas())


def _withdraw_replicas(replicas: Iterable[tuple[ModelPool, Replica]]) -> None:
    ready = [(pool, each) for pool, each in replicas if each.state is ReplicaState.READY]
    for _, replica in ready:
        replica.move(ReplicaState.DRAINING)
    for pool, _ in ready[:1]:
        pool.role.publish()


def _wakes(pool: ModelPool, tags: frozenset[Tag]) -> Iterator[Act]:
    """What brings its replicas to hold `tags`, each by itself but those that were never started."""
    unstarted = []
    for slot in pool.slots:
        replica = slot.replica
        if replica is None:
            unstarted.append(slot)
        elif replica.state is ReplicaState.STARTING:
            yield pool.lifecycle.serve(replica)
        elif replica.is_alive and replica.state is not ReplicaState.READY:
            yield pool.lifecycle.wake(replica, tags)
        elif pool.recovery.is_wanted(slot) and not slot.is_revived and pool.role.serves:
            yield _restart(pool, slot)
    if unstarted and pool.role.serves:
        yield pool.create(unstarted)


async def _drain(pool: ModelPool, replica: Replica) -> None:
    # Where it died, nothing runs.
    with suppress(ReplicaLostError):
        await pool.lifecycle.drain(replica)


async def _restart(pool: ModelPool, slot: Slot) -> None:
    try:
        await pool.create([slot])
    except (PhalanxError, OSError):
        pool.recovery.begin(slot)
        raise


async def _to_sleep(pool: ModelPool, slot: Slot) -> None:
    await slot.end_revival()
    replica = slot.replica
    if replica is None or replica.state is ReplicaState.STARTING:
        # One that never served has nothing to keep, and no way to sleep.
        slot.restart = True
        await pool.clear(slot, "it was put to sleep before it served")
    elif not replica.is_alive:
        await pool.recovery.bury(slot)
    elif replica.blocked or replica.state is not ReplicaState.SLEEPING:
        try:
            await pool.lifecycle.sleep(replica)
        except ReplicaLostError:
            # The dead hold nothing, once nothing is left of their processes.
            await slot.end_revival()
            await pool.recovery.bury(slot)


def _unserved(
    pools: Iterable[ModelPool], failures: Iterable[PhalanxError]
) -> Iterator[PhalanxError]:
    """Why models that were woken do not serve, where nothing else has said it."""
    if tuple(failures):
        return
    for pool in pools:
        waits = any(replica.waits for replica in pool.replicas())
        if pool.slots and not waits and pool.shown().state is not ReplicaState.READY:
            states = ", ".join(
                f"{slot.engine_id} is {slot.replica.state if slot.replica else 'not started'}"
                for slot in pool.slots
            )
            yield RoleOperationFailedError(
                f"model {pool.model.name!r} serves nothing: {states}; recover what is dead"
            )
