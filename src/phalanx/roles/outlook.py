"""Whether a role that does not serve will by itself, and what to do where it will not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from phalanx.roles.pool import ModelPool
from phalanx.roles.role_state import RoleState
from phalanx.roles.slot import Slot
from phalanx.routing.roles.snapshot import ReplicaState


@dataclass(frozen=True)
class Absence:
    """Why a role does not serve. `remedy` is what its operator can do about it; empty where it is on
    its way by itself.
    """

    words: str
    remedy: str = ""


def absence(role: RoleState, pools: Iterable[ModelPool]) -> Absence | None:
    """None where every model serves."""
    words, remedies = [], []
    for pool in pools:
        state = pool.shown().state
        if state is ReplicaState.READY:
            continue
        detail = next(_details(pool), "")
        words.append(f"model {pool.model.name!r} is {state.value}" + detail)
        if remedy := _remedy(role, pool):
            remedies.append(remedy)
    return Absence(", ".join(words), ", ".join(dict.fromkeys(remedies))) if words else None


def _details(pool: ModelPool) -> Iterator[str]:
    """Why a replica gets no requests, where one has said so."""
    for slot in pool.slots:
        replica = slot.replica
        if replica is not None and (why := replica.blocked or replica.detail):
            yield f" ({slot.engine_id}: {why})"


def _remedy(role: RoleState, pool: ModelPool) -> str:
    name = f"{role.spec.role}/{pool.model.name}"
    if role.closed:
        return "its job is ending"
    if not pool.slots:
        return f"`phalanx scale {name} 1` gives it a replica"
    if not role.serves:
        return f"`phalanx wake {role.spec.role}` has it serve"
    groups = pool.model.engine_groups
    for worker_type in {group.worker_type for group in groups}:
        slots = [each for each in pool.slots if groups[each.group_index].worker_type is worker_type]
        if not any(_serves(each) or _comes(role, pool, each) for each in slots):
            return _what_brings(role, slots[0]) if slots else ""
    return ""


def _serves(slot: Slot) -> bool:
    return slot.replica is not None and slot.replica.state is ReplicaState.READY


def _comes(role: RoleState, pool: ModelPool, slot: Slot) -> bool:
    """Of a role that is to serve."""
    is_worked_on = role.lock.locked() or slot.is_revived
    replica = slot.replica
    if replica is None:
        # Before the role's own start nothing has been tried yet.
        return is_worked_on or slot.generation == 0
    if replica.blocked:
        return False
    return is_worked_on and (replica.is_alive or pool.recovery.is_wanted(slot))


def _what_brings(role: RoleState, slot: Slot) -> str:
    """What has a replica serve that nobody is at work on."""
    name, replica = role.spec.role, slot.replica
    if replica is None or replica.blocked or not replica.is_alive:
        return f"`phalanx recover {name}/{slot.engine_id}` replaces it"
    if replica.waits:
        model = slot.engine_id.rpartition("/")[0]
        return f"bring it weights first, at POST /v1/roles/{name}/models/{model}/weights of the control_url"
    return f"`phalanx wake {name}` has it serve"
