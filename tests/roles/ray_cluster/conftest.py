from __future__ import annotations

from collections.abc import Iterator

import pytest

from phalanx.roles.ray_cluster.cluster import RayCluster
from tests.roles.ray_cluster.clusters import Machines, connected

DEVICES = {"127.0.0.2": 4, "127.0.0.3": 4}


@pytest.fixture(scope="package")
def machines_and_cluster() -> Iterator[tuple[Machines, RayCluster]]:
    with connected(DEVICES) as both:
        yield both


@pytest.fixture
def machines(machines_and_cluster: tuple[Machines, RayCluster]) -> Machines:
    return machines_and_cluster[0]


@pytest.fixture
def cluster(machines_and_cluster: tuple[Machines, RayCluster]) -> Iterator[RayCluster]:
    """With all of its devices free, before and after."""
    assert sum(machine.free for machine in machines_and_cluster[1].machines()) == 8
    yield machines_and_cluster[1]
