"""Deals devices to claims: hand-given bundles first, then the first free ones that fit, in the order
of the roles. Nobody gets a device that somebody has in a phase of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from phalanx.errors import ConfigurationError
from phalanx.roles.placement.claim import TRAINER_KEY, Claim, GroupKey
from phalanx.roles.placement.given_bundles import check_apart, check_on_nodes, ways_out
from phalanx.roles.placement.occupancy import Occupancy
from phalanx.schema.job_placement import ClusterSpec
from phalanx.schema.roles import PlacementMode

Turns = Mapping[str, Sequence[str]]
"""By role, and the trainer, in the order of their first phases: those in which it may be resident."""
ALWAYS = ("",)
"""The turns of everybody where nobody gives way."""
Devices = dict[GroupKey, Sequence[int]]


def lay_out(
    claims: Sequence[Claim], cluster: ClusterSpec, turns: Turns, mode: PlacementMode
) -> Devices:
    """The devices of each claim, engine by engine, as numbers over all nodes.

    Raises `ConfigurationError` where they do not fit.
    """
    check_capacity(claims, cluster.num_devices, turns, mode)
    unplaced = None
    for order, tight in _orders(claims, turns):
        occupancy, found = _with_given(claims, cluster, turns, mode)
        unplaced = _deal(order, occupancy, turns, found, tight)
        if unplaced is None:
            return found
    assert unplaced is not None, "else the loop has returned"
    raise _does_not_fit(unplaced, claims, cluster, mode)


def _orders(claims: Sequence[Claim], turns: Turns) -> Iterator[tuple[list[Claim], bool]]:
    """The order that people expect, and those that leave fewer gaps: neighbours in time one after
    the other, large engines first, these also into the smallest gaps. The trainer, which is not of
    one piece, is always the last.
    """
    free = [claim for claim in claims if not claim.given]
    order = {user: number for number, user in enumerate(turns)}
    yield free, False
    yield sorted(free, key=lambda claim: (claim.key == TRAINER_KEY, order[claim.user])), False
    large_first = sorted(free, key=lambda claim: (claim.key == TRAINER_KEY, -claim.size))
    yield large_first, False
    yield large_first, True


def check_capacity(claims: Sequence[Claim], pool: int, turns: Turns, mode: PlacementMode) -> None:
    """Refuse more devices than there are, at any time."""
    for phase, needed in needs(claims, turns).items():
        total = sum(needed.values())
        if total <= pool:
            continue
        who = ", ".join(f"{user} {count}" for user, count in needed.items())
        what = f"phase {phase!r} of placement.phases" if phase else f"placement.mode={mode.value}"
        raise ConfigurationError(
            f"{what} needs {total} devices at the same time ({who}), and placement.nodes have"
            f" {pool}; give fewer replicas or trainer_devices, or {_more(mode, needed, pool)}"
        )


def needs(claims: Sequence[Claim], turns: Turns) -> dict[str, dict[str, int]]:
    """By phase and user, the number of devices."""
    needed: dict[str, dict[str, int]] = {}
    for claim in claims:
        for phase in turns[claim.user]:
            of_phase = needed.setdefault(phase, {})
            of_phase[claim.user] = of_phase.get(claim.user, 0) + claim.num_devices
    return needed


def _more(mode: PlacementMode, needed: Mapping[str, int], pool: int) -> str:
    devices = f"{sum(needed.values()) - pool} more in placement.nodes or placement.devices_per_node"
    if len(needed) == 1:
        return devices
    if mode is PlacementMode.DEFER:
        return f"{devices}, or let them take turns in phases of their own"
    return f"{devices}, or say placement.mode: defer so that they take turns"


def _with_given(
    claims: Sequence[Claim], cluster: ClusterSpec, turns: Turns, mode: PlacementMode
) -> tuple[Occupancy, Devices]:
    phases = dict.fromkeys(phase for mine in turns.values() for phase in mine)
    occupancy, found = Occupancy(cluster, list(phases)), Devices()
    earlier: list[Claim] = []
    for claim in claims:
        if not claim.given:
            continue
        check_on_nodes(claim, occupancy)
        mine = turns[claim.user]
        if not occupancy.is_free(mine, claim.given):
            for other in earlier:
                shared = [phase for phase in mine if phase in turns[other.user]]
                check_apart(claim, other, mode, shared)
        occupancy.take(mine, claim.given)
        found[claim.key] = claim.given
        earlier.append(claim)
    return occupancy, found


def _deal(
    order: Sequence[Claim], occupancy: Occupancy, turns: Turns, found: Devices, tight: bool
) -> Claim | None:
    """The first claim that finds no room, if any."""
    for claim in order:
        mine = turns[claim.user]
        if claim.key == TRAINER_KEY:
            devices = occupancy.anywhere(mine, claim.size)
        else:
            devices = occupancy.engines(mine, claim.size, claim.count, claim.num_nodes, tight=tight)
        if devices is None:
            return claim
        occupancy.take(mine, devices)
        found[claim.key] = devices
    return None


def _does_not_fit(
    claim: Claim, claims: Sequence[Claim], cluster: ClusterSpec, mode: PlacementMode
) -> ConfigurationError:
    wanted = f"{claim.place}: replicas={claim.count} of ranks={claim.size}"
    if any(each.given for each in claims):
        return ConfigurationError(
            f"{wanted} find no room beside the bundles that others were given; {ways_out(mode)}"
        )
    sizes = sorted({node.num_devices for node in cluster.nodes})
    why = f"an engine does not straddle nodes, which have {' or '.join(map(str, sizes))} each"
    if mode is PlacementMode.DEFER:
        why += ", and a role has the same bundles in all of its phases"
    by_hand = "" if mode is PlacementMode.DECOUPLED else ", or bundles by hand"
    return ConfigurationError(
        f"{wanted} do not fit: there are devices enough, but {why}; choose ranks that divide a"
        f" node's devices, give fewer replicas, more nodes in placement.nodes{by_hand}"
    )
