"""Bundles that groups were given by hand: whether they go with the group, with the nodes and with
one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from phalanx.errors import ConfigurationError
from phalanx.roles.placement.claim import Claim
from phalanx.roles.placement.occupancy import Occupancy
from phalanx.schema.job_placement import ACTOR_GROUP
from phalanx.schema.roles import ModelPlacement, Ownership, PlacementMode

_SHOWN = 8


def given_bundles(claim: Claim, placement: ModelPlacement, mode: PlacementMode) -> tuple[int, ...]:
    """Those of a placement, which are positions in the job's one group.

    Raises `ConfigurationError` where they do not go with the mode or the number of replicas.
    """
    bundles, place = placement.bundle_indices, claim.place
    if mode is PlacementMode.DECOUPLED:
        raise ConfigurationError(
            f"{place}.bundles={shown(bundles)} is given with placement.mode=decoupled, where each"
            " role has a group of its own; leave bundles out, or say placement.mode: split or defer,"
            " where they are those of the job's one group"
        )
    if placement.pg_owner is not Ownership.CONTROLLER:
        raise ConfigurationError(
            f"{place}: pg_owner={placement.pg_owner.value!r} for bundles of the group"
            f" {ACTOR_GROUP!r}, which the controller makes and deletes; say controller, or"
            " placement.mode: decoupled for a group of the role's own"
        )
    twice = [bundle for bundle, count in Counter(bundles).items() if count > 1]
    if twice:
        raise ConfigurationError(
            f"{place}.bundles has {shown(twice)} twice; a rank has a bundle of its own, so name each"
            " once"
        )
    if len(bundles) % claim.size or len(bundles) < claim.size * claim.count:
        raise ConfigurationError(
            f"{place}.bundles has {len(bundles)} bundles for replicas={claim.count} of"
            f" ranks={claim.size}; give {claim.size * claim.count}, or a larger multiple of"
            f" {claim.size} to scale into, or change replicas"
        )
    return bundles


def check_on_nodes(claim: Claim, occupancy: Occupancy) -> None:
    """Refuse bundles that are not there, or on which an engine would straddle nodes."""
    pool = occupancy.num_devices
    outside = [bundle for bundle in claim.given if not 0 <= bundle < pool]
    if outside:
        raise ConfigurationError(
            f"{claim.place}.bundles has {outside[0]}, and the {pool} bundles are 0 to {pool - 1};"
            " choose others, or say more devices in placement.devices_per_node or placement.nodes"
        )
    for first in range(0, len(claim.given), claim.size):
        engine = claim.given[first : first + claim.size]
        fault = _fault(engine, claim.num_nodes, occupancy)
        if fault:
            raise ConfigurationError(
                f"{claim.place}.bundles gives {shown(engine)} to one engine: {fault}; choose"
                " neighbouring bundles of one node, or leave bundles out"
            )


def check_apart(claim: Claim, other: Claim, mode: PlacementMode, phases: Sequence[str]) -> None:
    """Refuse two groups on the same bundle; `phases` are those that they share."""
    both = sorted(set(claim.given) & set(other.given))
    if not both or not phases:
        return
    when = "" if mode is PlacementMode.SPLIT else f" in the same phase ({', '.join(phases)})"
    raise ConfigurationError(
        f"{claim.place}.bundles and {other.place}.bundles both have {shown(both)}{when}, and would"
        f" be resident together, which is not supported; {ways_out(mode)}"
    )


def ways_out(mode: PlacementMode) -> str:
    """What can be done where two want the same devices at the same time."""
    if mode is PlacementMode.DEFER:
        return (
            "give them phases of their own in placement.phases, disjoint bundles (as with"
            " placement.mode: split), or more devices in placement.devices_per_node"
        )
    return (
        "give them disjoint bundles, say placement.mode: defer so that they take turns, or give more"
        " devices in placement.devices_per_node"
    )


def shown(bundles: Sequence[int]) -> str:
    """The first of them."""
    words = ", ".join(map(str, bundles[:_SHOWN]))
    return f"[{words}, ...]" if len(bundles) > _SHOWN else f"[{words}]"


def _fault(engine: Sequence[int], num_nodes: int, occupancy: Occupancy) -> str:
    """Why an engine cannot stand there, or nothing."""
    nodes = [occupancy.node_of(engine[0]), occupancy.node_of(engine[-1])]
    if num_nodes == 1:
        if nodes[0] != nodes[1]:
            border = occupancy.node(nodes[1]).start
            return f"it would straddle nodes, as a node begins at bundle {border}"
        if list(engine) != list(range(engine[0], engine[0] + len(engine))):
            return "its bundles are not neighbours in ascending order"
        return ""
    each = len(engine) // num_nodes
    before = -1
    for first in range(0, len(engine), each):
        position = occupancy.node_of(engine[first])
        if list(engine[first : first + each]) != list(occupancy.node(position)):
            return f"nodes={num_nodes}, and it does not fill whole nodes"
        if position <= before:
            return "its nodes are not in ascending order"
        before = position
    return ""
