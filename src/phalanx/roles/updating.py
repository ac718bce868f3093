"""Brings new weights to the replicas of a model, and learns of those that a trainer has put in."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.errors import (
    PhalanxError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)
from phalanx.roles.calls import CALL_TIMEOUT_S, Deadline, insist
from phalanx.roles.contracts import EngineCallError
from phalanx.roles.pool import ModelPool
from phalanx.roles.replica import Replica, ReplicaLostError
from phalanx.roles.together import all_to_their_ends, raise_failures
from phalanx.roles.weights import WeightTarget, holds_weights
from phalanx.routing.roles.snapshot import ReplicaState

_TAKES_WEIGHTS = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.ONLOADING)


async def update(pool: ModelPool, target: WeightTarget) -> None:
    """Load `target` into every replica that has memory for it; the others get it when they wake.

    Where all of them that live refuse it nothing has changed. Otherwise those that did not take it
    serve no more: they are blocked, and those that died meanwhile come back with it.
    """
    before, pool.weights.target = pool.weights.target, target
    held = {replica: replica.weights for replica in _asked(pool)}
    failed: dict[Replica, EngineCallError] = {}

    async def bring(replica: Replica) -> None:
        try:
            async with replica.living():
                await pool.weights.sync(replica)
        except ReplicaLostError:
            return
        except EngineCallError as error:
            failed[replica] = error
            if replica.weights != held[replica]:
                _take_out(pool, {replica: error})

    await all_to_their_ends(bring(replica) for replica in held)
    alive = [replica for replica in held if replica.is_alive]
    if alive and all(each in failed and each.weights == held[each] for each in alive):
        pool.weights.target = before
        text = "; ".join(str(error) for error in failed.values())
        raise RoleOperationFailedError(f"nothing has changed: {text}")
    _take_out(pool, failed)
    served = await _serve(pool, [replica for replica in held if replica not in failed])
    failures = [*failed.values(), *served]
    raise_failures(f"version {target.version!r} is not on every replica", failures)


Word = Mapping[Replica, int]
"""Given of replicas: how often their weights had been lost by then, for it means none since."""


def word(pool: ModelPool) -> Word:
    """One that is given now."""
    return {replica: replica.num_losses for replica in pool.replicas()}


async def confirm(pool: ModelPool, version: str, given: Word) -> None:
    """A trainer has put `version` into the replicas, which was its word when it was `given`. Where
    one that serves has another, or none has it, nothing changes.
    """
    meant = [each for each in _asked(pool) if given.get(each) == each.num_losses]
    said = {replica: await _said(replica) for replica in meant}
    wrong = [
        f"{replica.engine_id} says {its!r}"
        for replica, its in said.items()
        if its != version and replica.state is ReplicaState.READY
    ]
    if wrong or version not in said.values():
        raise RoleOperationRefusedError(
            f"version {version!r} of model {pool.model.name!r} is not there:"
            f" {', '.join(wrong) or 'no replica that runs says it has it'}; put it in first"
        )
    target = pool.weights.target
    if target is None or target.version != version:
        pool.weights.target = WeightTarget(version, None)
    having = [replica for replica, its in said.items() if its == version and replica.is_asked]
    for replica in having:
        replica.has_weights(version)
    raise_failures(f"not every replica serves version {version!r}", await _serve(pool, having))


def _asked(pool: ModelPool) -> list[Replica]:
    return [
        replica
        for replica in pool.replicas(*_TAKES_WEIGHTS)
        if replica.is_asked and holds_weights(replica)
    ]


async def _said(replica: Replica) -> str | None:
    try:
        async with replica.living():
            return await insist(
                replica.engine.weight_version,
                f"{replica.engine_id}: its weight version",
                Deadline(CALL_TIMEOUT_S),
            )
    except (EngineCallError, ReplicaLostError):
        return None


def _take_out(pool: ModelPool, failed: Mapping[Replica, EngineCallError]) -> None:
    """Those that may hold other weights than their model get no requests any more."""
    asked = [replica for replica in failed if replica.is_asked]
    pool.lifecycle.withdraw(asked)
    for replica in asked:
        if replica.state is ReplicaState.DRAINING:
            replica.block(f"it did not get its model's weights: {failed[replica]}")
        else:
            replica.detail = str(failed[replica])


async def _serve(pool: ModelPool, replicas: list[Replica]) -> tuple[PhalanxError, ...]:
    """Those that had only waited for weights serve now, if the role does."""
    waiting = [each for each in replicas if each.is_asked and each.state is not ReplicaState.READY]
    failures: tuple[PhalanxError, ...] = ()
    if pool.role.serves:
        failures = await all_to_their_ends(pool.lifecycle.serve(replica) for replica in waiting)
    else:
        for replica in waiting:
            replica.waits, replica.detail = False, ""
    pool.role.publish()
    return failures
