"""Which part of a bundle each of its users reserves, where a cluster counts reservations."""

from __future__ import annotations

from collections import Counter

from phalanx.schema.job_placement import PlacementPlan

PARTS = 10_000
"""The smallest part that Ray counts is one of so many of a device."""


def shares(plan: PlacementPlan) -> dict[str, float]:
    """By role, and the trainer if it has devices: what it reserves of each of its bundles.

    Over the users of a bundle they sum to at most 1, so that all of them can be there at once, of
    whom one at a time is resident.
    """
    bundles = {user: plan.bundles_of(user) for user in plan.users()}
    num_users = Counter(bundle for mine in bundles.values() for bundle in mine)
    return {
        user: PARTS // max(num_users[bundle] for bundle in mine) / PARTS
        for user, mine in bundles.items()
        if mine
    }
